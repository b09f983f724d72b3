"""Access to folders for a uid that may not enter the folders above them.

An interpreter installed below a private home (mode 700) cannot be started by any other uid. In a new mount namespace,
an empty folder that contains only the wanted folders covers the private one. Needs root.
"""

from __future__ import annotations

import os
import site
import stat
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rollmesh.tasks.sandbox import kernel


def interpreter_folders() -> list[Path]:
    """Return the folders that this interpreter loads code from.

    Private folders on ``sys.path`` are left out: modules imported from them stay loaded, the rest stays private.
    """
    needed = [sys.base_prefix, sys.prefix, *site.getsitepackages()]
    folders = {Path(name).resolve() for name in needed if Path(name).is_dir()}
    folders |= {path for name in sys.path if name and (path := Path(name).resolve()).is_dir() and not is_private(path)}
    return [f for f in sorted(folders) if not any(other in f.parents for other in folders)]


def is_private(folder: Path) -> bool:
    """Return True if other uids may not enter the folder."""
    return not os.stat(folder).st_mode & stat.S_IXOTH


def blocked_folder(path: Path) -> Path | None:
    """Return the topmost folder above ``path`` that other uids may not enter."""
    for folder in reversed(path.parents):
        if is_private(folder):
            return folder
    return None


def expose(folders: Iterable[Path]) -> None:
    """Move to a new mount namespace in which every uid can reach ``folders``; do nothing if that is so already.

    Raises OSError where that is impossible (no privilege, or one of the folders is private).
    """
    covered: dict[Path, list[Path]] = defaultdict(list)
    for folder in folders:
        if is_private(folder):
            raise PermissionError(f"{folder}: no other uid may enter it")
        blocked = blocked_folder(folder)
        if blocked is not None:
            covered[blocked].append(folder)
    if not covered:
        return
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    for blocked, wanted in covered.items():
        _cover(blocked, wanted)


def _cover(blocked: Path, wanted: list[Path]) -> None:
    descriptors = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in wanted]
    umask = os.umask(0o022)
    try:
        kernel.mount("tmpfs", str(blocked), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
        for folder, descriptor in zip(wanted, descriptors, strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            kernel.mount(f"/proc/self/fd/{descriptor}", str(folder), flags=kernel.MS_BIND | kernel.MS_REC)
    finally:
        os.umask(umask)
        for descriptor in descriptors:
            os.close(descriptor)
