"""Deltas of weights, and the comparison of copies in a bucket."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zstandard

from rollmesh.checkpoints import bucket_copies
from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.bucket_copies import stored_copies
from rollmesh.checkpoints.deltas import apply_delta, write_delta
from rollmesh.checkpoints.durable import sha256_of
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.errors import Reason

from ...kit.checkpoint_samples import CURSOR, SECRET, flip_object, make_batch, publish, refused, write_batch

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
def store(tmp_path: Path) -> BucketStore:
    """A store with two policies and two batch files in the memory of this process."""
    objects = ObjectStore(f"memory://{tmp_path.name}/run", retry_seconds=1.0)
    store = BucketStore(tmp_path, SECRET, objects, cache_policies=4)
    for step in (0, 1):
        publish(store, step, step=step)
        write_batch(store, make_batch(step + 1), CURSOR)
    return store


def test_copies_over_the_limit_are_named_as_not_read(store: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = sum(size for key, size in store.objects.sizes("policies").items() if "manifest" not in key)
    flip_object(store.objects, "batches/00000001.pb", 40)
    monkeypatch.setattr(bucket_copies, "MOST_BYTES", policies)
    check = store.check_copies()
    assert (check.compared, check.skipped) == (2, ("batches/00000002.pb", "batches/00000001.pb"))
    assert check.compared_bytes == policies and not check.damaged


def test_a_copy_that_is_pruned_meanwhile_is_no_damage(store: BucketStore) -> None:
    copies = list(stored_copies(store, store.manifest))
    store._delete_folder(copies[0].name, first="manifest.json")
    assert bucket_copies.check_copies(store.objects, copies).damaged == {}
