"""One command trains a real model through real services, and nothing is lost or trained twice."""

from __future__ import annotations

import json
import signal


def audited(line) -> dict:
    return json.loads((line.folder / "audit.json").read_text())


def test_one_command_trains_evaluates_audits_and_reports(small_run) -> None:
    line = small_run(evaluation={"prompt_count": 32, "every_versions": 3})
    done = line.run("up", str(line.run_file))
    assert done.returncode == 0, done.stdout + done.stderr

    steps = line.json_lines("metrics.jsonl")
    assert [step["train_step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [e["policy_version"] for e in line.json_lines("evaluations.jsonl")] == [0, 3, 6]
    audit = audited(line)
    assert audit["green"]
    assert audit["lost"] == []
    assert audit["trained_twice"] == {}
    assert audit["staleness_violations"] == []
    assert audit["rescoring"]["largest_gap"] <= 1e-4
    assert (line.folder / "report.html").stat().st_size > 10_000

    status = line.run("status", str(line.folder), "--json")
    assert json.loads(status.stdout)["view"]["trained_step"] == 6
    explained = line.run("explain", str(line.folder), "6", "--json")
    assert explained.returncode == 0, explained.stderr
    again = line.run("audit", str(line.folder), "--json")
    assert again.returncode == 0, again.stderr


def test_ctrl_c_drains_and_a_second_start_continues_the_run(started, wait_until) -> None:
    line, process = started()
    wait_until(lambda: len(line.json_lines("metrics.jsonl")) >= 2, "two train steps", process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    before = len(line.json_lines("metrics.jsonl"))
    assert before < 6

    done = line.run("up", str(line.run_file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [step["train_step"] for step in line.json_lines("metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert audited(line)["green"]


def test_a_second_launcher_on_the_same_folder_is_refused(started, wait_until) -> None:
    line, process = started()
    wait_until(lambda: (line.folder / "config.yaml").exists(), "the first launcher", process)
    second = line.run("up", str(line.run_file))
    assert second.returncode == 2
    assert "another launcher" in second.stderr
