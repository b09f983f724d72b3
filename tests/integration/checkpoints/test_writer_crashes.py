"""Writers that die or run out of space, as real processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError, Reason

from ...kit.checkpoint_samples import SECRET, publish, write_model
from ...kit.warm import TRAINER, WarmProcess, template


def start_writer(folder: Path, *arguments: str) -> WarmProcess:
    """A process that writes into the folder; what it prints is in a file beside it."""
    arguments = (str(folder), *arguments)
    printed = folder.with_name(f"{folder.name}-printed")
    start = template(*TRAINER, seed=0).start
    return start("tests.unit.checkpoints.writer_process", arguments, output=printed, environment=os.environ)


@pytest.mark.parametrize("seed", range(4))
def test_kill_9_while_publishing_leaves_only_whole_policies_and_whole_batches(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "policies" / f"{seed + 1:08d}-w"
    started = [folder, folder / "model-1.safetensors", folder / "model-3.safetensors", folder / "manifest.json"][seed]
    process = start_writer(tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not started.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.0005)
    finally:
        process.kill()
        process.wait()
    store = CheckpointStore(tmp_path, SECRET)
    for record in store.complete_policies():
        store.open(record)
    assert len(store.complete_policies()) >= seed + 1
    for step in store.batch_steps():
        store.read_batch(step)
    assert len(store.batch_steps()) >= seed + 1


def test_a_file_size_limit_is_a_full_disk_and_leaves_no_partial_folder(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    assert start_writer(folder, "100000").wait(60) == 0
    policy, batch, state = (tmp_path / "store-printed").read_text().splitlines()
    assert policy.startswith(f"{Reason.DISK_FULL}|")
    assert "00000000-abc" in policy
    assert "bytes free" in policy
    assert batch.startswith(f"{Reason.DISK_FULL}|")
    assert "00000001.pb" in batch
    assert state.startswith(f"{Reason.DISK_FULL}|")
    assert "00000001-abc" in state
    for name in ("policies", "batches", "states"):
        assert list((folder / name).iterdir()) == []


def test_a_full_device_refuses_and_the_same_publication_succeeds_once_there_is_room(small_disk: Path) -> None:
    store = CheckpointStore(small_disk, SECRET)
    kept = publish(store, 0)
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 7_800_000)

    def write(folder: Path) -> None:
        write_model()(folder)
        save_file({"layer": np.zeros(250_000, np.float32)}, folder / "model-1.safetensors")

    with pytest.raises(CheckpointError) as caught:
        publish(store, 1, write=write)
    assert caught.value.reason == Reason.DISK_FULL
    assert [p.name for p in (small_disk / "policies").iterdir()] == ["00000000-abc"]
    store.open(kept)
    filler.unlink()
    store.open(publish(store, 1, write=write))
