"""Folders that the processes of a node pull from a bucket: one lock per folder, and eviction of old policies."""

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from rollmesh.checkpoints import policies
from rollmesh.checkpoints.durable import is_folder_name, make_folder, remove_tree
from rollmesh.checkpoints.manifest import MANIFEST_FILE
from rollmesh.runtime.locks import lock_file

_IN_USE_SECONDS = 600.0
_LOCKS = ".pulls"


class PulledFolders:
    """Locks of the pulled folders below ``root``. The modification time of a lock is the time of last use."""

    def __init__(self, root: Path, *, keep_policies: int) -> None:
        self._root = root
        self._locks = root / _LOCKS
        self._keep_policies = keep_policies

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold this node's lock on a folder name."""
        path = self._locks / name
        make_folder(path.parent)
        while True:
            with path.open("a") as lock:
                lock_file(lock, wait=True)
                # The previous holder may have evicted the folder and deleted the lock file. Then this lock is void.
                if not _is_file_at(lock.fileno(), path):
                    continue
                os.utime(path)
                yield
                return

    def remove_unfinished(self, name: str) -> None:
        """Delete what killed processes have pulled of a policy. The caller holds the lock of ``name``."""
        for folder in (self._root / policies.FOLDER).glob(f".{name}.*"):
            remove_tree(folder)

    def evict_old_policies(self, kept: Collection[str]) -> None:
        """Note that policies are in use, and delete the others but the most and the recently used ones.

        What killed processes have pulled of any policy is deleted, too.
        """
        for name in kept:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._locks / name)
        used = {lock.name: _last_used(lock) for lock in self._locks.iterdir() if is_folder_name(lock.name)}
        newest = sorted(used, key=lambda each: used[each], reverse=True)[: self._keep_policies]
        for each, when in used.items():
            if each not in (*kept, *newest) and time.time() - when > _IN_USE_SECONDS:
                self._evict(each)
        temporary = (folder.name[1:].partition(".")[0] for folder in (self._root / policies.FOLDER).glob(".*"))
        for each in set(filter(is_folder_name, temporary)):
            self._end_pull(each)

    def _end_pull(self, name: str) -> None:
        """Delete what was pulled of a policy, and a lock without a folder, unless a process has the lock."""
        path = self._locks / name
        with path.open("a") as lock:
            if lock_file(lock) and _is_file_at(lock.fileno(), path):
                self.remove_unfinished(name)
                if not (self._root / policies.FOLDER / name).exists():
                    path.unlink()

    def _evict(self, name: str) -> None:
        """Delete one pulled folder and its lock, unless a process has the lock or used the folder recently."""
        path = self._locks / name
        with contextlib.suppress(FileNotFoundError), path.open("r+") as lock:
            mine = lock_file(lock) and _is_file_at(lock.fileno(), path)
            if mine and time.time() - _last_used(path) > _IN_USE_SECONDS:
                remove_tree(self._root / policies.FOLDER / name, first=[MANIFEST_FILE])
                path.unlink()


def _last_used(lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
