"""What can be said about a run file before anything is created or started."""

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

_LOOK_SECONDS = 60.0


def check_run(config: RunConfig) -> Estimate:
    """Refuse a run that cannot start on this machine; returns what it will need.

    Raises ConfigError or DataError naming the field: a schedule that cannot work, a model folder that is none, a
    table that is not there, an unknown verifier or environment. The user's own code is not imported here: the service
    that runs it says what is wrong with it.
    """
    needs = estimate(config)
    _check_model(config)
    _check_name("reward.verifier", config.reward.verifier, list(VERIFIERS), "module:function")
    _check_verifier_is_used(config)
    # Where services share no folder this may be the machine of any of them, and only generators' have SGLang.
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
        raise ConfigError(f"model.path={path}: {folder} holds no *.safetensors; weights of other formats are not read")
    Tokenizer(folder)
    positions = read_json(folder / "config.json").get("max_position_embeddings")
    if isinstance(positions, int) and config.generator.max_context_tokens > positions:
        raise ConfigError(
            f"generator.max_context_tokens={config.generator.max_context_tokens} is more than the model's "
            f"max_position_embeddings={positions}"
        )


def check_sglang(server: SglangConfig) -> None:
    """Refuse a Python, by default this one, that cannot start an SGLang server. Raises ConfigError."""
    python = server.python
    field = f"generator.sglang.python={python or 'this Python'}"
    fix = "install the extra rollmesh[sglang] there, or name an interpreter that has it"
    if python is None:
        if importlib.util.find_spec("sglang") is None:
            raise ConfigError(f"{field}: has no SGLang; {fix}")
        return
    look = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('sglang') else 7)"
    try:
        found = subprocess.run(
            [python, "-c", look],
            capture_output=True,
            text=True,
            timeout=_LOOK_SECONDS,
            check=False,
            env={**os.environ, **server.environment},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{field}: cannot be run: {error}") from error
    if found.returncode:
        raise ConfigError(f"{field}: has no SGLang; {fix}{found.stderr.strip() and ': ' + found.stderr.strip()}")


def _check_verifier_is_used(config: RunConfig) -> None:
    """Generated tasks name the verifier of their prompts; another one in the run file would never be called."""
    sources = [s for s in (config.data.source, config.data.evaluation_source) if s is not None]
    own = {s.type for s in sources if isinstance(s, CountdownSource | ReasoningGymSource)}
    default = RewardConfig.model_fields["verifier"].default
    if len(own) == len({s.type for s in sources}) and config.reward.verifier not in own | {default}:
        raise ConfigError(
            f"reward.verifier={config.reward.verifier}: would never be used, because every prompt of the "
            f"{' and '.join(sorted(own))} source is scored by that task's own verifier; leave reward.verifier out, or "
            "bring the prompts as a jsonl, parquet or python source"
        )


def _check_name(field: str, name: str, known: list[str], own: str) -> None:
    if name not in known and ":" not in name:
        raise ConfigError(f"{field}: {name!r} is none of {', '.join(known)}, and not {own} of your own")
