"""Batch files and the ledger."""

import errno
import os
from pathlib import Path

import pytest

from rollmesh.checkpoints.batches import ReplayDraw, batch_path, encode_groups
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError, Reason
from rollmesh.types import Batch

from ...kit.checkpoint_samples import CURSOR, make_batch, refused, step_settings, write_batch


def same(left: Batch, right: Batch) -> bool:
    """Equal batches have equal frames: tests/unit/wire compares their fields."""
    return left.train_step == right.train_step and [*encode_groups(left)] == [*encode_groups(right)]


def test_a_batch_comes_back_as_it_was(store: CheckpointStore) -> None:
    batch = make_batch(1)
    digest = write_batch(store, batch, CURSOR)
    settings = step_settings(1e-3 / 3, kl_reference_version=7)
    write_batch(store, make_batch(2), CURSOR, {}, settings)
    assert store.batch_footer(2).settings == settings
    footer = store.batch_footer(1)
    assert same(store.read_batch(1), batch)
    assert footer.group_ids == ["e0-2", "e0-3"]
    assert (footer.cursor, footer.payload_sha256, footer.trajectory_count) == (CURSOR, digest, 4)
    assert store.batch_steps() == [1, 2]


def test_a_batch_file_names_the_train_steps_of_the_versions_that_wrote_it_and_of_no_others(
    store: CheckpointStore,
) -> None:
    batch = make_batch(1)
    versions = {v for g in batch.groups for t in g.trajectories for v in t.policy_versions}
    known = {version: 10 + version for version in (*versions, max(versions) + 1)}
    write_batch(store, batch, CURSOR, known)
    assert store.batch_footer(1).version_train_steps == {v: 10 + v for v in versions}
    write_batch(store, make_batch(2), CURSOR)
    assert store.batch_footer(2).version_train_steps == {}


def test_equal_batches_have_equal_digests_in_any_run_folder(store: CheckpointStore, tmp_path: Path) -> None:
    other = CheckpointStore(tmp_path / "other", b"x" * 32)
    assert write_batch(store, make_batch(1), CURSOR) == write_batch(other, make_batch(1), CURSOR)
    assert write_batch(store, make_batch(2), CURSOR) != write_batch(other, make_batch(2, seed=1), CURSOR)


def test_a_complete_batch_is_never_replaced_by_other_groups(store: CheckpointStore) -> None:
    digest = write_batch(store, make_batch(1), CURSOR)
    before = batch_path(store.root, 1).read_bytes()
    assert refused(write_batch, store, make_batch(1, ["e0-7"]), CURSOR).reason == Reason.MISMATCH
    assert write_batch(store, make_batch(1), CURSOR) == digest
    assert batch_path(store.root, 1).read_bytes() == before


def test_a_trainer_that_another_one_overtakes_while_it_writes_does_not_replace_the_others_file(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = os.fsync

    def overtaken(descriptor: int) -> None:
        monkeypatch.undo()
        synced(descriptor)
        write_batch(store.at(store.root), make_batch(1), CURSOR)

    monkeypatch.setattr(os, "fsync", overtaken)
    assert refused(write_batch, store, make_batch(1, ["e0-7"]), CURSOR).reason == Reason.MISMATCH
    assert same(store.read_batch(1), make_batch(1))
    assert [path.name for path in batch_path(store.root, 1).parent.iterdir()] == [batch_path(store.root, 1).name]


def test_a_file_system_without_hard_links_will_do(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    write_batch(store, make_batch(1), CURSOR)
    assert same(store.read_batch(1), make_batch(1))


def test_a_batch_file_cut_anywhere_is_refused_and_can_be_written_again(store: CheckpointStore) -> None:
    digest = write_batch(store, make_batch(1), CURSOR)
    path = batch_path(store.root, 1)
    whole = path.read_bytes()
    for length in {*range(0, len(whole), 7), *range(len(whole) - 90, len(whole))}:
        path.write_bytes(whole[:length])
        assert refused(store.read_batch, 1).reason == Reason.TORN, length
    assert write_batch(store, make_batch(1), CURSOR) == digest
    assert same(store.read_batch(1), make_batch(1))


def test_a_flipped_bit_of_a_batch_file_is_refused(store: CheckpointStore) -> None:
    write_batch(store, make_batch(1), CURSOR)
    path = batch_path(store.root, 1)
    whole = path.read_bytes()
    for position in {*range(0, len(whole), 7), *range(20), *range(len(whole) - 90, len(whole))}:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ (1 << position % 8)]) + whole[position + 1 :])
        with pytest.raises(CheckpointError):
            store.read_batch(1)


def test_a_batch_file_of_another_step_or_another_run_is_refused(store: CheckpointStore) -> None:
    write_batch(store, make_batch(1), CURSOR)
    batch_path(store.root, 1).rename(batch_path(store.root, 2))
    assert refused(store.read_batch, 2).reason == Reason.MISMATCH
    assert refused(CheckpointStore(store.root, b"another secret").read_batch, 2).reason == Reason.TAMPERED
    assert refused(store.read_batch, 1).reason == Reason.MISSING


def test_leftovers_of_killed_writers_are_no_batches_and_are_removed(store: CheckpointStore) -> None:
    write_batch(store, make_batch(1), CURSOR)
    leftover = batch_path(store.root, 2).with_name(".00000002.pb.0123456789abcdef")
    leftover.write_bytes(b"RMBATCH1")
    assert store.batch_steps() == [1]
    assert store.remove_unfinished_batches() == 1
    assert not leftover.exists()
    assert store.batch_steps() == [1]


def test_one_group_is_read_without_the_others(store: CheckpointStore) -> None:
    batch = make_batch(1)
    write_batch(store, batch, CURSOR)
    for group in batch.groups:
        found = store.read_group(1, group.group_id)
        assert same(Batch(train_step=1, groups=(found,)), Batch(train_step=1, groups=(group,)))
    assert store.read_group(1, "e9-9") is None
    with pytest.raises(CheckpointError, match="missing"):
        store.read_group(2, "e0-2")


def test_a_group_with_a_wrong_length_is_refused_and_the_others_are_read(store: CheckpointStore) -> None:
    write_batch(store, make_batch(1), CURSOR)
    path = batch_path(store.root, 1)
    data = bytearray(path.read_bytes())
    data[8:16] = (1 << 40).to_bytes(8, "little")
    path.write_bytes(data)
    ids = store.batch_footer(1).group_ids
    with pytest.raises(CheckpointError, match="missing"):
        store.read_group(1, ids[0])
    found = store.read_group(1, ids[-1])
    assert found is not None and found.group_id == ids[-1]


@pytest.fixture
def replaying(store: CheckpointStore) -> CheckpointStore:
    """A store whose second batch replays one group of the first."""
    digest = write_batch(store, make_batch(1, ["e0-0", "e0-1"]), CURSOR)
    draw = ReplayDraw(
        share=0.34, by="uniform", batches=4, seed=0, max_staleness=4, first=1, sources={1: digest}, groups=[(1, "e0-1")]
    )
    write_batch(store, make_batch(2, ["e0-2", "e0-3"]), CURSOR, replay=draw)
    return store


def test_the_batch_of_a_step_has_the_replayed_groups_among_the_fresh_ones(replaying: CheckpointStore) -> None:
    batch = replaying.training_batch(2)
    assert [group.group_id for group in batch.groups] == ["e0-2", "e0-1", "e0-3"]
    assert batch.train_step == 2
    assert (
        batch.groups[1].trajectories[0].trajectory_id == replaying.read_batch(1).groups[1].trajectories[0].trajectory_id
    )
    # The file has the fresh groups only.
    assert [group.group_id for group in replaying.read_batch(2).groups] == ["e0-2", "e0-3"]
    assert replaying.batch_footer(2).group_ids == ["e0-2", "e0-3"]
    assert [group.group_id for group in replaying.training_batch(1).groups] == ["e0-0", "e0-1"]


def test_a_step_whose_replayed_groups_are_gone_is_refused_with_the_file(replaying: CheckpointStore) -> None:
    batch_path(replaying.root, 1).unlink()
    error = refused(replaying.training_batch, 2)
    assert "train step 2 replays groups of batch 1: " in str(error) and error.reason == Reason.MISSING
    write_batch(replaying, make_batch(1, ["e0-0", "e0-1"], seed=1), CURSOR)
    assert refused(replaying.training_batch, 2).reason == Reason.MISMATCH
