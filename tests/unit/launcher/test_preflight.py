"""What is refused before anything is created or started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError, DataError
from rollmesh.launcher.preflight import check_run


def run(**sections: Any) -> RunConfig:
    small = {"name": "trial", "folder": "runs/trial", "model": {"path": "recipe:countdown"}}
    return RunConfig.model_validate({**small, **sections})


def test_a_run_that_can_start_is_described() -> None:
    assert check_run(run(schedule={"pool_size": 100})).pool_size == 100


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"schedule": {"pool_size": 641}}, r"schedule.pool_size=641 .* = 640"),
        ({"model": {"path": "no/such/folder"}}, "model.path=no/such/folder: .* holds no config.json"),
        ({"model": {"path": "recipe:chess"}}, "recipe:chess: .* recipes: countdown"),
        ({"reward": {"verifier": "countdwn"}}, "reward.verifier: 'countdwn' is none of exact, .*, countdown"),
        (
            {"reward": {"verifier": "mine:reward"}},
            "verifier=mine:reward: would never be used, .* countdown source",
        ),
        (
            {"rollout": {"program": "environment", "environment": "abacus"}},
            "rollout.environment: 'abacus' is none of calculator",
        ),
        ({"data": {"source": {"type": "jsonl", "path": "absent.jsonl"}}}, "data.source.path=absent.jsonl: no such"),
        (
            {"data": {"evaluation_source": {"type": "parquet", "path": "absent.parquet"}}},
            "data.evaluation_source.path=absent.parquet: no such",
        ),
    ],
)
def test_a_run_that_cannot_start_is_refused_by_field(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(run(**sections))


def test_a_folder_with_a_config_but_no_weights_or_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no \\*.safetensors"):
        check_run(run(model={"path": str(tmp_path)}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(DataError, match="needs a fast tokenizer"):
        check_run(run(model={"path": str(tmp_path)}))
