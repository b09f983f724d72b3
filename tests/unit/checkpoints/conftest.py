"""A checkpoint store in a folder."""

from pathlib import Path

import pytest

from rollmesh.checkpoints.checkpoint_store import CheckpointStore

from ...kit.checkpoint_samples import SECRET


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", SECRET)
