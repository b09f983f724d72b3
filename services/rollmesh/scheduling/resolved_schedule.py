"""Resolved schedule: every number and rule that ``decide`` needs, and the limits that the store enforces."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from rollmesh.config import RunConfig
from rollmesh.config.fixed_settings import fixed_fields
from rollmesh.config.sampler_methods import ORDER
from rollmesh.errors import ConfigError
from rollmesh.mesh import ResumeOrder, RunLimits
from rollmesh.scheduling.axes import AdmissionRule, OnStale, StartOrder
from rollmesh.scheduling.contradictions import contradictions
from rollmesh.scheduling.presets import PRESETS, Preset
from rollmesh.scheduling.schedule_bounds import Bounds

BYTES_PER_TOKEN = 8
"""Size of an int32 id and a float32 logprob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(Bounds):
    """One preset with its overrides applied; the bounds are those of ``Bounds``."""

    preset: str
    admission: AdmissionRule
    auto_pool: bool = False
    """True if the pool follows measured times and the generators' caches, below pool_size."""
    most_waiting: int = 0
    """Trajectories leased beyond the pool while as many wait between two calls of a generator."""
    segment_tokens: int
    """Tokens of one policy version after which a trajectory rests; 0 for no rest."""
    start_order: StartOrder
    resume_order: ResumeOrder
    barrier: bool
    """True to stop generation from a cut until the policy trained on it is announced."""
    straggler_timeout_seconds: float
    max_filtered_in_a_row: int
    """Zero-variance groups in a row that end the run; also the limit for groups without two scored answers."""
    train_steps: int
    """Batches of the whole run."""
    longest_prompt_tokens: int
    longest_trajectory_tokens: int
    """Most tokens of a trajectory beyond its prompt."""
    partial_save_tokens: int
    """Tokens per partial save; each save takes some memory in addition."""
    bytes_per_token: int
    """Payload of a token in Redis, a teacher's scores included."""

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        """Apply the overrides of the run file to its preset.

        Raises ConfigError for values that contradict each other, the preset, or another section.
        """
        section, preset, bounds = config.schedule, PRESETS[config.schedule.preset], Bounds.resolve(config)
        tokens = _segment_tokens(config, preset)
        follows = section.pool_size is None and preset.auto_pool and not tokens
        if problems := list(contradictions(config, bounds)):
            raise ConfigError("\n".join(problems))
        return cls(
            **{field.name: getattr(bounds, field.name) for field in fields(bounds)},
            preset=section.preset,
            admission=preset.admission,
            auto_pool=follows or section.pool_size == "auto",
            most_waiting=config.rollout.most_waiting,
            segment_tokens=tokens,
            start_order=preset.start_order if section.start_order is None else StartOrder(section.start_order),
            resume_order=ResumeOrder(section.resume_order),
            barrier=preset.barrier,
            straggler_timeout_seconds=section.straggler_timeout_seconds,
            max_filtered_in_a_row=section.max_filtered_in_a_row or 10 * section.groups_per_batch,
            train_steps=config.trainer.train_steps,
            longest_prompt_tokens=config.data.max_prompt_tokens,
            longest_trajectory_tokens=config.rollout.max_new_tokens,
            partial_save_tokens=config.rollout.partial_save_tokens,
            bytes_per_token=BYTES_PER_TOKEN + max((t.bytes_per_token for t in config.teachers.values()), default=0),
        )

    @property
    def rests_while_training(self) -> bool:
        """True if no token is sampled between a cut and the policy that is trained on it."""
        return self.barrier or self.max_staleness == 0

    @property
    def predicts_lengths(self) -> bool:
        """True if an order depends on expected lengths, so that their prediction is measured."""
        return self.start_order is StartOrder.LONGEST_EXPECTED or self.resume_order is ResumeOrder.NEAREST_END

    @property
    def pool_groups(self) -> int:
        """Number of groups that fill a pool of pool_size, rounded up."""
        return -(-self.pool_size // self.launched_members)

    @property
    def expected_staleness(self) -> float:
        """Expected mean staleness, in train steps; at most the bound, and 0 for max_staleness 0.

        By Little's law a trajectory stays in a full pool for pool_size / (B * launched_members) train steps. With an
        automatic pool it is one step, and more where groups take longer than an update to be ready.
        """
        if self.auto_pool:
            return min(float(self.max_staleness), 1.0)
        return min(float(self.max_staleness), self.pool_size / (self.groups_per_batch * self.launched_members))

    @property
    def most_begun_again(self) -> float:
        """Most times that groups begin again, per trained group of a long run; 0 without restart and set_aside.

        restart: a group that is trained in batch j = 0 .. k - 1 of a wave of k batches begins again at most
        floor(j / (max_staleness + 1)) times; the result is the mean over j. set_aside: a cut leaves at most
        L = (k - 1) * B + spare_groups groups of its wave, and long rounds of B groups train them: L of every B + L
        trained groups begin again, and at the end of the run up to L more are set aside.
        """
        waves, batch = self.wave_batches, self.groups_per_batch
        if self.on_stale is OnStale.RESTART:
            return sum(j // (self.max_staleness + 1) for j in range(waves)) / waves
        late = (waves - 1) * batch + self.spare_groups
        return late / (batch + late) if self.on_stale is OnStale.SET_ASIDE else 0.0


def _segment_tokens(config: RunConfig, preset: Preset) -> int:
    given, budget = config.schedule.segment_tokens, config.rollout.max_new_tokens
    if given is not None or not preset.segments:
        return given or 0
    return min(budget, max(config.rollout.partial_save_tokens, -(-budget // preset.segments)))


def resolved_section(config: RunConfig) -> dict[str, Any]:
    """Return the fields of the schedule section, those that are null with the values of the preset."""
    schedule, section = asdict(Schedule.from_config(config)), config.schedule.model_dump(mode="json")
    schedule |= {"pool_size": "auto"} if schedule["auto_pool"] else {}
    return {name: schedule.get(name) if value is None else value for name, value in section.items()}


def run_limits(config: RunConfig) -> RunLimits:
    """Return the limits that the store enforces; raises ConfigError for an invalid schedule."""
    schedule, section, curriculum = Schedule.from_config(config), resolved_section(config), config.curriculum
    has_rounds = curriculum.planner != "single" or curriculum.group_shaper != "none"
    return RunLimits(
        group_size=schedule.group_size,
        groups_per_batch=schedule.groups_per_batch,
        max_staleness=schedule.max_staleness,
        max_attempts=config.rollout.max_attempts,
        session_ttl_seconds=config.store.session_ttl_seconds,
        filter_zero_variance=config.schedule.filter_zero_variance,
        mask_old_segments=schedule.on_stale is OnStale.MASK_OLD_SEGMENTS,
        train_steps=schedule.train_steps,
        keeps_history=has_rounds or schedule.predicts_lengths or config.curriculum.sampler != ORDER,
        resume_order=schedule.resume_order,
        window_groups=schedule.window_groups,
        most_members=max(
            2 * (schedule.group_size + schedule.spare_members), curriculum.largest_group(schedule.group_size)
        ),
        fixed_settings=tuple((f"schedule.{name}", str(section[name])) for name in fixed_fields("schedule")),
        has_rounds=has_rounds,
    )
