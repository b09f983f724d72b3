"""Lengths of a run come from its batch files, whatever the order of groups and members in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollmesh.bench.workloads import group_of, scored
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.errors import DataError
from rollmesh.mesh import Cursor
from rollmesh.sim.lengths_of_run import GroupLengths, lengths_of_run
from rollmesh.types import Batch, Group, Prompt, Segment

SECRET = "0" * 64


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / SECRET_FILE).write_text(SECRET)
    (tmp_path / "checkpoints").mkdir()
    return CheckpointStore(tmp_path / "checkpoints", SECRET.encode())


def group(index: int, lengths: dict[int, int]) -> Group:
    prompt = Prompt(prompt_id=f"p{index}", token_ids=np.arange(3 + index, dtype=np.int32), verifier="exact")
    return group_of(
        index, (scored(prompt, f"e0-{index}", member, (segment(tokens),), 1.0) for member, tokens in lengths.items())
    )


def segment(tokens: int) -> Segment:
    return Segment(
        token_ids=np.arange(tokens, dtype=np.int32),
        behavior_logprobs=np.zeros(tokens, np.float32),
        policy_version=0,
        kv_min_version=0,
    )


def test_lengths_are_in_the_order_of_admission_and_of_members(store: CheckpointStore, tmp_path: Path) -> None:
    first, second, third = group(0, {1: 5, 0: 9}), group(1, {0: 2, 1: 3}), group(2, {0: 7, 1: 1})
    store.write_batch(Batch(train_step=1, groups=(third, first)), Cursor(epoch=0, index=3))
    store.write_batch(Batch(train_step=2, groups=(second,)), Cursor(epoch=0, index=3))
    assert lengths_of_run(tmp_path) == tuple(
        GroupLengths(admission_index=index, prompt_id=f"p{index}", prompt_tokens=3 + index, response_tokens=tokens)
        for index, tokens in enumerate([(9, 5), (2, 3), (7, 1)])
    )


def test_a_run_without_a_finished_train_step_has_no_lengths(store: CheckpointStore, tmp_path: Path) -> None:
    assert not store.batch_steps()
    with pytest.raises(DataError, match="no finished trajectories"):
        lengths_of_run(tmp_path)


def test_a_folder_without_a_run_has_no_lengths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has this run started"):
        lengths_of_run(tmp_path)
