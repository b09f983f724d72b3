"""Sizes and digests of the files of a folder, several files at a time; hashing does not hold the interpreter's lock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollmesh.checkpoints.durable import check_file, confined, regular_files, sha256_of
from rollmesh.checkpoints.manifest import ManifestFile

_THREADS = 8


def manifest_files(folder: Path, known: Mapping[str, str]) -> list[ManifestFile]:
    """Return path, size and digest of every file below ``folder``.

    ``known`` has the digests, by path, of files that were digested while they were written; they are not read again.
    """

    def describe(name: str) -> ManifestFile:
        path = folder / name
        return ManifestFile(path=name, size_bytes=path.stat().st_size, sha256=known.get(name) or sha256_of(path))

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digests") as pool:
        return list(pool.map(describe, regular_files(folder)))


def check_files(folder: Path, files: Iterable[ManifestFile]) -> None:
    """Compare files with their recorded sizes and digests. Raises CheckpointError for the first one that differs."""

    def check(file: ManifestFile) -> None:
        check_file(confined(folder, file.path), size=file.size_bytes, sha256=file.sha256)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digests") as pool:
        list(pool.map(check, files))
