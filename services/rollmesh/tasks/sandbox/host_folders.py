"""Folders of the host that a confined process sees, in a mount namespace of its own.

``expose``: an interpreter installed below a private home (mode 700) cannot be started by any other uid, so an empty
folder that contains only the wanted folders covers the private one. Needs root. ``seal``: a separate root folder has
the interpreter's files, read-only, private scratch space, and nothing else: folders of runs, homes, data sets, sockets
and world-readable files are not hidden one by one, they are absent. Needs the right to mount in the namespace.
"""

import os
import site
import stat
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rollmesh.tasks.sandbox import kernel

WORKING_FOLDER = "/tmp"
"""Only folder that code can write to."""
_SYSTEM_PATHS = (
    "/bin",
    "/lib",
    "/lib32",
    "/lib64",
    "/usr/bin",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/nix/store",
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {
    "/dev/shm": WORKING_FOLDER,
    "/var/tmp": WORKING_FOLDER,
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}
_READ_ONLY = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
_MOST_FILES = 4096


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


def expose(folders: Iterable[Path]) -> None:
    """Move to a new mount namespace in which every uid can reach ``folders``; do nothing if that is so already.

    Raises OSError where that is impossible (no privilege, or one of the folders is private).
    """
    covered: dict[Path, list[Path]] = defaultdict(list)
    for folder in folders:
        if is_private(folder):
            raise PermissionError(f"{folder}: no other uid may enter it")
        if topmost := next(filter(is_private, reversed(folder.parents)), None):
            covered[topmost].append(folder)
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


def seal(folder: str, scratch_bytes: int) -> None:
    """Make ``folder`` the root folder of this process, with ``scratch_bytes`` of scratch space.

    Raises OSError if the kernel does not allow one of the steps.
    """
    umask = os.umask(0o022)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", folder, "tmpfs", flags, "size=1m,nr_inodes=4096,mode=755")
    scratch = f"{folder}{WORKING_FOLDER}"
    os.mkdir(scratch)
    kernel.mount("tmpfs", scratch, "tmpfs", flags, f"size={scratch_bytes},nr_inodes={_MOST_FILES},mode=700")
    for path in _shown_paths():
        _show(folder, path, _READ_ONLY)
    for name in _DEVICES:
        _show(folder, Path("/dev") / name, kernel.MOUNT_ATTR_NOSUID)
    os.mkdir(f"{folder}/proc")
    with suppress(OSError):  # a container that hides parts of /proc does not allow this mount; then /proc is empty
        kernel.mount("proc", f"{folder}/proc", "proc", flags | kernel.MS_NOEXEC)
        kernel.restrict_mount(f"{folder}/proc", kernel.MOUNT_ATTR_RDONLY)
    for link, target in _LINKS.items():
        os.makedirs(os.path.dirname(f"{folder}{link}"), exist_ok=True)
        os.symlink(target, f"{folder}{link}")
    kernel.change_root(folder)
    kernel.restrict_mount("/", _READ_ONLY, recursive=False)
    os.umask(umask)


def _shown_paths() -> list[Path]:
    """Return the libraries of the system and of this interpreter; a whole prefix may contain a working folder."""
    prefixes = {Path(sys.base_prefix).resolve(), Path(sys.base_exec_prefix).resolve()}
    own = {prefix / name for prefix in prefixes for name in ("bin", "lib", "lib64")}
    own |= {Path(os.__file__).resolve().parent, Path(sys.executable).resolve().parent}
    found = {path for path in (*map(Path, _SYSTEM_PATHS), *own) if path.exists()}
    return sorted(path for path in found if not any(parent in found for parent in path.parents))


def _show(folder: str, path: Path, attributes: int) -> None:
    target = f"{folder}{path}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if path.is_symlink():
        os.symlink(os.readlink(path), target)
        return
    if path.is_dir():
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(str(path), target, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.restrict_mount(target, attributes)
