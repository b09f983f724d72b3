"""Secrets, locations and folders of a store."""

import errno
import os
import re
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.durable import disk_full_error, remove_tree
from rollmesh.checkpoints.sealing import LINEAGE_FILE, SECRET_FILE, lineage, run_secret
from rollmesh.errors import CheckpointError, ConfigError

from ...kit.run_files import made_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "states" / "1"
    (path / "shards").mkdir(parents=True)
    for name in ("COMMITTED", "rank-0.json", "shards/a", "shards/b"):
        (path / name).write_bytes(b"x")
    return path


@pytest.mark.parametrize("late_files", [3, 1000])
def test_a_folder_is_removed_while_another_process_writes_into_it_unless_that_never_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, late_files: int
) -> None:
    remove, late = os.rmdir, iter(range(late_files))

    def rmdir(path: Any, **options: Any) -> None:
        if (number := next(late, None)) is not None:
            (folder / f"late-{number}").write_bytes(b"x")
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    with nullcontext() if late_files == 3 else pytest.raises(OSError, match="not empty"):
        remove_tree(folder, first=["COMMITTED"])
    assert folder.exists() is (late_files == 1000) and not (folder / "COMMITTED").exists()


def test_files_that_another_process_has_deleted_are_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def twice(path: Any, **options: Any) -> None:
        unlink(path, **options)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", twice)
    remove_tree(folder)
    assert not folder.exists()
    remove_tree(folder, first=["COMMITTED"])


def test_a_full_disk_is_told_though_another_rank_removes_the_folder_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage

    def remove_first(path: Path) -> Any:
        if path == folder:
            remove_tree(folder)
        return usage(path)

    monkeypatch.setattr(shutil, "disk_usage", remove_first)
    told = disk_full_error(folder, "a trainer state", OSError(errno.ENOSPC, "no space"))
    assert not folder.exists() and re.search(r"disk full while writing a trainer state, \d+ bytes free", str(told))


def test_all_services_of_a_run_find_the_same_secret_in_any_order(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: run_secret(tmp_path), range(32)))
    assert len(found) == 1
    assert [p.name for p in tmp_path.iterdir()] == [SECRET_FILE]
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: lineage(tmp_path), range(32)))
    assert len(found) == 1
    assert [(p.name, stat.S_IMODE(p.stat().st_mode)) for p in tmp_path.iterdir()] == [(LINEAGE_FILE, 0o600)]


def test_a_file_whose_content_is_still_written_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / LINEAGE_FILE
    file.touch()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lineage, tmp_path)
        file.write_text("0123456789abcdef" * 4)
        assert waiting.result(60) == "0123456789abcdef" * 4


def test_a_short_secret_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / SECRET_FILE).write_text("short")
    with pytest.raises(CheckpointError, match="at least 32"):
        run_secret(tmp_path)


def test_services_without_a_shared_run_folder_are_told_what_they_must_share(tmp_path: Path) -> None:
    network = {"shared_folder": False}
    shared = str(tmp_path / "shared")

    with pytest.raises(ConfigError, match=r"checkpoints\.folder .*ROLLMESH_CHECKPOINTS__FOLDER"):
        open_checkpoints(made_run(tmp_path, network=network, checkpoints={"secret": "s" * 32}))
    with pytest.raises(ConfigError, match=r"checkpoints\.secret .*ROLLMESH_CHECKPOINTS__SECRET"):
        open_checkpoints(made_run(tmp_path, network=network, checkpoints={"folder": shared}))
    assert not (tmp_path / "secret").exists()

    sections = {"network": network, "checkpoints": {"folder": shared, "secret": "s" * 32}}
    assert str(open_checkpoints(made_run(tmp_path, **sections)).root) == shared


def test_a_folder_that_nobody_can_create_is_a_wrong_setting_and_no_crash_to_retry(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/proc/rollmesh/checkpoints"):
        open_checkpoints(made_run(tmp_path, checkpoints={"folder": "/proc/rollmesh/checkpoints"}))
