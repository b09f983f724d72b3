"""The whole run file, and checks for invalid combinations of fields."""

from collections.abc import Iterator
from itertools import chain
from typing import Any, Self

from pydantic import Field, model_validator

from rollmesh.config.advantage_methods import ADVANTAGES
from rollmesh.config.curriculum import CurriculumConfig
from rollmesh.config.data import CountdownSource, DataConfig, MixtureSource
from rollmesh.config.generator import ENGINE_SECTIONS, GeneratorConfig
from rollmesh.config.loss_methods import LOSSES, MASKS
from rollmesh.config.methods import listed
from rollmesh.config.model import ModelConfig
from rollmesh.config.old_logprob_methods import OLD_LOGPROBS, TrainerLogprobs
from rollmesh.config.rollout import EvalConfig, RewardConfig, RolloutConfig
from rollmesh.config.sampler_methods import ORDER
from rollmesh.config.schedule import ScheduleConfig
from rollmesh.config.section import EngineSection, Section
from rollmesh.config.services import (
    AgentsConfig,
    GatewayConfig,
    LauncherConfig,
    NetworkConfig,
    SecurityConfig,
    TelemetryConfig,
)
from rollmesh.config.store import CheckpointConfig, StoreConfig
from rollmesh.config.teachers import TeacherConfig, TeacherName, teacher_problems
from rollmesh.config.trainer import DUAL_CLIP, TrainerConfig


class RunConfig(Section):
    """Configuration of one run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    """Name of the run, used as prefix of its Redis keys and label of its metrics."""
    folder: str = Field(min_length=1)
    """Run folder: config, logs, metrics, report, embedded Redis, checkpoints."""
    seed: int = 0
    """Seed of prompts, shuffling and sampling noise (engine torch)."""
    model: ModelConfig
    """The policy before training."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Prompts."""
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    """Choice of prompts, rounds of rollouts, group rewards and budgets."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Program and limits of a rollout."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """Scoring."""
    teachers: dict[TeacherName, TeacherConfig] = Field(default_factory=dict)
    """Teachers by name; ``trainer.algorithm`` says what the policy learns from their scores."""
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """Admission and cut."""
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    """Generation."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Optimization."""
    checkpoints: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Policies and trainer state."""
    store: StoreConfig = Field(default_factory=StoreConfig)
    """The trajectory queue."""
    evaluation: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation."""
    launcher: LauncherConfig = Field(default_factory=LauncherConfig)
    """Local processes."""
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    """Addresses of the services, and their discovery in pods."""
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    """Logs, traces and trackers."""
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    """Certificates and tokens of the services' ports."""
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    """The page and the REST API."""
    agents: AgentsConfig = Field(default_factory=AgentsConfig)
    """The OpenAI-compatible API."""

    @model_validator(mode="before")
    @classmethod
    def _sections_have_defaults_of_others(cls, data: Any) -> Any:
        """Fill in the defaults of an engine, of adapters, and of agents, whose evaluations may need a client."""
        names = ("model", "generator", "rollout", "evaluation")
        sections = {name: data.get(name) or {} for name in names} if isinstance(data, dict) else {}
        if not sections or not all(isinstance(section, dict) for section in sections.values()):
            return data
        engine = ENGINE_SECTIONS.get(str(sections["generator"].get("engine")), EngineSection)
        defaults = {
            "generator": {} if sections["model"].get("adapter") is None else {"on_new_version": "next_slice"},
            "rollout": engine.rollout_defaults,
            "evaluation": {"before_and_after": False} if sections["rollout"].get("program") == "agent" else {},
        }
        return {**data, **{name: {**given, **sections[name]} for name, given in defaults.items() if given}}

    @model_validator(mode="after")
    def _the_sections_fit_together(self) -> Self:
        problems = chain(
            _teacher_problems(self),
            _algorithm_problems(self),
            _sampler_problems(self),
            _size_problems(self),
            _adapter_problems(self),
        )
        if (problem := next(problems, None)) is not None:
            raise ValueError(problem)
        return self


def _teacher_problems(config: RunConfig) -> Iterator[str]:
    yield from teacher_problems(config.teachers, config.data.domains)
    for name, teacher in config.teachers.items():
        if teacher.engine == "sglang" and config.rollout.temperature != 1:
            yield (
                f"teachers.{name}.engine=sglang with rollout.temperature={config.rollout.temperature:g}: an SGLang "
                "server gives log-probabilities of given tokens at temperature 1 only; set rollout.temperature=1, or "
                "engine=torch"
            )
    if config.teachers and (config.rollout.top_p < 1 or config.rollout.top_k or config.rollout.min_p):
        yield "teachers: score the full distribution; leave out rollout.top_p, rollout.top_k and rollout.min_p"
    algorithm = config.trainer.algorithm
    if config.teachers and not algorithm.reads_teachers:
        yield (
            "teachers: the policy would learn nothing from their scores; set trainer.algorithm.teacher, or "
            "trainer.algorithm.kl_reference=teacher"
        )
    if algorithm.reads_teachers and not config.teachers:
        field = "kl_reference=teacher" if algorithm.teacher is None else "teacher"
        yield f"trainer.algorithm.{field}: there is no teacher to learn from; set teachers, or leave it out"
    no_reference = not algorithm.kl_coefficient and not algorithm.advantage_method.needs_reference
    if algorithm.kl_reference == "teacher" and no_reference:
        yield "trainer.algorithm.kl_reference=teacher: nothing reads a reference; set kl_coefficient, or leave it out"
    if algorithm.teacher is not None and algorithm.teacher.forward_kl_coefficient:
        sizes = {name: teacher.top_k for name, teacher in config.teachers.items()}
        for name, size in sizes.items():
            if not size or size != next(iter(sizes.values())):
                yield (
                    f"teachers.{name}.top_k={size}: trainer.algorithm.teacher.forward_kl_coefficient needs top tokens, "
                    "of every teacher the same number"
                )
    if not algorithm.rewarded:
        yield from _unread_reward_problems(config)


def _unread_reward_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings of a reward that takes no part in the advantage."""
    algorithm = config.trainer.algorithm
    # The defaults are allowed, because the resolved run file of every run contains them.
    unread = {
        "trainer.algorithm.advantage": (algorithm.advantage, "grpo"),
        "trainer.algorithm.credit": (algorithm.credit, "trajectory"),
        "schedule.filter_zero_variance": (config.schedule.filter_zero_variance, False),
        "reward.overlong_buffer_tokens": (config.reward.overlong_buffer_tokens, 0),
        "curriculum.group_shaper": (config.curriculum.group_shaper, "none"),
    }
    for field, (value, default) in unread.items():
        if value != default:
            yield (
                f"{field}={str(value).lower()}: the reward takes no part in the advantage, so the policy cannot learn "
                f"from it; leave {field} out, or set trainer.algorithm.teacher.with_reward=true"
            )


def _adapter_problems(config: RunConfig) -> Iterator[str]:
    mode, adapter = config.generator.on_new_version, config.model.adapter
    if adapter is None and mode == "next_slice":
        yield (
            "generator.on_new_version=next_slice: is for adapters, because an engine holds full weights of one version "
            "only; set model.adapter, or interrupt, keep_kv or drain"
        )
    if adapter is None:
        return
    if mode != "next_slice":
        yield (
            f"generator.on_new_version={mode}: with model.adapter a new version is loaded beside the others, so no "
            "call must be interrupted, drained or share its cache with another version; leave it out (next_slice)"
        )
    scale = config.trainer.algorithm.update_scale
    if scale != "none" and adapter.dropout:
        yield (
            f"trainer.algorithm.update_scale={scale} with model.adapter.dropout={adapter.dropout:g}: the log-"
            "probabilities of the gradient pass have the noise of the dropout, which would lower the learning rate; "
            "set update_scale=none or model.adapter.dropout=0"
        )
    if config.trainer.share_prefixes is True and adapter.dropout:
        yield (
            f"trainer.share_prefixes=true with model.adapter.dropout={adapter.dropout:g}: trajectories would share the "
            "noise of the dropout with the tokens that they begin with; set share_prefixes=auto or dropout=0"
        )
    size = config.generator.sglang.data_parallel_size
    if config.generator.engine == "sglang" and size != "1":
        yield (
            f"generator.sglang.arguments: --dp-size {size}: with model.adapter a server with data parallelism cannot "
            "load adapters while it runs; leave it out, and set generator.replicas"
        )
    joint = {"q_proj", "k_proj", "v_proj"} & set(adapter.target)
    if config.generator.engine == "sglang" and joint and not joint >= {"q_proj", "v_proj"}:
        yield (
            f"model.adapter.target={list(adapter.target)}: SGLang computes q_proj, k_proj and v_proj as one layer and "
            "needs q_proj and v_proj of an adapter that has one of the three; add them"
        )


def _algorithm_problems(config: RunConfig) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    if config.schedule.group_size < 2 and algorithm.advantage_method.compares == "group":
        yield (
            f"schedule.group_size={config.schedule.group_size}: {algorithm.advantage} compares the "
            "members of a group, so it needs at least 2, or trainer.algorithm.advantage=reinforce_pp"
        )
    if algorithm.old_logprobs == "stage_end" and config.checkpoints.state_every_steps != 1:
        yield (
            f"checkpoints.state_every_steps={config.checkpoints.state_every_steps}: set 1 with "
            "trainer.algorithm.old_logprobs=stage_end, because the logprobs of a stage end are saved with the trainer "
            "state, and a replay cannot compute them again"
        )
    yield from _advantage_problems(config)
    if config.trainer.replay is not None and not algorithm.old_logprob_method.corrects_replay:
        reason = (
            "sampler leaves nothing to correct the age of replayed groups with"
            if algorithm.old_logprobs == "sampler"
            else "the log-probabilities of a stage are kept for one batch only"
        )
        yield (
            f"trainer.replay with trainer.algorithm.old_logprobs={algorithm.old_logprobs}: {reason}; set "
            f"old_logprobs={listed(OLD_LOGPROBS.names(corrects_replay=True), 'or')}, or trainer.replay=null"
        )
    yield from _loss_problems(config.trainer)
    if algorithm.old_logprob_method.needs_pure and config.generator.on_new_version == "keep_kv":
        yield (
            f"trainer.algorithm.old_logprobs={algorithm.old_logprobs} cannot reproduce tokens that "
            "attended to another version's cache: use generator.on_new_version=interrupt or old_logprobs=sampler"
        )


def _advantage_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings that the advantage would ignore, or with which it is not the method of its source."""
    algorithm = config.trainer.algorithm
    name, method = algorithm.advantage, algorithm.advantage_method
    aggregation = algorithm.aggregation or algorithm.loss_method.aggregation
    if method.aggregation not in (None, aggregation):
        given = algorithm.aggregation or f"null, which is {aggregation} with loss={algorithm.loss}"
        yield (
            f"trainer.algorithm.aggregation={given}: trainer.algorithm.advantage={name} is the gradient of its source "
            f"only with another; set aggregation={method.aggregation}"
        )
    if method.ignores_shaping and config.reward.overlong_buffer_tokens:
        yield (
            f"reward.overlong_buffer_tokens={config.reward.overlong_buffer_tokens} with trainer.algorithm.advantage="
            f"{name}: {name} reads which answers are right and would ignore the penalty on the reward; set "
            "reward.overlong_buffer_tokens=0"
        )
    if method.uses_equal_rewards and config.schedule.filter_zero_variance:
        yield (
            f"schedule.filter_zero_variance=true with trainer.algorithm.advantage={name} would drop groups that {name} "
            "trains on; set false"
        )
    yield from _credit_problems(config)


def _credit_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings with which a turn or a session cannot have the reward."""
    algorithm, program = config.trainer.algorithm, config.rollout.program
    field = f"trainer.algorithm.credit={algorithm.credit}"
    if algorithm.credit == "trajectory":
        return
    if not algorithm.advantage_method.of_returns:
        yield (
            f"{field} with trainer.algorithm.advantage={algorithm.advantage}, which reads more of a trajectory than "
            f"its reward; set advantage={listed(ADVANTAGES.names(of_returns=True), 'or')}, or credit=trajectory"
        )
    if algorithm.credit == "turn" and program == "single_turn":
        yield f"{field} with rollout.program=single_turn, whose trajectories have one turn; set credit=trajectory"
    if algorithm.credit == "turn" and config.schedule.filter_zero_variance:
        yield (
            f"schedule.filter_zero_variance=true with {field} would drop groups of equal rewards whose turns differ; "
            "set false"
        )
    if algorithm.credit == "shared" and program != "agent":
        yield (
            f"{field} with rollout.program={program}: only sessions of agents share a reward; set "
            "rollout.program=agent or credit=trajectory"
        )


def _loss_problems(trainer: TrainerConfig) -> Iterator[str]:
    algorithm = trainer.algorithm
    loss, source = algorithm.loss_method, algorithm.old_logprob_method
    of_the_step = source.trainer_logprobs is TrainerLogprobs.STEP_START and trainer.minibatches == 1
    if of_the_step and algorithm.loss in LOSSES.names(pulls_without_advantage=True):
        yield (
            f"trainer.algorithm.old_logprobs={algorithm.old_logprobs} with trainer.algorithm.loss={algorithm.loss} and "
            "trainer.minibatches=1 leaves out the squared term: old_logprobs are those of the policy itself at the "
            "only update of the step; use old_logprobs=sampler, loglinear or snapshot, or more minibatches"
        )
    if loss.corrects_behavior and algorithm.old_logprobs == "sampler":
        yield (
            f"trainer.algorithm.loss={algorithm.loss} with trainer.algorithm.old_logprobs=sampler would correct "
            "nothing: its weight is old_logprobs over the behavior policy's, which sampler makes exactly 1; use "
            "old_logprobs=recompute, snapshot, current or (with a barrier, as in schedule.preset=copris_paper) "
            "stage_end, or loss=ppo_clip"
        )
    if algorithm.old_logprobs == "ewma" and (algorithm.loss, algorithm.advantage) == ("topr", "filtered_bc"):
        yield (
            "trainer.algorithm.old_logprobs=ewma with loss=topr and advantage=filtered_bc has no effect: topr has no "
            "ratio where the advantage is positive, and filtered_bc gives 0 elsewhere; use old_logprobs=sampler"
        )
    # The default is allowed, because the resolved run file of every run contains it.
    if not loss.has_dual_clip and algorithm.dual_clip not in (None, DUAL_CLIP):
        yield (
            f"trainer.algorithm.dual_clip={algorithm.dual_clip:g}: trainer.algorithm.loss={algorithm.loss} has no "
            "dual clip and would ignore it; leave dual_clip out, or use loss="
            f"{listed(LOSSES.names(has_dual_clip=True), 'or')}"
        )
    for field in ("clip_low", "clip_high"):
        value = getattr(algorithm, field)
        if loss.bounds is None and value is not None:
            yield (
                f"trainer.algorithm.{field}={value:g}: trainer.algorithm.loss={algorithm.loss} has no bounds and would "
                f"ignore it; leave {field} out"
            )
    for index, mask in enumerate(algorithm.masks):
        if MASKS[mask.name].needs == "old_logprobs" and not source.is_known_early:
            yield (
                f"trainer.algorithm.masks.{index}={mask.name} with trainer.algorithm.old_logprobs="
                f"{algorithm.old_logprobs} would mask nothing: it compares the trainer's log-probabilities before the "
                "step with those of the behavior policy; use old_logprobs="
                f"{listed(OLD_LOGPROBS.names(is_known_early=True), 'or')}"
            )


def _size_problems(config: RunConfig) -> Iterator[str]:
    if config.trainer.optimizer == "adamw_8bit" and config.launcher.least_trainer_processes > 1:
        yield (
            f"trainer.optimizer=adamw_8bit with launcher.trainer_processes={config.launcher.trainer_processes}: the "
            "8-bit moments cannot be split over processes; use optimizer=adamw, whose moments are split, or 1 process"
        )
    need = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if need > config.generator.max_context_tokens:
        yield (
            f"generator.max_context_tokens={config.generator.max_context_tokens} is less than data.max_prompt_tokens"
            f" + rollout.max_new_tokens = {need}"
        )
    if config.schedule.groups_per_batch % config.trainer.minibatches:
        yield (
            f"trainer.minibatches={config.trainer.minibatches} does not divide "
            f"schedule.groups_per_batch={config.schedule.groups_per_batch}"
        )


def _sampler_problems(config: RunConfig) -> Iterator[str]:
    sampler, source = config.curriculum.sampler, config.data.source
    if sampler == ORDER:
        return
    if isinstance(source, CountdownSource) and source.puzzles is None:
        yield (
            f"curriculum.sampler={sampler}: data.source.type=countdown gives a new prompt at every draw, so there is "
            "nothing to choose from; set data.source.puzzles, or use it as a part of a mixture"
        )
    if sampler != "domain_mix":
        return
    targets = config.curriculum.sampler_options.get("targets")
    if isinstance(source, MixtureSource):
        names = [part.name for part in source.parts]
        if absent := next((name for name in targets or () if name not in names), None):
            yield (
                f"curriculum.sampler_options.targets.{absent}: data.source has no such part; "
                f"its parts are {', '.join(names)}"
            )
    elif config.data.domain_field is None:
        yield ("curriculum.sampler=domain_mix needs domains: set data.domain_field, or use data.source.type=mixture")
    elif not targets:
        yield "curriculum.sampler_options.targets: name the share of every domain; only a mixture has weights"
