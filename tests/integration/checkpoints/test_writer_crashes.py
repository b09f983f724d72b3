"""Writers that die or run out of space, as real processes, and pulled files that survive a power cut."""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError, Reason

from ...kit.checkpoint_samples import CURSOR, SECRET, make_batch, publish, write_batch, write_model
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


class DiskCalls:
    """Calls of the process to the disk, in order; every call is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[tuple[int, str, int]] = []
        """Moment, path and size of each flush."""
        self.moved: list[tuple[int, str, str]] = []
        self._fsync, self._replace, self._moment = os.fsync, os.replace, 0
        monkeypatch.setattr(os, "fsync", self._note_fsync)
        monkeypatch.setattr(os, "replace", self._note_replace)

    def _next(self) -> int:
        self._moment += 1
        return self._moment

    def _note_fsync(self, descriptor: int) -> None:
        path, size = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size
        self._fsync(descriptor)
        self.synced.append((self._next(), path, size))

    def _note_replace(self, source: Path, target: Path) -> None:
        moment = self._next()
        self._replace(source, target)
        self.moved.append((moment, str(source), str(target)))

    def check(self, root: Path) -> set[str]:
        """Assert for each move below ``root`` a flush before it and one of its folder after it; return the names."""
        names = set()
        for moment, source, target in self.moved:
            if not Path(target).is_relative_to(root):
                continue
            before = [size for when, path, size in self.synced if path == source and when < moment]
            assert before, f"{target} appeared without a flush of its content"
            found = Path(target)
            if found.exists() and stat.S_ISREG(found.stat().st_mode):
                assert before[-1] == found.stat().st_size, f"{target} was flushed before it was whole"
            assert any(path == str(found.parent) and when > moment for when, path, _ in self.synced), (
                f"the name {target} was not flushed"
            )
            names.add(found.name)
        return names


def test_pulled_files_are_flushed_before_they_appear_and_their_names_after(
    node: Callable[..., CheckpointStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = node("trainer"), node("another")
    policy = publish(writer, 0)
    write_batch(writer, make_batch(1), CURSOR)
    writer.save_state(session="a", train_step=1, rollback_count=0, tensors={"weight": torch.ones(4)}, extra={})
    calls = DiskCalls(monkeypatch)
    pulled = reader.open(policy)
    reader.read_batch(1)
    state = reader.latest_committed()
    assert state is not None
    reader.load_state(state, {"weight": torch.zeros(4)})
    weights = {file.name for file in state.folder.glob("*.safetensors")}
    assert weights and calls.check(reader.root) >= {"manifest.json", "00000001.pb", pulled.folder.name, *weights}
