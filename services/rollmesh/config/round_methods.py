"""Planners, group shapers and budgets that a run file names."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rollmesh.config.methods import Method, Point
from rollmesh.config.section import Section


class PlannerOptions(Section):
    """Options of a planner of one round with ``schedule.group_size`` members."""

    def needed(self, group_size: int) -> int:
        """Return the number of scored members that complete a group of one round."""
        return self.launched(group_size)

    def launched(self, group_size: int) -> int:
        """Return the most members that the planner launches in a group."""
        return group_size

    def first_launched(self, group_size: int) -> int:
        """Return the members that the planner launches in the first round of a group."""
        return group_size


class DarsOptions(PlannerOptions):
    """Options of dars."""

    rule: Literal["et", "hw"] = "et"
    """et: equal treatment, the sum of a group's absolute advantages does not depend on p; hw: hardness-weighted, hard
    prompts get more."""
    most_members: int | None = Field(default=None, ge=2)
    """N_max: most members of a group; null is 32 with et and 64 with hw."""

    @property
    def largest_group(self) -> int:
        """N_max, the default of the rule filled in."""
        return self.most_members or {"et": 32, "hw": 64}[self.rule]

    def launched(self, group_size: int) -> int:
        return max(group_size, self.largest_group)


class QuorumOptions(PlannerOptions):
    """Options of quorum."""

    share: float = Field(default=0.95, gt=0, le=1)
    """Share of schedule.group_size, rounded up, that completes a group."""

    def needed(self, group_size: int) -> int:
        # 0.95 * 20 is a little above 19 in floating point.
        return math.ceil(self.share * group_size - 1e-9)


class SpareOptions(PlannerOptions):
    """Options of spare."""

    factor: int = Field(default=1, ge=1)
    """Members launched per member of schedule.group_size; 2 in Shuffle-R1."""
    extra: int = Field(default=1, ge=0)
    """Members launched beyond them; 1 in MC-GRPO."""

    @model_validator(mode="after")
    def _launches_more(self) -> Self:
        if self.factor == 1 and self.extra == 0:
            raise ValueError("factor=1 and extra=0 launch nothing more; raise one, or set planner=single")
        return self

    def launched(self, group_size: int) -> int:
        return self.factor * group_size + self.extra

    def first_launched(self, group_size: int) -> int:
        return self.launched(group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerMethod(Method):
    """One planner; its function returns the planner."""

    options: type[PlannerOptions] = PlannerOptions
    adaptive: bool = False
    """The number of members of a group depends on its rewards."""


PLANNERS = Point(
    field="curriculum.planner",
    module="rollmesh.curriculum.planners",
    own=PlannerMethod("your code", adaptive=True),
    methods={
        "single": PlannerMethod(
            "one round of schedule.group_size rollouts and schedule.spare_members", function="OneRoundPlanner"
        ),
        "dars": PlannerMethod(
            "DARS (code)",
            function="DarsPlanner",
            options=DarsOptions,
            adaptive=True,
            deviation="a right answer is one with a positive outcome; its advantage is dr_grpo; exact quotients, "
            "where the code rounds in floating point",
            example={"trainer.algorithm.advantage": "dr_grpo"},
        ),
        "quorum": PlannerMethod(
            "BroRL (descriptions)",
            function="OneRoundPlanner",
            options=QuorumOptions,
            deviation="the source gives 512 rollouts and no quorum; set schedule.group_size=512",
            example={"curriculum.planner_options": {"share": 0.8}},
        ),
        "spare": PlannerMethod(
            "MC-GRPO (code): n + 1, with its advantage; Shuffle-R1 (fork): 2 n, with the advantage pairs",
            function="OneRoundPlanner",
            options=SpareOptions,
        ),
    },
)
_OWN_MOST_PER_MEMBER = 8


def planned_members(name: str, options: Mapping[str, Any], group_size: int) -> tuple[int, int]:
    """Return the members of the first round of a group, and the most of all its rounds.

    A user's planner, which only the leader calls, counts with ``group_size`` and 8 per member of it.
    """
    if name not in PLANNERS.methods:
        return group_size, _OWN_MOST_PER_MEMBER * group_size
    known = PLANNERS[name].options.model_validate(dict(options))
    return known.first_launched(group_size), known.launched(group_size)


class DapOptions(Section):
    """Options of dap."""

    longest_tokens: int = Field(ge=1)
    """L: tokens of the longest answer, usually rollout.max_new_tokens."""
    buffer_tokens: int = Field(default=2048, ge=1)
    """Tokens below ``longest_tokens`` in which the penalty grows."""
    gamma: float = Field(default=1.0, ge=0)
    """Power of the share of right answers that weighs the penalty of a right answer."""
    failure_scale: float = Field(default=1.0, ge=0)
    """Weight of the penalty of a wrong answer."""

    @model_validator(mode="after")
    def _the_buffer_fits(self) -> Self:
        if self.buffer_tokens > self.longest_tokens:
            raise ValueError(
                f"buffer_tokens={self.buffer_tokens} is above longest_tokens={self.longest_tokens}; lower it"
            )
        return self


class DotOptions(Section):
    """Options of dot."""

    alpha: float = Field(default=3.0, gt=0)
    """Standard deviations above the mean length of the group from which an answer is an outlier."""
    least_excess: int = Field(default=32, ge=1)
    """Fewest tokens beyond the limit that are cut off."""
    truncated_reward: float = 0.0
    """Reward of a truncated answer, before its other shaping."""


SHAPERS: Point[Method] = Point(
    field="curriculum.group_shaper",
    module="rollmesh.curriculum.shapers",
    inputs=("GroupOutcome", "records"),
    methods={
        "none": Method("rewards stay as the worker has shaped them", function="unshaped"),
        "dap": Method(
            "Apriel-Reasoner, difficulty-aware penalty (code)",
            options=DapOptions,
            deviation="gamma and buffer_tokens are ours",
            example={"curriculum.group_shaper_options": {"longest_tokens": 512, "buffer_tokens": 128}},
        ),
        "dot": Method(
            "DOT (code)",
            options=DotOptions,
            deviation="a truncated answer is not verified again but gets truncated_reward; no prompt oversampling, "
            "because filtered groups are replaced at once; no KL-Cov term",
            example={"curriculum.group_shaper_options": {"alpha": 1.5}},
        ),
    },
)


def largest_z_score(count: int) -> float:
    """Return the largest (x - mean) / std, ddof 1, of one of ``count`` values; 0 for one value."""
    return (count - 1) / math.sqrt(count)


class PeriodOptions(Section):
    """Options of cosine and stair_cosine."""

    shortest: int = Field(ge=1)
    """L_min: smallest budget."""
    longest: int = Field(ge=1)
    """L_max: largest budget."""
    period: int = Field(default=640, ge=2)
    """T: train steps from one largest budget to the next."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest={self.shortest} is above longest={self.longest}; swap them")
        return self


class StairOptions(PeriodOptions):
    """Options of stair."""

    compression: float = Field(default=0.5, gt=0, lt=1)
    """Share of the period with the smallest budget, which comes first."""


def _rising(stages: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    steps = [step for step, _ in stages]
    if steps[:1] != [0] or steps != sorted(set(steps)):
        raise ValueError("expected [[train step, budget], ...] with rising train steps, the first of them 0")
    if min(budget for _, budget in stages) < 1:
        raise ValueError("expected budgets of at least 1")
    return stages


class StepsOptions(Section):
    """Options of steps."""

    stages: Annotated[tuple[tuple[int, int], ...], AfterValidator(_rising)]
    """[train step, budget] of each stage, which lasts until the next one."""


_PERIOD = {"curriculum.token_budget_options": {"shortest": 32, "longest": 64, "period": 4}}

BUDGETS: Point[Method] = Point(
    field="curriculum.token_budget",
    module="rollmesh.curriculum.budgets",
    inputs=("train_step",),
    methods={
        "constant": Method("rollout.max_new_tokens or rollout.max_turns at every train step", function=None),
        "cosine": Method("SIRI, arXiv 2509.25176, with 8192, 16384 and 640", options=PeriodOptions, example=_PERIOD),
        "stair_cosine": Method("SIRI, arXiv 2509.25176", options=PeriodOptions, example=_PERIOD),
        "stair": Method(
            "SIRI, arXiv 2509.25176", options=StairOptions, deviation="the share of each half is ours", example=_PERIOD
        ),
        "steps": Method(
            "TTI (code), for turns: 10, 20 and 30",
            options=StepsOptions,
            deviation="by train step instead of iteration; no multiplicative form",
            example={"curriculum.token_budget_options": {"stages": [[0, 32], [2, 64]]}},
        ),
    },
)
"""Budgets of tokens, and of turns: ``curriculum.turn_budget`` names the same ones."""


def largest_budget(name: str, options: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the option with the largest budget of a method and its value; None if it has none."""
    if name not in BUDGETS.methods:
        return None
    known = BUDGETS[name].options.model_validate(dict(options))
    if isinstance(known, PeriodOptions):
        return "longest", known.longest
    if isinstance(known, StepsOptions):
        return "stages", max(budget for _, budget in known.stages)
    return None
