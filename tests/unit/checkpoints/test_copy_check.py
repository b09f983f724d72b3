"""The copies in a bucket against their digests, while this node's copies are good."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.checkpoints import bucket_copies
from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.bucket_copies import stored_copies
from rollmesh.checkpoints.objects import ObjectStore

from ...kit.checkpoint_samples import CURSOR, SECRET, make_batch, publish, write_batch


@pytest.fixture
def store(tmp_path: Path) -> BucketStore:
    """A store with two policies and two batch files in the memory of this process."""
    objects = ObjectStore(f"memory://{tmp_path.name}/run", retry_seconds=1.0)
    store = BucketStore(tmp_path, SECRET, objects, cache_policies=4)
    for step in (0, 1):
        publish(store, step, step=step)
        write_batch(store, make_batch(step + 1), CURSOR)
    return store


def flip(objects: ObjectStore, key: str, at: int) -> None:
    content = bytearray(objects.read(key, 1 << 30))
    content[at] ^= 1
    objects.write(key, bytes(content))


def test_a_damaged_copy_is_found_although_this_node_reads_its_own(store: BucketStore) -> None:
    first, second = store.complete_policies()
    assert (store.check_copies().compared, store.check_copies().damaged) == (4, {})
    flip(store.objects, f"{first.path}/model.safetensors", -1)
    flip(store.objects, f"{second.path}/manifest.json", 100)
    flip(store.objects, "batches/00000002.pb", 40)
    store.objects.delete([f"{first.path}/config.json"])
    damaged = store.check_copies().damaged
    assert sorted(damaged) == ["batches/00000002.pb", first.path, second.path]
    assert "config.json" in damaged[first.path] and "model.safetensors" in damaged[first.path]
    assert store.open(second).folder.is_dir() and store.read_batch(2).train_step == 2


def test_a_copy_with_more_bytes_than_recorded_is_damaged(store: BucketStore) -> None:
    (policy, _), weights = store.complete_policies(), "model.safetensors"
    key = f"{policy.path}/{weights}"
    store.objects.write(key, store.objects.read(key, 1 << 30) + b"x")
    assert weights in store.check_copies().damaged[policy.path]


def test_copies_over_the_limit_are_named_as_not_read(store: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = sum(size for key, size in store.objects.sizes("policies").items() if "manifest" not in key)
    flip(store.objects, "batches/00000001.pb", 40)
    monkeypatch.setattr(bucket_copies, "MOST_BYTES", policies)
    check = store.check_copies()
    assert (check.compared, check.skipped) == (2, ("batches/00000002.pb", "batches/00000001.pb"))
    assert check.compared_bytes == policies and not check.damaged


def test_a_copy_that_is_pruned_meanwhile_is_no_damage(store: BucketStore) -> None:
    copies = list(stored_copies(store, store.manifest))
    store._delete_folder(copies[0].name, first="manifest.json")
    assert bucket_copies.check_copies(store.objects, copies).damaged == {}
