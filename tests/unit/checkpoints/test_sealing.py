"""The run's secret."""

from __future__ import annotations

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollmesh.checkpoints.sealing import LINEAGE_FILE, SECRET_FILE, lineage, run_secret, seal, sealed
from rollmesh.errors import CheckpointError


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


def test_a_checkpoint_store_keeps_its_lineage_and_another_one_has_its_own(tmp_path: Path) -> None:
    assert lineage(tmp_path / "a") == lineage(tmp_path / "a")
    assert lineage(tmp_path / "a") != lineage(tmp_path / "b")


def test_a_short_secret_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / SECRET_FILE).write_text("short")
    with pytest.raises(CheckpointError, match="at least 32"):
        run_secret(tmp_path)


def test_a_seal_fits_its_secret_and_its_data_only() -> None:
    tag = seal(b"k", b"data")
    assert sealed(b"k", b"data", tag)
    assert not sealed(b"K", b"data", tag)
    assert not sealed(b"k", b"date", tag)
    assert not sealed(b"k", b"data", "\xff" + tag[1:])
