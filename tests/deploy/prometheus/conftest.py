"""Paths of the rules, and of Debian's promtool and prometheus."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNPACKED = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rollmesh" / "prometheus" / "usr" / "bin"
"""Folder into which the Makefile unpacks the packages (install.sh)."""


def tool(name: str) -> str:
    """Path of a program of Prometheus; skips the test where it cannot be had."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.skip(f"{name} is neither on PATH nor in {UNPACKED}: make prometheus-try")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    """The rule checker."""
    return tool("promtool")
