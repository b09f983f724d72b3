"""Run folders for the report's tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def _neighbour(name: str) -> ModuleType:
    """A helper module beside this file (importlib mode puts no test folder on the path)."""
    qualified = f"rollmesh_report_tests_{name}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module
        spec.loader.exec_module(module)
    return sys.modules[qualified]


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """Writes a run folder; see ``made_run.make_run``."""
    function: Callable[..., Path] = _neighbour("made_run").make_run
    return function


@pytest.fixture
def run_folder(tmp_path: Path, make_run: Callable[..., Path]) -> Path:
    """A complete run of 12 steps."""
    return make_run(tmp_path / "run", steps=12)
