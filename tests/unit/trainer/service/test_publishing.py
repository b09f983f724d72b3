"""Canaries, the versions that are kept, and what the queue keeps of a step."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from rollmesh.errors import ConfigError, TrainingDiverged
from rollmesh.gateway.curves import EVALUATION, Curves
from rollmesh.step_metrics import curves
from rollmesh.trainer.service.publishing import canary_count, canary_sequences, kept_policies, scored_canary
from rollmesh.trainer.service.step_summaries import reported

from ....kit.run_files import run_config


def test_the_canary_is_the_same_for_every_policy_and_within_the_vocabulary() -> None:
    first, second = canary_sequences(50), canary_sequences(50)
    assert len(first) == 8
    for left, right in zip(first, second, strict=True):
        assert np.array_equal(left, right)
        assert left.dtype == np.int32
        assert len(left) >= 2
        assert left.min() >= 0
        assert left.max() < 50


def test_only_a_large_model_on_a_cpu_has_fewer_canary_sequences_and_they_are_the_first_ones() -> None:
    assert canary_count(99_999_999, "cpu") == canary_count(10**11, "cuda") == 8
    count = canary_count(100_000_000, "cpu")
    assert count == 2
    few = canary_sequences(50, count)
    assert [ids.tolist() for ids in few] == [ids.tolist() for ids in canary_sequences(50)[:2]]


@pytest.mark.parametrize(
    ("state_every_steps", "source", "kept"), [(1, "sampler", 4), (1, "snapshot", 9), (3, "snapshot", 11)]
)
def test_the_snapshot_source_keeps_every_version_that_a_batch_or_its_replay_after_a_crash_may_name(
    state_every_steps: int, source: str, kept: int
) -> None:
    checkpoints = f"checkpoints.keep_last=4 checkpoints.state_every_steps={state_every_steps}"
    fields = f"schedule.max_staleness=7 trainer.algorithm.old_logprobs={source} {checkpoints}"
    assert kept_policies(run_config(fields)) == kept


@pytest.mark.parametrize(
    ("train_step", "error", "remedy"),
    [(0, ConfigError, "model.path: .*use another checkpoint"), (3, TrainingDiverged, "lower trainer.learning_rate")],
)
def test_only_a_trained_policy_is_blamed_on_the_learning_rate(
    train_step: int, error: type[Exception], remedy: str
) -> None:
    sequences = canary_sequences(40, 2)
    logprobs = [np.full(len(ids) - 1, np.nan, np.float32) for ids in sequences]
    with pytest.raises(error, match=remedy):
        scored_canary(train_step, sequences, logprobs)


def full_record() -> dict[str, Any]:
    """A line of metrics.jsonl with a number wherever a curve looks for one, and others beside them."""
    record: dict[str, Any] = {"train_step": 7, "time": 1_700_000_000.25, "policy_version": 7, "updates": 2}
    paths = [path for metric in curves().values() for path in metric.paths]
    for number, path in enumerate(paths, start=1):
        inner = record
        *folders, name = path.split(".")
        for key in folders:
            inner = inner.setdefault(key, {"other": 0.5})
        inner[name] = number / 7
    record["batch"]["trajectory_staleness"] = {"mean": 0.4, "max": 2, "histogram": {"0": 6, "2": 1}}
    record["seconds"] = {"evidence": 0.5, "gradient": 1.5, "update": 0.25, "statistics": 0.05}
    return record


def test_curves_are_the_same_from_what_the_queue_keeps() -> None:
    whole, kept = Curves(), Curves()
    whole.add_report(full_record())
    kept.add_report(json.loads(json.dumps(reported(full_record()))))
    assert kept.report == whole.report
    assert kept.trained_staleness == whole.trained_staleness != []
    names = list(curves())
    assert kept.answer(names, 10) == whole.answer(names, 10)
    assert all(series.x == [7.0] for series in kept.answer(names, 10).series)
    assert EVALUATION not in names


def test_fields_that_the_gateway_does_not_show_are_left_out() -> None:
    kept = reported(full_record())
    assert "other" not in json.dumps(kept)
    assert not {"policy_version", "updates"} & kept.keys()


def test_a_step_that_went_wrong_is_reported_as_json_all_the_same() -> None:
    record = full_record() | {"loss": math.nan, "grad_norm": None, "policy": {"ratio": None, "entropy": math.inf}}
    kept = json.loads(json.dumps(reported(record), allow_nan=False))
    assert (kept["loss"], kept["policy"]) == (None, {"entropy": None})
