"""The checks of a run file in their order: schedule, model, machine, data, trial of the plug-ins."""

from dataclasses import dataclass
from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.config.replica_bounds import configured_replicas, replica_field
from rollmesh.config.rollout import RewardConfig
from rollmesh.config.teachers import teacher_service
from rollmesh.errors import ConfigError
from rollmesh.generator.engines import ENGINES, check_sglang
from rollmesh.preflight.advice import Estimate, estimate, run_hints
from rollmesh.preflight.machine import check_machine, check_redis, port_notes
from rollmesh.preflight.run_model import ModelMemory, RunModel, teacher_sentence
from rollmesh.preflight.trial import runs_in_a_process, try_inputs, try_inputs_in_a_process
from rollmesh.scheduling import Schedule
from rollmesh.tasks.environments.environment_protocol import BUILT_IN as ENVIRONMENTS
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN as VERIFIERS
from rollmesh.teacher.teacher_model import read_teacher_model

MOST_TRAIN_STEPS = 10**9
"""Largest number of train steps; a second each would take 30 years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChecks:
    """Findings of the checks about a run that can start."""

    estimate: Estimate
    memory: ModelMemory
    notes: list[str]
    """Hints, and what the run goes on without."""


def check_run(config: RunConfig, *, tries_inputs: bool = True, asks_redis: bool = False) -> RunChecks:
    """Check that a run can start on this machine.

    ``tries_inputs`` also binds the ports, opens the prompts, and calls plug-ins and verifier once, the user's code in
    a process of its own. ``asks_redis`` also connects to ``store.url``; a run that starts waits for it instead. Pods,
    which share no folder, check neither machine nor inputs: each image has the libraries, data and code of its own
    service only. Raises ConfigError or DataError naming field, value and remedy.
    """
    local = config.network.shared_folder
    tries_inputs = tries_inputs and local
    elsewhere = tries_inputs and runs_in_a_process(config)
    if config.trainer.train_steps > MOST_TRAIN_STEPS:
        raise ConfigError(f"trainer.train_steps={config.trainer.train_steps}: expected at most {MOST_TRAIN_STEPS}")
    sizes, model = estimate(config), RunModel(config)
    if not elsewhere:
        model.check_template_variables()
    model.check_folder(ENGINES[config.generator.engine].check_model)
    _check_name("reward.verifier", config.reward.verifier, list(VERIFIERS), "module:function")
    _check_verifier_is_used(config)
    memory, teachers = model.memory(), list[str]()
    if local:
        check_machine(config, memory)
        for name, teacher in config.teachers.items():
            if teacher.address is None:
                folder = read_teacher_model(config, name).folder
                teachers.append(teacher_sentence(f"teachers.{name}", teacher, folder))
                if teacher.engine == "sglang":
                    check_sglang(teacher.sglang, f"teachers.{name}.sglang")
        ENGINES[config.generator.engine].check_machine(config)
    if config.rollout.program == "environment":
        _check_name("rollout.environment", config.rollout.environment, list(ENVIRONMENTS), "module:Class")
    for field, source in config.data.sources.items():
        if source.table_path is not None and not Path(source.table_path).is_file():
            raise ConfigError(
                f"data.{field}.path={source.table_path}: no such file (paths are relative to {Path.cwd()}, where the "
                "command was started)"
            )
    if asks_redis:
        check_redis(config)
    notes = port_notes(config) if tries_inputs else []
    if tries_inputs:
        notes += try_inputs_in_a_process(config) if elsewhere else try_inputs(model)
    return RunChecks(
        estimate=sizes, memory=memory, notes=[*teachers, *notes, *run_hints(config, memory.parameter_count)]
    )


def check_service(config: RunConfig, service: str) -> None:
    """Check what one service needs of a run file, before it starts. Raises ConfigError."""
    stateless = service == "reward" or service.startswith(teacher_service(""))
    if config.store.url is None and not stateless:
        raise ConfigError(
            f"store.url is null, so that the Redis of this run belongs to rollmesh up, which starts every service; a "
            f"{service} beside it needs a Redis for all of them: store.url=redis://HOST:PORT. rollmesh status shows a "
            "run"
        )
    Schedule.from_config(config)


def check_inline(config: RunConfig) -> None:
    """Raise ConfigError for a run whose services cannot share one process."""
    engines = {"generator": config.generator.engine} | {f"teachers.{n}": t.engine for n, t in config.teachers.items()}
    if (place := next((place for place, engine in engines.items() if engine == "sglang"), None)) is not None:
        raise ConfigError(
            f"{place}.engine=sglang: an SGLang server needs its own processes; leave out --inline, or debug the run "
            f"with {place}.engine=torch in another folder"
        )
    launcher = config.launcher
    counts = {"trainer": launcher.least_trainer_processes, "agents": launcher.agents_replicas}
    for service, count in {**configured_replicas(config), **counts}.items():
        if count > 1:
            field = "launcher.trainer_processes" if service == "trainer" else replica_field(config, service)
            raise ConfigError(f"{field}={count}: --inline runs one {service} in this process; add --set {field}=1")


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
