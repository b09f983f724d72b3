"""Files pulled from an object store survive a power cut: flushed before their names appear, the names too."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollmesh.checkpoints.checkpoint_store import CheckpointStore

from ...kit.checkpoint_samples import CURSOR, make_batch, publish, write_batch


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
