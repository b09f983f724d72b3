"""Reports, samples and trackers: a line a step after any restart, and samples that say what was asked and paid."""

import json
import sys
from pathlib import Path

import pytest

from rollmesh.errors import ConfigError
from rollmesh.trainer.service.run_log import (
    StepRecords,
    append_lines,
    build_trackers,
    decoder,
    flatten,
    sample_completions,
)
from rollmesh.types import Batch, OutcomeKind, RewardOutcome

from ....kit.made_batches import batch_of, trajectory
from ....kit.records import policy_tokens
from ....kit.run_files import run_config


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


def batch(step: int) -> Batch:
    """Four groups of three members, whose answer is 1 2 3."""
    segment, outcome = policy_tokens([1, 2, 3], 4), RewardOutcome(kind=OutcomeKind.SCORED, value=0.5)
    names = [[f"e0-{group}.{member}" for member in range(3)] for group in range(4)]
    made = ([trajectory(name, [segment], 0.25, prompt=2, outcome=outcome) for name in group] for group in names)
    return batch_of(*made, train_step=step)


def test_samples_come_from_different_groups_and_from_other_members_each_step(tmp_path: Path) -> None:
    decode = decoder(tmp_path)
    first, second = (sample_completions(batch(step), 2, decode) for step in (1, 2))
    assert [s["trajectory_id"].split(".")[0] for s in first] == ["e0-0", "e0-2"]
    assert {s["trajectory_id"] for s in first}.isdisjoint(s["trajectory_id"] for s in second)


def test_a_sample_says_what_was_asked_answered_and_paid(tmp_path: Path) -> None:
    asked = batch(3)
    (sample,) = sample_completions(asked, 1, decoder(tmp_path))
    assert sample == {
        "train_step": 3,
        "trajectory_id": "e0-0.0",
        "prompt": " ".join(map(str, asked.groups[0].trajectories[0].prompt.token_ids)),
        "completion": "1 2 3",
        "token_count": 3,
        "finish_reason": "stop",
        "outcome": "scored",
        "reward": 0.5,
        "shaped_reward": 0.25,
        "policy_versions": [4],
    }


def test_nested_numbers_get_one_name_each() -> None:
    record = {"loss": 1, "batch": {"reward": {"mean": 0.5}, "text": "x"}, "ok": True, "many": [1, 2], "none": None}
    assert flatten(record) == {"loss": 1.0, "batch/reward/mean": 0.5}


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in ("torch.utils.tensorboard.writer", "torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"rollmesh\[{name}\]"):
        build_trackers(run_config(f"folder={tmp_path} telemetry.trackers=[{name}]"))
