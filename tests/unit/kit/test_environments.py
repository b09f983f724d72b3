"""The environments of other packages: found only when complete, and their absence explained."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from ...kit import environments
from ...kit.environments import NotInstalled, cache_folder, sglang_cpu

SGLANG = sglang_cpu()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder instead of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_folder().mkdir()
    return cache_folder()


def make_folder(folder: Path, *, complete: bool) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    if complete:
        (folder / "COMPLETE").touch()
    return folder


def test_a_half_built_environment_is_not_used() -> None:
    folder = make_folder(SGLANG.folder, complete=False)
    with pytest.raises(NotInstalled, match="not been made yet"):
        SGLANG.find_python()
    (folder / "COMPLETE").touch()
    assert SGLANG.find_python() == folder / "bin" / "python"


def test_an_environment_without_its_python_is_not_used() -> None:
    folder = make_folder(SGLANG.folder, complete=True)
    (folder / "bin" / "python").unlink()
    with pytest.raises(NotInstalled, match="its python is gone"):
        SGLANG.find_python()


def test_a_build_without_packages_leaves_its_reason_and_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(SGLANG.folder, complete=False)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotInstalled, match="could not install torch"):
        SGLANG.install()
    assert not SGLANG.folder.exists()
    with pytest.raises(NotInstalled, match="could not install torch"):
        SGLANG.find_python()


def test_a_build_removes_environments_that_were_not_used_for_hours(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, recent = (make_folder(cache / f"{SGLANG.name}-{name}", complete=True) for name in ("old", "recent"))
    hours_ago = time.time() - environments.UNUSED_SECONDS - 60
    os.utime(old / "COMPLETE", (hours_ago, hours_ago))
    monkeypatch.setattr(environments, "BUILD_SECONDS", 0)
    with pytest.raises(NotInstalled):
        SGLANG.install()
    assert recent.exists() and not old.exists()


@pytest.mark.parametrize("changed", ["no_deps.txt", "constraints.txt", "shims/sgl_kernel/__init__.py"])
def test_other_contents_make_another_environment(tmp_path: Path, changed: str) -> None:
    home = shutil.copytree(SGLANG.requirements.parent, tmp_path / "copy")
    assert sglang_cpu(home).folder == SGLANG.folder
    (home / changed).write_text("# another\n")
    assert sglang_cpu(home).folder != SGLANG.folder
