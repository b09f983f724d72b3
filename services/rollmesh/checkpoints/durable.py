"""File operations that survive a power cut: files and folder entries are flushed to the device."""

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from rollmesh.errors import CheckpointError, Reason
from rollmesh.file_writes import writing

_NOT_LINKED = frozenset({errno.EEXIST, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FOLDER_NAME = re.compile(r"^\d{8,}-[0-9A-Za-z]{1,64}$")
_REMOVAL_ATTEMPTS = 10
"""Attempts to delete a folder while another process writes its few files."""
_ERROR_TEXT = re.compile(r"(?:os error|code:|Errno) ?(\d+)")


def sync_file(path: Path, flags: int = os.O_NOFOLLOW) -> None:
    """Flush a closed file to the device."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to the device."""
    sync_file(path, os.O_DIRECTORY)


def sync_tree(folder: Path) -> None:
    """Flush every file and every folder below ``folder``, and the entry of ``folder`` itself."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(parent, name))
        sync_folder(Path(parent))
    sync_folder(folder.parent)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and flush every new entry."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def is_folder_name(name: str) -> bool:
    """Tell whether ``name`` is a valid name of a policy or state folder, ``<step>-<session>``."""
    return _FOLDER_NAME.match(name) is not None


def session_folders(parent: Path) -> Iterator[Path]:
    """Yield the policy or state folders in a folder, sorted by name."""
    for name in sorted(os.listdir(parent)) if parent.exists() else []:
        folder = parent / name
        if is_folder_name(name) and folder.is_dir() and not folder.is_symlink():
            yield folder


def size_of(path: Path) -> int:
    """Return the size of a file, not following links; -1 without a readable one."""
    try:
        return path.lstat().st_size
    except OSError:
        return -1


def write_new_file(path: Path, data: bytes) -> None:
    """Create a file and flush it with its folder entry. Raises FileExistsError if it exists."""
    with writing(path), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def link_new(existing: Path, path: Path) -> bool:
    """Link a file to a new name; return False if the name exists or the file system has no hard links."""
    try:
        os.link(existing, path)
    except OSError as error:
        if error.errno not in _NOT_LINKED:
            raise
        return False
    return True


def regular_files(folder: Path) -> list[str]:
    """Return the relative POSIX paths of all files below ``folder``, sorted. Rejects symbolic links and devices."""
    found: list[str] = []
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise CheckpointError(f"{path}: neither a file nor a folder", reason=Reason.PATH_ESCAPE)
        found += [Path(parent, name).relative_to(folder).as_posix() for name in names]
    return sorted(found)


def confined(root: Path, relative: str) -> Path:
    """Return ``root / relative`` if it is below ``root`` and crosses no symbolic link.

    Raises CheckpointError (path_escape) for absolute paths, ``..``, empty parts, backslashes and NUL.
    """
    pure = PurePosixPath(relative)
    plain = relative not in ("", ".") and "\\" not in relative and "\0" not in relative
    if not plain or pure.is_absolute() or ".." in pure.parts or pure.as_posix() != relative:
        raise CheckpointError(f"{relative!r}: not a plain path inside the store", reason=Reason.PATH_ESCAPE)
    path = root
    for part in pure.parts:
        path = path / part
        if path.is_symlink():
            raise CheckpointError(f"{path}: symbolic links are not followed", reason=Reason.PATH_ESCAPE)
    return path


def sha256_of(path: Path) -> str:
    """Return the sha256 (hex) of a file, read as a stream."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(path: Path, *, size: int, sha256: str) -> None:
    """Compare a file with its recorded size and digest. Raises CheckpointError with the reason."""
    try:
        found = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{path}: missing", reason=Reason.MISSING) from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: not a regular file", reason=Reason.PATH_ESCAPE)
    if found.st_size != size:
        raise CheckpointError(f"{path}: {found.st_size} bytes, expected {size}", reason=Reason.TRUNCATED)
    if (digest := sha256_of(path)) != sha256:
        raise CheckpointError(f"{path}: sha256 {digest}, expected {sha256}", reason=Reason.TAMPERED)


def remove_tree(folder: Path, *, first: Iterable[str] = ()) -> None:
    """Delete a folder. ``first`` are the files that make it valid, so a partly deleted folder is never valid.

    Another process may delete the same folder, or still write into it: a fenced trainer before its next call.
    """
    try:
        for name in first:
            (folder / name).unlink(missing_ok=True)
        sync_folder(folder)
    except FileNotFoundError:
        return

    def ignore_missing(_function: object, _path: object, failure: Any) -> None:
        if not isinstance(failure[1], FileNotFoundError):
            raise failure[1]

    for attempt in range(1, _REMOVAL_ATTEMPTS + 1):
        try:
            shutil.rmtree(folder, onerror=ignore_missing)
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or attempt == _REMOVAL_ATTEMPTS:
                raise


def full_disk(error: BaseException) -> bool:
    """Tell whether an error means a full disk, for errors of the system and of libraries."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    # safetensors and torch report the operating system's error as text only.
    number = _ERROR_TEXT.search(str(error))
    return number is not None and int(number[1]) in _FULL


@contextmanager
def naming_full_disk(folder: Path, item: str) -> Iterator[None]:
    """Raise CheckpointError (disk_full) in place of any error that means a full disk, while ``item`` is written."""
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is no Exception
        if full_disk(error) and not isinstance(error, CheckpointError):
            raise disk_full_error(folder, item, error) from error
        raise


def disk_full_error(folder: Path, item: str, error: BaseException) -> CheckpointError:
    """Return the error for a write of ``item`` on a full disk, with the folder and the number of free bytes."""
    free = _free_bytes(folder)
    cause = (str(error).splitlines() or [type(error).__name__])[-1]
    return CheckpointError(
        f"{folder}: disk full while writing {item}, {free} bytes free ({cause})", reason=Reason.DISK_FULL
    )


def _free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that holds ``folder``, which another rank may remove meanwhile."""
    for existing in (folder, *folder.parents):
        with suppress(FileNotFoundError):
            return shutil.disk_usage(existing).free
    raise FileNotFoundError(folder)
