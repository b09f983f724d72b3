"""A backup that is taken while the run goes back to an older policy, or prunes what was copied."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config.load import write_run_config
from rollmesh.launcher.backup import back_up
from rollmesh.launcher.run_folder import RunFolder

from ...kit.checkpoint_samples import CURSOR, SECRET, make_batch, publish, write_batch
from ...kit.run_files import made_run


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Checkpoints of a run with one train step."""
    (tmp_path / "run").mkdir()
    write_run_config(made_run(tmp_path / "run"), RunFolder(tmp_path / "run").config_file)
    store = CheckpointStore(tmp_path / "run" / "checkpoints", SECRET)
    write_batch(store, make_batch(1), CURSOR)
    save(store, 1)
    publish(store, 1)
    return store


def save(store: CheckpointStore, step: int, session: str = "abc", rollbacks: int = 0) -> None:
    store.save_state(
        session=session, train_step=step, rollback_count=rollbacks, tensors={"weight": torch.ones(2)}, extra={}
    )


def during_the_copy(monkeypatch: pytest.MonkeyPatch, folder: str, change: Callable[[], None]) -> None:
    """Let the run go on as soon as the first file of ``folder`` is copied."""
    copy, changed = shutil.copy2, False

    def change_then_copy(source: Path, target: Path) -> Path:
        nonlocal changed
        if folder in source.parts and not changed:
            changed = True
            change()
        return copy(source, target)

    monkeypatch.setattr(shutil, "copy2", change_then_copy)


@pytest.mark.parametrize("folder", ["policies", "batches"])
def test_a_backup_of_a_run_that_is_rolled_back_meanwhile_has_the_state_from_after_the_rollback(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    def roll_back() -> None:
        save(store, 1, "abcr1", rollbacks=1)
        publish(store, 2, session="abcr1", step=1)
        write_batch(store, make_batch(2), CURSOR)

    during_the_copy(monkeypatch, folder, roll_back)
    back_up(RunFolder(tmp_path / "run"), store, tmp_path / "copy")
    copied = store.at(tmp_path / "copy" / "checkpoints")
    assert [(s.train_step, s.record.rollback_count) for s in copied.committed_states()] == [(1, 1), (1, 0)]
    assert [record.rollback_count for record in copied.complete_policies()] == [0, 1]


def test_a_backup_keeps_what_it_has_copied_although_the_run_prunes_it_meanwhile(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_on() -> None:
        for step in (2, 3):
            write_batch(store, make_batch(step), CURSOR)
            save(store, step)
        store.prune_states(keep_last=2, session="abc")

    during_the_copy(monkeypatch, "policies", train_on)
    report = back_up(RunFolder(tmp_path / "run"), store, tmp_path / "copy")
    copied = store.at(tmp_path / "copy" / "checkpoints")
    assert (report.train_step, [s.train_step for s in copied.committed_states()]) == (1, [1])
    again = back_up(RunFolder(tmp_path / "run"), store, tmp_path / "copy")
    assert (again.train_step, again.removed, [s.train_step for s in copied.committed_states()]) == (3, 1, [3, 2])


def test_a_damaged_state_of_an_earlier_backup_is_copied_again_or_removed_where_the_run_has_pruned_it(
    store: CheckpointStore, tmp_path: Path
) -> None:
    back_up(RunFolder(tmp_path / "run"), store, tmp_path / "copy")
    copied = store.at(tmp_path / "copy" / "checkpoints")
    (state,) = copied.committed_states()
    damaged = state.folder / state.record.files[0].path
    damaged.write_bytes(b"")
    assert copied.committed_states() == []
    assert back_up(RunFolder(tmp_path / "run"), store, tmp_path / "copy").train_step == 1
    copied.verify_state(state)
    damaged.write_bytes(b"")
    for step in (2, 3):
        write_batch(store, make_batch(step), CURSOR)
        save(store, step)
    store.prune_states(keep_last=2, session="abc")
    assert back_up(RunFolder(tmp_path / "run"), store, tmp_path / "copy").train_step == 3
    assert [s.train_step for s in copied.committed_states()] == [3, 2]
