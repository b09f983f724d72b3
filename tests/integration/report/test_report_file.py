"""report.html: the page of a whole or partial run in one file, which fetches nothing and runs no text of the run."""

import base64
import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmesh.gateway.main import PAGE
from rollmesh.report.recorded_run import REPORT_FILE
from rollmesh.report.report_file import write_report
from rollmesh.report.view.recorded_overview import MOST_SAMPLES

from .made_checkpoints import STEPS, MadeRun
from .made_run import answers_of

PLOTTED = {
    "reward_mean",
    "outcome_mean",
    "evaluation",
    "response_length_mean",
    "response_length_p90",
    "truncated_share",
    "staleness_mean",
    "staleness_max",
    "off_policy_token_share",
    "effective_sample_share",
    "clipped_share",
    "entropy",
    "kl_behavior",
    "logprob_gap_max",
    "generated_tokens_per_second",
    "trained_tokens_per_second",
}
"""Curves that the report has of every run."""


def result_of(folder: Path) -> dict[str, Any]:
    """The result of the run on its page, which is written for it."""
    assert write_report(folder) == folder / REPORT_FILE
    result: dict[str, Any] = answers_of(folder / REPORT_FILE)["events"]["overview"]["result"]
    return result


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> Path:
    """A complete run whose page is written; only to be read."""
    folder = make_run(tmp_path_factory.mktemp("complete") / "run", steps=12)
    write_report(folder)
    return folder


def test_the_page_has_all_its_files_inside_and_fetches_nothing(complete: Path) -> None:
    text = (complete / REPORT_FILE).read_text(encoding="utf-8")
    named = re.findall(r'<(?:script|link|img)\b[^>]*(?:src|href)="([^"]*)"', text)
    assert all(source.startswith("data:") for source in named)
    modules = json.loads(re.findall(r'<script type="importmap">(.*?)</script>', text)[0])["imports"]
    assert modules.keys() == {f"page/{file.name}" for file in PAGE.glob("*.js")}
    for url in modules.values():
        module = base64.b64decode(url.removeprefix("data:text/javascript;base64,")).decode()
        assert set(re.findall(r'from "(.*?)"', module)) <= modules.keys()
    assert not re.search(r"https?://(?!www\.w3\.org)", re.sub(r'id="recorded">.*?</script>', "", text, flags=re.S))


def test_every_plot_and_every_table_of_a_complete_run_has_data(complete: Path) -> None:
    answers = answers_of(complete / REPORT_FILE)
    curves = {one["name"]: one for one in answers["series"]["series"]}
    overview, result = answers["events"]["overview"], answers["events"]["overview"]["result"]
    assert {name for name, one in curves.items() if one["x"]} >= PLOTTED
    assert len(result["history"]["time"]) > 1 and result["history"]["running"] and result["history"]["trajectories"]
    assert [table["name"] for table in result["tables"]] == ["evaluations", "versions"]
    for table in result["tables"]:
        assert {len(row) for row in table["rows"]} == {len(table["heads"])}
    text = json.dumps(result)
    for word in ("0.7900", "straggler_timeout", "logs/trainer-0.log", "audit.json: not written"):
        assert word in text, word
    assert "groups_per_batch" in answers["config"]["yaml"]
    assert sum(bar["count"] for bar in overview["staleness"]["trained"])
    assert overview["staleness"]["bound"] == 4, "that of the preset: the run file leaves it null"


def test_trained_trajectories_are_inside_token_by_token(audited: MadeRun) -> None:
    write_report(audited.folder)
    answers = answers_of(audited.folder / REPORT_FILE)
    steps = answers["batches"]["train_steps"]
    assert steps
    for step in steps:
        first = answers[f"batches/{step}"]["items"][0]
        detail = answers[f"trajectories/{first['id']}"]
        assert detail["train_step"] == step
        tokens = sum(len(run["token_ids"]) for run in detail["runs"])
        assert tokens == detail["prompt_tokens"] + detail["response_tokens"]


def test_a_run_that_was_moved_keeps_its_trajectories_and_their_text(audited: MadeRun, tmp_path: Path) -> None:
    moved = MadeRun(shutil.copytree(audited.folder, tmp_path / "moved", symlinks=True))
    recorded = yaml.safe_load((moved.folder / "config.yaml").read_text(encoding="utf-8"))
    recorded |= {"folder": str(tmp_path / "gone"), "model": {"path": "models/gone"}}
    (moved.folder / "config.yaml").write_text(yaml.safe_dump(recorded), encoding="utf-8")
    write_report(moved.folder)
    answers = answers_of(moved.folder / REPORT_FILE)
    details = [detail for path, detail in answers.items() if path.startswith("trajectories/")]
    assert answers["batches"]["train_steps"] and details
    for run in (run for detail in details for run in detail["runs"]):
        assert [text.strip() for text in run["texts"]] == [f"w{i}" for i in run["token_ids"]]


def test_damaged_batch_files_take_nothing_else_from_the_page(audited: MadeRun) -> None:
    *_, odd, torn = sorted((audited.folder / "checkpoints" / "batches").glob("*.pb"))
    torn.write_bytes(torn.read_bytes()[:-1])
    first = audited.store.read_batch(STEPS - 1).groups[0].trajectories[0]
    content = bytearray(odd.read_bytes())
    content[content.index(first.response_ids[:2].tobytes()) + 3] ^= 1  # no id of the vocabulary
    shaped_reward = bytes([8 << 3 | 1]) + struct.pack("<d", 1.0)  # field 8 of trajectory.proto
    content[content.index(shaped_reward) + 8] ^= 0x40  # infinite
    odd.write_bytes(content)
    write_report(audited.folder)
    answers = answers_of(audited.folder / REPORT_FILE)
    assert answers["batches"]["train_steps"] == list(range(STEPS - 1, 0, -1))
    rows = answers[f"batches/{STEPS - 1}"]["items"]
    assert [row["reward"] for row in rows].count(None) == 1
    assert rows[0]["preview"].startswith(str(first.response_ids[0] + (1 << 24)))


def test_text_from_the_run_cannot_inject_markup(complete: Path) -> None:
    text = (complete / REPORT_FILE).read_text(encoding="utf-8")
    assert "<script>alert" not in text
    samples = answers_of(complete / REPORT_FILE)["events"]["overview"]["result"]["samples"]
    assert "<script>alert(1)</script>" in json.dumps(samples)


def test_an_empty_folder_still_gets_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    result = result_of(tmp_path)
    missing = " ".join(result["missing"])
    for name in ("metrics.jsonl", "timeline.jsonl", "evaluations.jsonl", "samples.jsonl", "config.yaml", "audit.json"):
        assert name in missing
    assert result["remarks"][0]["text"] == "No train step has been recorded." and result["remarks"][0]["bad"]
    assert result["history"] is None and result["tables"] == []


def test_a_long_run_stays_a_small_file(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    write_report(make_run(tmp_path / "day", steps=400, seconds=20.0))
    assert (tmp_path / "day" / REPORT_FILE).stat().st_size < 2_000_000


def test_many_and_long_completions_are_thinned_out_and_shortened_also_without_metrics(run_folder: Path) -> None:
    line = '{"train_step": %d, "prompt": "p", "completion": "' + "x" * 10_000 + '", "reward": 1}\n'
    (run_folder / "samples.jsonl").write_text("".join(line % i for i in range(200)), encoding="utf-8")
    (run_folder / "metrics.jsonl").unlink()
    result = result_of(run_folder)
    assert result["history"]["running"] and "metrics.jsonl: not written" in result["missing"]
    assert len(result["samples"]) <= MOST_SAMPLES and result["samples"][-1]["train_step"] == 199
    assert all("more characters" in sample["completion"] for sample in result["samples"])


def test_writing_again_replaces_the_page_and_leaves_nothing_behind(tmp_path: Path) -> None:
    pages = []
    for steps in (1, 2):
        (tmp_path / "metrics.jsonl").write_text("".join(f'{{"train_step": {s}}}\n' for s in range(steps)))
        moments = "".join(f'{{"t": {second}, "generators": []}}\n' for second in range(400))
        (tmp_path / "timeline.jsonl").write_text(moments, encoding="utf-8")
        pages.append(write_report(tmp_path).read_text(encoding="utf-8"))
        assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "timeline.jsonl", REPORT_FILE}
    assert pages[0] != pages[1]
