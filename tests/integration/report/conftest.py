"""Run folders for the report's tests."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

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


@pytest.fixture(scope="session")
def audited_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with real policies and batch files, made once; never change it."""
    folder: Path = _neighbour("made_checkpoints").make_audited_run(tmp_path_factory.mktemp("made") / "run").folder
    return folder


@pytest.fixture
def audited(audited_original: Path, tmp_path: Path) -> Any:
    """A copy of that run to break, as ``made_checkpoints.MadeRun``."""
    folder = tmp_path / "run"
    shutil.copytree(audited_original, folder)
    return _neighbour("made_checkpoints").MadeRun(folder)


@pytest.fixture(scope="session")
def hf_logprobs() -> Callable[..., Any]:
    """The plain forward pass; see ``made_checkpoints.hf_logprobs``."""
    function: Callable[..., Any] = _neighbour("made_checkpoints").hf_logprobs
    return function
