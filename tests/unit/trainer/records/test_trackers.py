"""Optional trackers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollmesh.config import RunConfig
from rollmesh.config.load import validate_run_config
from rollmesh.errors import ConfigError
from rollmesh.trainer.records.run_log import build_trackers, flatten


def config(folder: Path, *trackers: str) -> RunConfig:
    data = {
        "name": "run",
        "folder": str(folder),
        "model": {"path": "model"},
        "telemetry": {"trackers": list(trackers)},
    }
    return validate_run_config(data, "made")


def test_nested_numbers_get_one_name_each() -> None:
    record = {"loss": 1, "batch": {"reward": {"mean": 0.5}, "text": "x"}, "ok": True, "many": [1, 2], "none": None}
    assert flatten(record) == {"loss": 1.0, "batch/reward/mean": 0.5}


def test_no_tracker_is_built_unless_asked_for(tmp_path: Path) -> None:
    assert build_trackers(config(tmp_path)) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in ("torch.utils.tensorboard.writer", "torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"rollmesh\[{name}\]"):
        build_trackers(config(tmp_path, name))
