"""Run folders for the report's tests."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import made_checkpoints, made_run
from .made_checkpoints import MadeRun


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    """Writes a run folder; see ``made_run.make_run``."""
    return made_run.make_run


@pytest.fixture
def run_folder(tmp_path: Path, make_run: Callable[..., Path]) -> Path:
    """A complete run of 12 steps."""
    return make_run(tmp_path / "run", steps=12)


@pytest.fixture(scope="session")
def audited_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with real policies and batch files, made once; never change it."""
    return made_checkpoints.make_audited_run(tmp_path_factory.mktemp("made") / "run").folder


@pytest.fixture
def audited(audited_original: Path, tmp_path: Path) -> MadeRun:
    """A copy of that run to break."""
    folder = tmp_path / "run"
    shutil.copytree(audited_original, folder)
    return MadeRun(folder)


@pytest.fixture(scope="session")
def hf_logprobs() -> Callable[..., Any]:
    """The plain forward pass; see ``made_checkpoints.hf_logprobs``."""
    return made_checkpoints.hf_logprobs
