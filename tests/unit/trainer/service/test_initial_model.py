"""A model folder that cannot be trained is a wrong setting: the trainer names the field."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rollmesh.checkpoints.location import open_checkpoints
from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import ConfigError
from rollmesh.trainer.main import build_ranks


def test_a_torn_initial_model_is_named_with_its_field(tmp_path: Path) -> None:
    torn = shutil.copytree(resolve_model("recipe:countdown"), tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:1000])
    config = RunConfig.model_validate({"name": "torn", "folder": str(tmp_path / "run"), "model": {"path": str(torn)}})
    with pytest.raises(ConfigError, match=f"model.path={torn}: .* not a loadable causal LM"):
        build_ranks(config, open_checkpoints(config))
