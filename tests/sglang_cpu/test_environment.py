"""The environment of the real server: found only when complete, and its absence explained."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from . import install


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder instead of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    install.cache_folder().mkdir()
    return install.cache_folder()


def make_folder(folder: Path, *, complete: bool) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    if complete:
        (folder / "COMPLETE").touch()
    return folder


def test_a_half_built_environment_is_not_used() -> None:
    folder = make_folder(install.environment_folder(), complete=False)
    with pytest.raises(install.NotInstalled, match="not been made yet"):
        install.find_python()
    (folder / "COMPLETE").touch()
    assert install.find_python() == folder / "bin" / "python"


def test_an_environment_without_its_python_is_not_used() -> None:
    folder = make_folder(install.environment_folder(), complete=True)
    (folder / "bin" / "python").unlink()
    with pytest.raises(install.NotInstalled, match="its python is gone"):
        install.find_python()


def test_a_build_without_packages_leaves_its_reason_and_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(install.environment_folder(), complete=False)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(install.NotInstalled, match="could not install torch"):
        install.install()
    assert not install.environment_folder().exists()
    with pytest.raises(install.NotInstalled, match="could not install torch"):
        install.find_python()


def test_a_build_removes_environments_that_were_not_used_for_hours(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, recent = (make_folder(cache / f"{install.PREFIX}{name}", complete=True) for name in ("old", "recent"))
    hours_ago = time.time() - install.UNUSED_SECONDS - 60
    os.utime(old / "COMPLETE", (hours_ago, hours_ago))
    monkeypatch.setattr(install, "BUILD_SECONDS", 0)
    with pytest.raises(install.NotInstalled):
        install.install()
    assert recent.exists() and not old.exists()


@pytest.mark.parametrize("changed", ["no_deps.txt", "constraints.txt", "shims/sgl_kernel/__init__.py"])
def test_other_contents_make_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    before = install.environment_folder()
    copy = shutil.copytree(install.HERE, tmp_path / "copy")
    for name in ("REQUIREMENTS", "NO_DEPS", "CONSTRAINTS", "SHIMS"):
        monkeypatch.setattr(install, name, copy / getattr(install, name).relative_to(install.HERE))
    monkeypatch.setattr(install, "HERE", copy)
    assert install.environment_folder() == before
    (copy / changed).write_text("# another\n")
    assert install.environment_folder() != before
