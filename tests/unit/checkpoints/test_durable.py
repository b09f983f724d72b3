"""Removal of folders that another process still uses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rollmesh.checkpoints.durable import remove_tree


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "states" / "1"
    (path / "shards").mkdir(parents=True)
    for name in ("COMMITTED", "rank-0.json", "shards/a", "shards/b"):
        (path / name).write_bytes(b"x")
    return path


def test_a_folder_is_removed_while_another_process_writes_into_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, late = os.rmdir, iter(["late-1", "late-2", "late-3"])

    def rmdir(path: Any, **options: Any) -> None:
        if (name := next(late, None)) is not None:
            (folder / name).write_bytes(b"x")
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    remove_tree(folder, first=["COMMITTED"])
    assert not folder.exists()
    assert next(late, None) is None


def test_a_folder_that_is_written_without_end_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, number = os.rmdir, iter(range(1000))

    def rmdir(path: Any, **options: Any) -> None:
        (folder / f"late-{next(number)}").write_bytes(b"x")
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    with pytest.raises(OSError, match="not empty"):
        remove_tree(folder, first=["COMMITTED"])
    assert not (folder / "COMMITTED").exists()


def test_files_that_another_process_has_deleted_are_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def twice(path: Any, **options: Any) -> None:
        unlink(path, **options)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", twice)
    remove_tree(folder)
    assert not folder.exists()


def test_a_folder_that_is_gone_already_is_no_error(tmp_path: Path) -> None:
    remove_tree(tmp_path / "gone", first=["COMMITTED"])
    assert list(tmp_path.iterdir()) == []
