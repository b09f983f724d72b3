"""The fixed sequences of every manifest, and how many policies stay."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollmesh.config import RunConfig
from rollmesh.config.load import validate_run_config
from rollmesh.trainer.service.publishing import canary_count, canary_sequences, kept_policies


def config(state_every_steps: int = 1, **algorithm: Any) -> RunConfig:
    data = {
        "name": "run",
        "folder": "run",
        "model": {"path": "model"},
        "schedule": {"max_staleness": 7},
        "checkpoints": {"keep_last": 4, "state_every_steps": state_every_steps},
        "trainer": {"algorithm": algorithm},
    }
    return validate_run_config(data, "made")


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


def test_the_snapshot_source_keeps_every_version_that_a_batch_may_name() -> None:
    assert kept_policies(config()) == 4
    assert kept_policies(config(old_logprobs="snapshot")) == 9


def test_the_snapshot_source_keeps_what_a_replay_after_a_crash_names_too() -> None:
    assert kept_policies(config(3, old_logprobs="snapshot")) == 11
