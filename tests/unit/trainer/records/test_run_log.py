"""metrics.jsonl and samples.jsonl: each train step once, whatever died."""

from __future__ import annotations

import json
from pathlib import Path

from rollmesh.trainer.records.run_log import StepRecords, append_lines


def steps(file: Path) -> list[int]:
    return [json.loads(line)["train_step"] for line in file.read_text().splitlines()]


def test_a_restart_forgets_the_steps_that_it_replays(tmp_path: Path) -> None:
    records = StepRecords(tmp_path)
    for step in range(1, 6):
        records.append({"train_step": step}, [{"train_step": step, "trajectory_id": f"a{step}"}])
    records.tidy(3)
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert steps(tmp_path / "samples.jsonl") == [1, 2, 3]
    records.append({"train_step": 4, "again": True}, [])
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]


def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    records = StepRecords(tmp_path)
    for torn in (b'{"train_step": 2, "lo', b'{"train_step": 2}', b"\xff\xfe\n", b"[2]\n", b"\n"):
        file.write_bytes(b'{"train_step": 1}\n' + torn)
        records.tidy(9)
        assert file.read_bytes() == b'{"train_step": 1}\n'


def test_a_step_that_was_written_twice_keeps_its_newest_line_and_all_its_samples(tmp_path: Path) -> None:
    records = StepRecords(tmp_path)
    samples = [{"train_step": 1, "trajectory_id": name} for name in ("a", "b")]
    records.append({"train_step": 1, "n": 1}, samples)
    records.append({"train_step": 1, "n": 2}, samples)
    records.tidy(1)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"train_step": 1, "n": 2}
    ]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2


def test_tidying_what_is_tidy_leaves_the_file_alone(tmp_path: Path) -> None:
    records = StepRecords(tmp_path)
    records.append({"train_step": 1}, [])
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    records.tidy(1)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before


def test_the_newest_reports_are_ascending_readable_and_not_of_later_steps(tmp_path: Path) -> None:
    records = StepRecords(tmp_path)
    assert records.newest(3, 9) == []
    for step in (1, 2, 3, 4, 3):
        records.append({"train_step": step}, [])
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"train_step": 4, "lo')
    assert records.newest(99, 3) == [{"train_step": step} for step in (1, 2, 3)]
    assert records.newest(3, 9) == [{"train_step": step} for step in (3, 4)]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    append_lines(tmp_path / "x.jsonl", [{"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -0.0}}])
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"a": None, "b": [None, 1.5], "c": {"d": 0.0}}
