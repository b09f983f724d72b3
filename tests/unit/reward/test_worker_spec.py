"""Verifiers that a run needs, and the text of the isolation level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.config.load import validate_run_config
from rollmesh.config.run import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.reward.confinement import IsolationLevel
from rollmesh.reward.messages import WorkerSpec, needed_verifiers, worker_spec
from rollmesh.tasks.sandbox.probe import SandboxLevel
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN

TABLE = {"type": "jsonl", "path": "a.jsonl"}
GYM = {"type": "reasoning_gym", "task": "chain_sum"}


def run_config(folder: Path, data: dict[str, Any], verifier: str) -> RunConfig:
    (folder / "config.json").write_text("{}")
    settings = {
        "name": "spec",
        "folder": str(folder / "run"),
        "model": {"path": str(folder)},
        "data": data,
        "reward": {"verifier": verifier, "options": {"tolerance": 0.5} if verifier == "numeric" else {}},
    }
    return validate_run_config(settings, "test")


@pytest.mark.parametrize(
    ("data", "verifier", "required", "optional"),
    [
        ({"source": TABLE}, "numeric", (), ()),
        ({"source": {"type": "countdown"}}, "countdown", (), ()),
        ({"source": {"type": "countdown"}}, "numeric", ("countdown",), ()),
        ({"source": GYM}, "numeric", ("reasoning_gym",), ()),
        ({"source": TABLE, "evaluation_source": GYM}, "numeric", ("reasoning_gym",), ()),
        (
            {"source": {**TABLE, "verifier_field": "by"}, "evaluation_source": GYM},
            "numeric",
            ("reasoning_gym",),
            tuple(sorted(set(BUILT_IN) - {"regex", "http_judge", "composite", "numeric", "reasoning_gym"})),
        ),
    ],
)
def test_a_run_loads_the_verifiers_that_its_prompts_can_name(
    tmp_path: Path, data: dict[str, Any], verifier: str, required: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    assert needed_verifiers(run_config(tmp_path, data, verifier)) == (required, optional)


def test_a_spec_survives_its_way_to_the_template(tmp_path: Path) -> None:
    spec = worker_spec(run_config(tmp_path, {"source": GYM}, "numeric"))
    assert WorkerSpec.from_json(spec.to_json()) == spec
    assert spec.default_options == {"tolerance": 0.5}
    assert spec.tokenizer_folder == str(tmp_path)


def test_a_model_folder_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    config = run_config(tmp_path, {"source": TABLE}, "exact")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.path"):
        worker_spec(config)


def test_the_level_says_what_holds_and_what_does_not() -> None:
    code = SandboxLevel(available=True, own_network=True)
    level = IsolationLevel(uid=7, own_uid=False, memory_limited=True, processes_limited=False, code=code)
    text = str(level)
    held, _, missing = text.partition("; lacks: ")
    assert "uid 7" in held
    assert "memory limited" in held and "code own network" in held
    assert "own uid" in missing and "code own processes" in missing
    assert level.properties()["code_available"] is True
