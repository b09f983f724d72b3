"""Checks of a run file before a folder is created or a process starts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

from rollmesh.checkpoints.describe import read_json
from rollmesh.config import RunConfig
from rollmesh.config.data import CountdownSource, JsonlSource, ReasoningGymSource, RewardConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.config.services import SglangConfig
from rollmesh.errors import ConfigError
from rollmesh.launcher.estimate import Estimate, estimate
from rollmesh.tasks.environments.environment_factory import BUILT_IN as ENVIRONMENTS
from rollmesh.tasks.verifiers.verifier_registry import BUILT_IN as VERIFIERS
from rollmesh.text import Tokenizer

_PROBE_SECONDS = 60.0


def check_run(config: RunConfig) -> Estimate:
    """Check that a run can start on this machine, and return the estimate of its resources.

    Raises ConfigError or DataError naming the field: an impossible schedule, a folder without a model, a missing table,
    an unknown verifier or environment. User code is not imported here: the service that runs it reports its errors.
    """
    needs = estimate(config)
    _check_model(config)
    _check_name("reward.verifier", config.reward.verifier, list(VERIFIERS), "module:function")
    _check_verifier_is_used(config)
    # Without a shared folder this machine may run any service, and only generator machines have SGLang.
    if config.generator.engine == "sglang" and config.generator.sglang.url is None and config.network.shared_folder:
        check_sglang(config.generator.sglang)
    if config.rollout.program == "environment":
        _check_name("rollout.environment", config.rollout.environment, list(ENVIRONMENTS), "module:Class")
    for field in ("source", "evaluation_source"):
        source = getattr(config.data, field)
        if isinstance(source, JsonlSource) and not Path(source.path).is_file():
            raise ConfigError(
                f"data.{field}.path={source.path}: no such file (paths are relative to {Path.cwd()}, where the "
                "command was started)"
            )
    return needs


def _check_model(config: RunConfig) -> None:
    path = config.model.path
    folder = resolve_model(path)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path={path}: {folder} contains no *.safetensors; other formats are not supported")
    Tokenizer(folder)
    positions = read_json(folder / "config.json").get("max_position_embeddings")
    if isinstance(positions, int) and config.generator.max_context_tokens > positions:
        raise ConfigError(
            f"generator.max_context_tokens={config.generator.max_context_tokens} is more than the model's "
            f"max_position_embeddings={positions}"
        )


def check_sglang(server: SglangConfig) -> None:
    """Check that the configured Python, by default this one, can start SGLang; raises ConfigError otherwise."""
    python = server.python
    field = f"generator.sglang.python={python or 'this Python'}"
    fix = "install the extra rollmesh[sglang] there, or name an interpreter that has it"
    if python is None:
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError(f"{field}: has no SGLang; {fix}")
        return
    probe = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('sglang') else 7)"
    try:
        result = subprocess.run(
            [python, "-c", probe],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
            env={**os.environ, **server.environment},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{field}: cannot be run: {error}") from error
    if result.returncode:
        raise ConfigError(f"{field}: has no SGLang; {fix}{result.stderr.strip() and ': ' + result.stderr.strip()}")


def _check_verifier_is_used(config: RunConfig) -> None:
    """Reject a configured verifier that would never be called: prompts of generated tasks name their own verifier."""
    sources = [s for s in (config.data.source, config.data.evaluation_source) if s is not None]
    generated = {s.type for s in sources if isinstance(s, CountdownSource | ReasoningGymSource)}
    default = RewardConfig.model_fields["verifier"].default
    if len(generated) == len({s.type for s in sources}) and config.reward.verifier not in generated | {default}:
        raise ConfigError(
            f"reward.verifier={config.reward.verifier}: would never be used, because every prompt of the "
            f"{' and '.join(sorted(generated))} source is scored by that task's own verifier; remove reward.verifier, "
            "or provide the prompts as a jsonl, parquet or python source"
        )


def _check_name(field: str, name: str, known: list[str], path_form: str) -> None:
    if name not in known and ":" not in name:
        raise ConfigError(f"{field}: {name!r} is none of {', '.join(known)}, and not a path {path_form}")
