"""Checks of a run file before a folder is created or a process starts."""

from __future__ import annotations

from pathlib import Path

from rollmesh.checkpoints.describe import architecture_of, check_weights, read_json
from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.config.reward import RewardConfig
from rollmesh.errors import CheckpointError, ConfigError, EngineError
from rollmesh.generator.engines.engine_registry import ENGINES
from rollmesh.launcher.estimate import Estimate, estimate
from rollmesh.launcher.machine_checks import check_machine
from rollmesh.tasks.environments.environment_protocol import BUILT_IN as ENVIRONMENTS
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN as VERIFIERS
from rollmesh.text import Tokenizer

MOST_TRAIN_STEPS = 10**9
"""Largest number of train steps; a second each would take 30 years."""


def check_run(config: RunConfig) -> Estimate:
    """Check that a run can start on this machine, and return the estimate of its resources.

    Raises ConfigError or DataError naming the field: an impossible schedule, a folder without a model, a missing table,
    an unknown verifier or environment. User code is not imported here: the service that runs it reports its errors.
    """
    if config.trainer.train_steps > MOST_TRAIN_STEPS:
        raise ConfigError(f"trainer.train_steps={config.trainer.train_steps}: expected at most {MOST_TRAIN_STEPS}")
    needs = estimate(config)
    _check_model(config)
    _check_name("reward.verifier", config.reward.verifier, list(VERIFIERS), "module:function")
    _check_verifier_is_used(config)
    # Without a shared folder this machine may run any service, and only generator machines have the engine.
    if config.network.shared_folder:
        check_machine(config)
        ENGINES[config.generator.engine].check_machine(config)
    if config.rollout.program == "environment":
        _check_name("rollout.environment", config.rollout.environment, list(ENVIRONMENTS), "module:Class")
    for field, source in config.data.sources.items():
        if source.table_path is not None and not Path(source.table_path).is_file():
            raise ConfigError(
                f"data.{field}.path={source.table_path}: no such file (paths are relative to {Path.cwd()}, where the "
                "command was started)"
            )
    return needs


def _check_model(config: RunConfig) -> None:
    path = config.model.path
    folder = resolve_model(path)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path={path}: {folder} contains no *.safetensors; other formats are not supported")
    Tokenizer(folder).check_template_variables(config.data.chat_template_kwargs, "data.chat_template_kwargs")
    try:
        ENGINES[config.generator.engine].check_model(folder)
        architecture_of(read_json(folder / "config.json"), str(folder))
        if config.network.shared_folder:  # the pods that load them check them
            check_weights(folder)
    except (CheckpointError, EngineError) as error:
        raise ConfigError(f"model.path={path}: {error}") from error
    positions = read_json(folder / "config.json").get("max_position_embeddings")
    if isinstance(positions, int) and config.generator.max_context_tokens > positions:
        raise ConfigError(
            f"generator.max_context_tokens={config.generator.max_context_tokens} is more than the model's "
            f"max_position_embeddings={positions}"
        )


def _check_verifier_is_used(config: RunConfig) -> None:
    """Reject a configured verifier that would never be called: prompts of generated tasks name their own verifier."""
    sources = config.data.sources.values()
    own = {source.task_verifier for source in sources}
    types = " and ".join(sorted({source.type for source in sources}))
    default = RewardConfig.model_fields["verifier"].default
    if all(own) and config.reward.verifier not in own | {default}:
        raise ConfigError(
            f"reward.verifier={config.reward.verifier}: would never be used, because every prompt of the "
            f"{types} source is scored by that task's own verifier; remove reward.verifier, "
            "or provide the prompts as a jsonl, parquet or python source"
        )


def _check_name(field: str, name: str, known: list[str], path_form: str) -> None:
    if name not in known and ":" not in name:
        raise ConfigError(f"{field}: {name!r} is none of {', '.join(known)}, and not a path {path_form}")
