"""Trainer state, valid only when committed; deltas of weights, and the comparison of copies in a bucket."""

from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard

from rollmesh.checkpoints import bucket_copies
from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.bucket_copies import stored_copies
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.committed import COMMITTED_FILE, CommittedState
from rollmesh.checkpoints.deltas import apply_delta, write_delta
from rollmesh.checkpoints.durable import sha256_of
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.errors import Reason

from ...kit.checkpoint_samples import CURSOR, SECRET, flip, flip_object, make_batch, publish, refused, write_batch


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(4, 3, generator=generator),
        "optimizer.weight.exp_avg": torch.randn(4, 3, generator=generator, dtype=torch.float64),
        "optimizer.weight.step": torch.tensor(float(seed)),
        "random.cpu": torch.arange(16, dtype=torch.uint8) + seed,
        "model.head": torch.randn(5, generator=generator).bfloat16(),
    }


def save(store: CheckpointStore, step: int, session: str = "abc", rollbacks: int = 0) -> CommittedState:
    return store.save_state(
        session=session, train_step=step, rollback_count=rollbacks, tensors=tensors(step), extra={"lr_step": step}
    )


def zeros(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(t) for name, t in tensors(step).items()}


def test_a_committed_state_fills_tensors_in_place(store: CheckpointStore) -> None:
    save(store, 3)
    state = store.latest_committed()
    assert state.train_step == 3
    empty = zeros(3)
    assert store.load_state(state, empty) == {"lr_step": 3}
    for name, expected in tensors(3).items():
        assert torch.equal(empty[name], expected), name
    # No pickle is written.
    assert {p.suffix or p.name for p in state.folder.iterdir()} == {".safetensors", ".json", COMMITTED_FILE}


def test_a_state_without_a_complete_commit_does_not_count(store: CheckpointStore) -> None:
    save(store, 1)
    newest = save(store, 2)
    marker = newest.folder / COMMITTED_FILE
    whole = marker.read_bytes()
    for length in range(0, len(whole), 11):
        marker.write_bytes(whole[:length])
        latest = store.latest_committed()
        assert latest.train_step == 1
    marker.unlink()
    assert [s.train_step for s in store.committed_states()] == [1]


def test_a_truncated_shard_falls_back_and_a_flipped_one_is_refused(store: CheckpointStore) -> None:
    save(store, 1)
    newest = save(store, 2)
    (shard,) = newest.folder.glob("*.safetensors")
    flip(shard)
    assert refused(store.load_state, newest, zeros(2)).reason == Reason.TAMPERED
    shard.write_bytes(shard.read_bytes()[:-1])
    assert [s.train_step for s in store.committed_states()] == [1]


def test_a_planted_shard_is_refused(store: CheckpointStore) -> None:
    state = save(store, 1)
    (shard,) = state.folder.glob("*.safetensors")
    (state.folder / "shard-00002-model-00001-of-00001.safetensors").write_bytes(shard.read_bytes())
    assert "does not list" in str(refused(store.load_state, state, zeros(1)))


def test_a_state_of_another_model_is_refused(store: CheckpointStore) -> None:
    state = save(store, 1)
    for other in (zeros(1) | {"model.weight": torch.zeros(7, 7)}, {"model.unknown": torch.zeros(1)}):
        assert refused(store.load_state, state, other).reason == Reason.FOREIGN_ARCHITECTURE


def test_a_state_of_another_run_does_not_count(store: CheckpointStore) -> None:
    save(CheckpointStore(store.root, b"another secret"), 1)
    assert store.latest_committed() is None


def test_a_state_after_a_rollback_outranks_those_before(store: CheckpointStore) -> None:
    save(store, 5, session="aaa")
    save(store, 5, session="bbb", rollbacks=1)
    save(store, 6, session="ccc")
    assert [(s.train_step, s.record.rollback_count) for s in store.committed_states()] == [(5, 1), (6, 0), (5, 0)]


def test_pruning_keeps_the_newest_committed_and_what_is_being_written(store: CheckpointStore) -> None:
    for step in range(1, 5):
        save(store, step)
    torn = save(store, 2, session="dead")
    (torn.folder / COMMITTED_FILE).unlink()
    writing = save(store, 4, session="mine")
    (writing.folder / COMMITTED_FILE).unlink()
    store.prune_states(keep_last=2, session="mine")
    assert sorted(p.name for p in (store.root / "states").iterdir()) == [
        "00000003-abc",
        "00000004-abc",
        "00000004-mine",
    ]


def test_pruning_keeps_the_newest_state_of_the_session_behind_newer_ones_of_another(store: CheckpointStore) -> None:
    for step in (19, 20):
        save(store, step, session="damaged")
    for step in (1, 2):
        save(store, step, session="mine")
        store.prune_states(keep_last=2, session="mine")
    assert [s.folder.name for s in store.committed_states()] == [
        "00000020-damaged",
        "00000019-damaged",
        "00000002-mine",
    ]


MEBIBYTE = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 4 * MEBIBYTE, 9 * MEBIBYTE + 3])
def test_a_delta_makes_the_new_file_of_the_old_one(tmp_path: Path, size: int) -> None:
    noise = np.random.default_rng(size)
    base, new, delta, result = (tmp_path / name for name in ("base", "new", "delta", "result"))
    base.write_bytes(noise.bytes(size))
    new.write_bytes(noise.bytes(size))
    digests = write_delta(base, new, delta)
    apply_delta(base, delta, result)
    assert result.read_bytes() == new.read_bytes()
    assert digests == (sha256_of(delta), sha256_of(base))


def test_a_hundredth_of_changed_bfloat16_weights_is_more_than_twenty_times_smaller(tmp_path: Path) -> None:
    noise = np.random.default_rng(3)
    weights = noise.integers(0, 1 << 16, 4 * MEBIBYTE, dtype=np.uint16)
    changed = weights.copy()
    places = noise.choice(len(weights), len(weights) // 100, replace=False)
    changed[places] ^= noise.integers(1, 8, len(places), dtype=np.uint16)
    (tmp_path / "base").write_bytes(weights.tobytes())
    (tmp_path / "new").write_bytes(changed.tobytes())
    write_delta(tmp_path / "base", tmp_path / "new", tmp_path / "delta")
    assert (tmp_path / "delta").stat().st_size * 20 < weights.nbytes


def test_a_delta_that_does_not_fit_its_base_is_refused(tmp_path: Path) -> None:
    base, new, delta = (tmp_path / name for name in ("base", "new", "delta"))
    base.write_bytes(b"a" * 100)
    new.write_bytes(b"b" * 100)
    write_delta(base, new, delta)
    whole = delta.read_bytes()
    for name, damaged in {
        "cut": whole[:9],
        "flipped": whole[:8] + bytes([whole[8] ^ 1]) + whole[9:],
        "no_zstd": b"\0" * 40,
        "shorter": zstandard.compress(b"\0" * 99),
        "longer": zstandard.compress(b"\0" * 101),
    }.items():
        delta.write_bytes(damaged)
        assert refused(apply_delta, base, delta, tmp_path / name).reason == Reason.TAMPERED, name


@pytest.fixture
def bucket(tmp_path: Path) -> BucketStore:
    """A store with two policies and two batch files in the memory of this process."""
    objects = ObjectStore(f"memory://{tmp_path.name}/run", retry_seconds=1.0)
    bucket = BucketStore(tmp_path, SECRET, objects, cache_policies=4)
    for step in (0, 1):
        publish(bucket, step, step=step)
        write_batch(bucket, make_batch(step + 1), CURSOR)
    return bucket


def test_copies_over_the_limit_are_named_as_not_read(bucket: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = sum(size for key, size in bucket.objects.sizes("policies").items() if "manifest" not in key)
    flip_object(bucket.objects, "batches/00000001.pb", 40)
    monkeypatch.setattr(bucket_copies, "MOST_BYTES", policies)
    check = bucket.check_copies()
    assert (check.compared, check.skipped) == (2, ("batches/00000002.pb", "batches/00000001.pb"))
    assert check.compared_bytes == policies and not check.damaged


def test_a_copy_that_is_pruned_meanwhile_is_no_damage(bucket: BucketStore) -> None:
    copies = list(stored_copies(bucket, bucket.manifest))
    bucket._delete_folder(copies[0].name, first="manifest.json")
    assert bucket_copies.check_copies(bucket.objects, copies).damaged == {}
