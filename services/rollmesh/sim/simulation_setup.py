"""Settings of a simulation, from a run file and from what the run file does not say: devices, lengths, times."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from rollmesh.config import RunConfig
from rollmesh.config.data import MixtureSource
from rollmesh.config.loss_methods import MASKS
from rollmesh.config.recipes import resolve_model
from rollmesh.config.section import Section
from rollmesh.config.yaml_text import field_value
from rollmesh.curriculum.planners import RoundRules
from rollmesh.curriculum.samplers import load_sampler
from rollmesh.errors import ConfigError
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.scheduling import Schedule, run_limits
from rollmesh.scheduling.next_policy import ReloadRules
from rollmesh.sim.decode_curve import DecodeCurve
from rollmesh.sim.event_clock import MOST_EVENTS
from rollmesh.sim.failures import FailurePlan
from rollmesh.sim.fleet import FleetSettings
from rollmesh.sim.length_trace import TracedLengths, by_group, read_trace, trace_of_run
from rollmesh.sim.lengths import NAMED, LengthModel, parse_lengths
from rollmesh.sim.prompts import DomainRows, SimulatedDomain, SimulatedPrompts, parse_domains
from rollmesh.sim.reward_model import RewardModel, SolveModel
from rollmesh.sim.roofline import (
    ALIASES,
    MODELS,
    WEIGHT_BYTES,
    Roofline,
    find_gpu,
    find_model,
    weight_count,
)
from rollmesh.sim.simulated_drafts import LONGEST_DRAFT, SimulatedDrafts
from rollmesh.sim.simulated_mesh import MeshSettings
from rollmesh.sim.simulated_trainer import TrainerModel
from rollmesh.worker.routing import Placement

DEFAULT_RUN = Path(__file__).parent / "default_run.yaml"
"""Run file of a simulation without one."""
SCALE_RUN = Path(__file__).parent / "scale_run.yaml"
"""Run file of ``rollmesh sim --scale``."""
_STEP_START = ("recompute", "current")
"""Sources of old logprobs that need the weights at the start of the step: those of the gradient, with one minibatch."""
_OLDER_WEIGHTS = ("stage_end", "snapshot", "ewma")
"""Sources of old logprobs that need a pass with other weights."""
_LONG = 10**12
ASSUMED_DRAFTS = "history:acceptance=0.7"
_CLASS_MIDDLES = (5 / 6, 1 / 2, 1 / 6)
"""Probabilities of the lengths that stand for the long, the medium and the short third of the responses."""
_PROMPTS = 10_000


class SimulationSetup(Section):
    """Devices, lengths and times. The constants hold for every run; none is tuned to a published result."""

    gpu: str = "H100"
    """GPU of the table."""
    model: str | None = None
    """Model of the table, or a Hugging Face folder; null for that of the run file."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices of one generator."""
    trainer_devices: int = Field(default=8, ge=1)
    """Devices of the trainer."""
    colocated: bool = False
    """True if trainer and generators share their devices."""
    switch_seconds: float = Field(default=5.0, ge=0)
    """Time to hand shared devices over, in each direction."""
    curve: str | None = None
    """File of a measured decode curve; null uses the roofline of the GPU."""
    drafts: str | None = None
    """Speculative decoding, RULE:acceptance=A; null for that of generator.speculation, with an assumed acceptance."""
    lengths: str = "deepcoder-14b"
    """Lengths of the responses: a name, a run folder or a trace; see docs/simulator.md."""
    growth_per_step: float = Field(default=0.0, gt=-1)
    """Relative growth of the lengths per train step."""
    prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a prompt; null is half of data.max_prompt_tokens. Recorded lengths have their own."""
    prompts: int | None = Field(default=None, ge=1)
    """Prompts of an epoch; null is 10,000, or the prompts of recorded lengths."""
    domains: str | None = None
    """Domains of the prompts as name:weight:length_factor,...; null for those of a mixture or of the sampler's targets,
    with factor 1."""
    step_fixed_seconds: float = Field(default=5.0, ge=0)
    """Seconds of an optimizer step that no token adds to; a train step has trainer.minibatches of them."""
    storage_bytes_per_second: float = Field(default=5e9, gt=0)
    """Rate at which weights are written, and read by each generator."""
    swap_seconds: float = Field(default=1.0, ge=0)
    """Time for which a generator decodes nothing, because it swaps weights."""
    reward_seconds: float = Field(default=1.0, ge=0)
    """Median time to score an answer."""
    reward_sigma: float = Field(default=0.5, ge=0)
    """Standard deviation of its logarithm."""
    reward_workers: int = Field(default=64, ge=1)
    """Answers that are scored at the same time."""
    seed: int = Field(default=0, ge=0)
    """Seed of lengths, rewards and failures."""


S = TypeVar("S", bound=Section)


def parse_items(option: str, section: type[S], items: Sequence[str]) -> S:
    """Read ``name=value`` items of an option of the command line.

    Raises ConfigError with the known names for an unknown one, and for a bad value.
    """
    values = {}
    for item in items:
        name, separator, text = item.partition("=")
        if not separator or name not in section.model_fields:
            known = ", ".join(section.model_fields)
            raise ConfigError(f"{option} {item}: expected NAME=VALUE, with a name of {known}")
        values[name] = field_value(section, [name], text)
    try:
        return section.model_validate(values)
    except ValidationError as error:
        lines = (f"{option} {each['loc'][0]}={each['input']}: {each['msg']}" for each in error.errors())
        raise ConfigError("\n".join(lines)) from error


def mesh_settings(
    config: RunConfig,
    setup: SimulationSetup,
    failures: FailurePlan | None = None,
    *,
    is_long: bool = False,
) -> MeshSettings:
    """Return the settings of a simulation; raises ConfigError for values that do not fit together."""
    schedule = Schedule.from_config(config)
    for field in ("token_budget", "turn_budget"):
        if (name := getattr(config.curriculum, field)) != "constant":
            raise ConfigError(
                f"curriculum.{field}={name}: simulated lengths do not depend on the train step of a policy; set "
                "constant for the simulation"
            )
    roofline = Roofline(
        gpu=find_gpu(setup.gpu),
        model=find_model(model_name(config, setup)),
        tensor_parallel=setup.tensor_parallel,
    )
    prompts = _prompts(config, setup, schedule)
    return MeshSettings(
        schedule=schedule,
        limits=run_limits(config),
        rounds=RoundRules.from_config(config, group_size=schedule.group_size, spare_members=schedule.spare_members),
        fleet=_fleet(config, setup, roofline, prompts),
        prompts=prompts,
        trainer=_trainer(config, setup, roofline),
        rewards=RewardModel(
            median_seconds=setup.reward_seconds,
            sigma=setup.reward_sigma,
            worker_count=setup.reward_workers,
            seed=setup.seed,
        ),
        partial_save_tokens=config.rollout.partial_save_tokens,
        devices=_devices(setup, config.generator.replicas),
        failures=failures or FailurePlan(),
        failure_seed=setup.seed,
        sampler=load_sampler(config.curriculum),
        seed=config.seed,
        most_events=_LONG if is_long else MOST_EVENTS,
    )


def model_name(config: RunConfig, setup: SimulationSetup) -> str:
    """Return the model of the setup, else that of the run file: a name of the table, or a folder.

    Raises ConfigError if the run file's model is not on this machine.
    """
    name = config.model.path if setup.model is None else setup.model
    if setup.model is not None or name.lower() in (*MODELS, *ALIASES):
        return name
    try:
        return str(resolve_model(name))
    except ConfigError as error:
        raise ConfigError(f"{error}; or simulate a model of its size: --model {', '.join(ALIASES)}") from error


def _prompts(config: RunConfig, setup: SimulationSetup, schedule: Schedule) -> SimulatedPrompts:
    lengths = _lengths(config, setup)
    has_domains = setup.domains is not None or config.curriculum.sampler == "domain_mix"
    if isinstance(lengths, TracedLengths) and has_domains:
        cause = "curriculum.sampler=domain_mix" if setup.domains is None else f"domains={setup.domains}"
        raise ConfigError(f"{cause} with lengths={setup.lengths}: recorded lengths have no domains")
    count = setup.prompts or (len(lengths.groups) if isinstance(lengths, TracedLengths) else _PROMPTS)
    domains = () if isinstance(lengths, TracedLengths) else _domains(config, setup)
    return SimulatedPrompts(
        lengths=lengths,
        solver=SolveModel(seed=setup.seed),
        count=count,
        prompt_tokens=setup.prompt_tokens or max(1, config.data.max_prompt_tokens // 2),
        groups_per_batch=schedule.groups_per_batch,
        repeats=schedule.prompt_repeats,
        domains=DomainRows(domains, count) if domains else None,
    )


def _domains(config: RunConfig, setup: SimulationSetup) -> tuple[SimulatedDomain, ...]:
    """Return the domains of the setting, else those that the run file names, with equal lengths; empty for neither."""
    if setup.domains is not None:
        return parse_domains(setup.domains)
    weights: Mapping[str, float] = {}
    if isinstance(config.data.source, MixtureSource):
        weights = {part.name: part.weight for part in config.data.source.parts}
    elif config.curriculum.sampler == "domain_mix":
        weights = config.curriculum.sampler_options["targets"]
    return tuple(SimulatedDomain(name=name, weight=weight, length_factor=1.0) for name, weight in weights.items())


def _fleet(config: RunConfig, setup: SimulationSetup, roofline: Roofline, prompts: SimulatedPrompts) -> FleetSettings:
    generator = config.generator
    if generator.on_new_version == "next_slice":
        raise ConfigError(
            "generator.on_new_version=next_slice: adapters are not simulated; set model.adapter=null and "
            "generator.on_new_version=interrupt, keep_kv or drain for the simulation"
        )
    longest = _longest_call(config, prompts.lengths, prompts.prompt_tokens)
    drafts = _drafts(config, setup)
    if setup.curve is not None:
        costs = DecodeCurve.read(Path(setup.curve)).costs(generator.slots)
    else:
        costs = roofline.costs(generator.slots * (1 if drafts is None else 1 + LONGEST_DRAFT))
    return FleetSettings(
        count=generator.replicas,
        slots=generator.slots,
        cache_tokens=generator.kv_token_capacity or roofline.cache_tokens(longest),
        costs=costs,
        fetch_seconds=_transfer_seconds(setup, roofline),
        swap_seconds=setup.swap_seconds,
        on_new_version=generator.on_new_version,
        rules=ReloadRules.from_config(config),
        placement=Placement(config.rollout.placement),
        drafts=drafts,
        class_lengths=tuple(prompts.lengths.quantiles(_CLASS_MIDDLES).tolist()),
    )


def _drafts(config: RunConfig, setup: SimulationSetup) -> SimulatedDrafts | None:
    if setup.drafts is not None:
        return SimulatedDrafts.parse(setup.drafts)
    return None if config.generator.speculation == "off" else SimulatedDrafts.parse(ASSUMED_DRAFTS)


def _lengths(config: RunConfig, setup: SimulationSetup) -> LengthModel | TracedLengths:
    if setup.lengths not in NAMED and Path(setup.lengths).exists():
        return _recorded_lengths(config, setup)
    named, longest = parse_lengths(setup.lengths), config.rollout.max_new_tokens
    if named.known_to is not None and longest > named.known_to:
        raise ConfigError(
            f"lengths={setup.lengths} is known up to {named.known_to} tokens; rollout.max_new_tokens={longest} exceeds "
            "it: lower it, or give lengths=lognormal:median=M,sigma=S,share=H"
        )
    return LengthModel(
        marginal=named.marginal,
        prompt_share=named.prompt_share,
        cap=longest,
        growth_per_step=setup.growth_per_step,
        seed=setup.seed,
    )


def _recorded_lengths(config: RunConfig, setup: SimulationSetup) -> TracedLengths:
    path, budget = Path(setup.lengths), config.rollout.max_new_tokens
    for name, value in (("prompt_tokens", setup.prompt_tokens), ("growth_per_step", setup.growth_per_step)):
        if value:
            raise ConfigError(f"{name}={value} with lengths={path}: recorded lengths have their own; leave it out")
    trajectories = tuple(trace_of_run(path)) if path.is_dir() else read_trace(path)
    recorded = RecordedRun(path).config if path.is_dir() else None
    longest = max(sum(trajectory.outputs) + sum(trajectory.observations) for trajectory in trajectories)
    if recorded is not None and longest >= recorded.rollout.max_new_tokens < budget:
        raise ConfigError(
            f"lengths={path} is known up to {longest} tokens, where that run ended its responses; "
            f"rollout.max_new_tokens={budget} exceeds it: lower it, or give a run with longer responses"
        )
    groups = by_group(trajectory.cut(budget) for trajectory in trajectories)
    return TracedLengths(groups=groups, seed=setup.seed)


def _longest_call(config: RunConfig, lengths: LengthModel | TracedLengths, prompt_tokens: int) -> int:
    """Return the most context tokens of a call. Raises ConfigError if the generators allow fewer."""
    most, cap = config.generator.max_context_tokens, config.rollout.max_new_tokens
    if isinstance(lengths, TracedLengths):
        longest, trajectory = lengths.longest()
        source = f"lengths: {trajectory.name}, with rollout.max_new_tokens={cap},"
    else:
        longest, source = prompt_tokens + cap, f"prompt_tokens={prompt_tokens} and rollout.max_new_tokens={cap}"
    if longest > most:
        raise ConfigError(
            f"{source} have {longest} tokens and exceed generator.max_context_tokens={most}; lower them or raise the "
            "context"
        )
    return longest


def _trainer(config: RunConfig, setup: SimulationSetup, roofline: Roofline) -> TrainerModel:
    devices = setup.trainer_devices
    return TrainerModel(
        fixed_seconds=setup.step_fixed_seconds * config.trainer.minibatches,
        seconds_per_token=roofline.train_seconds_per_token(devices),
        evidence_passes=_evidence_passes(config),
        evidence_seconds_per_token=roofline.forward_seconds_per_token(devices),
        publication_seconds=_transfer_seconds(setup, roofline),
        colocated=setup.colocated,
        switch_seconds=setup.switch_seconds if setup.colocated else 0.0,
    )


def _evidence_passes(config: RunConfig) -> int:
    """Return the passes without a gradient of ``trainer/learner/train_step.py``; methods of a user's code add none."""
    algorithm = config.trainer.algorithm
    source, advantage = algorithm.old_logprobs, algorithm.advantage_method
    policy = advantage.needs_policy or any(MASKS[mask.name].needs == "policy" for mask in algorithm.masks)
    # Masks are applied before the gradient pass, so its log-probabilities come too late for them.
    start = policy or (source in _STEP_START and (config.trainer.minibatches > 1 or bool(algorithm.masks)))
    pinned = algorithm.kl_reference == "version"
    reference = pinned and (algorithm.kl_coefficient > 0 or advantage.needs_reference)
    return start + (source in _OLDER_WEIGHTS) + reference


def _transfer_seconds(setup: SimulationSetup, roofline: Roofline) -> float:
    return WEIGHT_BYTES * weight_count(roofline.model) / setup.storage_bytes_per_second


def _devices(setup: SimulationSetup, generators: int) -> int:
    of_generators = generators * setup.tensor_parallel
    if not setup.colocated:
        return of_generators + setup.trainer_devices
    if setup.trainer_devices != of_generators:
        raise ConfigError(
            f"colocated with trainer_devices={setup.trainer_devices}: the {generators} generators have "
            f"{of_generators} devices; set trainer_devices={of_generators}"
        )
    return of_generators
