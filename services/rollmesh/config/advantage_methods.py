"""Advantages that a run file names."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from rollmesh.config.methods import Method, Point
from rollmesh.config.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageMethod(Method):
    """One advantage."""

    compares: Literal["group", "batch", "none"] = "group"
    """Trajectories that it compares."""
    whole_batch: bool = False
    """Known only once the whole batch is cut."""
    needs_policy: bool = False
    """Reads sums of log-probabilities under the policy at the start of the step."""
    needs_reference: bool = False
    """Reads sums of log-probabilities under the pinned reference version."""
    aggregation: str | None = None
    """The only aggregation with which it is its source's method; None if any is."""
    ignores_shaping: bool = False
    """Reads which answers are right instead of the shaped rewards."""
    uses_equal_rewards: bool = False
    """Trains on groups whose rewards are all equal."""
    of_returns: bool = False
    """Reads nothing but the returns of a group, so that a turn or a session has one as well as a trajectory."""
    group_spread: bool = False
    """Divides by the spread of the rewards of a group."""


class GrpoOptions(Section):
    """Options of grpo."""

    norm: Literal["group_std", "none"] | None = None
    """Divisor: the standard deviation of the group, or 1; null is group_std. A planner that launches by reward needs
    one of the two named."""


class McGrpoOptions(Section):
    """Options of mc_grpo."""

    adv_clip: float | None = Field(default=5.0, gt=0)
    """Largest absolute advantage; null is off, as in the source: with rewards of 0 and 1 it then reaches thousands."""


class GrpoLambdaOptions(Section):
    """Options of grpo_lambda."""

    top_share: float = Field(default=0.2, gt=0, le=1)
    """lambda: share of the groups, the best by accuracy and at least one, whose right answers pay for length."""
    alpha: float = Field(default=0.6, ge=0, lt=1)
    """Weight of the length."""


class DrpoOptions(Section):
    """Options of drpo."""

    longest_tokens: int = Field(ge=1)
    """C: tokens of the longest answer, usually rollout.max_new_tokens."""
    length_scale: float = Field(default=0.1, gt=0)
    """Lambda: the smaller, the more a short right answer weighs."""
    tau: float = Field(default=10.0, gt=0)
    """Temperature of the softmax over wrong answers."""


class XrpoNoveltyOptions(Section):
    """Options of xrpo_novelty."""

    novelty: float = Field(default=2.5, ge=0)
    """lambda_n: weight of the novelty."""
    cap: float = Field(default=0.5, ge=0)
    """kappa: largest bonus, as a share of the advantage."""


class PairsOptions(Section):
    """Options of pairs."""

    kept: float = Field(default=0.5, gt=0, le=1)
    """alpha: share of the pairs that are kept, at least one."""


class TbaOptions(Section):
    """Options of tba."""

    beta: float = Field(gt=0)
    """Weight of the KL to the reference version."""


NO_REWARD = AdvantageMethod("0 for every trajectory", compares="none", uses_equal_rewards=True, ignores_shaping=True)
"""Row where the reward takes no part (``trainer.algorithm.teacher``)."""

_EQUAL_REWARDS = {"schedule.filter_zero_variance": False}

ADVANTAGES = Point(
    field="trainer.algorithm.advantage",
    module="rollmesh.algorithms.advantages",
    inputs=("TrajectoryColumns",),
    own=AdvantageMethod("your code", compares="none", whole_batch=True, of_returns=True),
    methods={
        "grpo": AdvantageMethod(
            "DeepSeekMath, arXiv 2402.03300",
            options=GrpoOptions,
            group_spread=True,
            of_returns=True,
            deviation="ddof 1, which the source leaves open, as in the code of CoPRIS",
        ),
        "dr_grpo": AdvantageMethod(
            "Understanding R1-Zero-Like Training, arXiv 2503.20783",
            of_returns=True,
            deviation="the advantage only, not its aggregation, which divides every answer by a constant length",
        ),
        "rloo": AdvantageMethod("Back to Basics, arXiv 2402.14740", of_returns=True),
        "reinforce_pp": AdvantageMethod(
            "REINFORCE++, arXiv 2501.03262",
            compares="batch",
            whole_batch=True,
            of_returns=True,
            deviation="every trajectory weighs the same, where the source normalises token by token; no KL in the "
            "reward",
        ),
        "mc_grpo": AdvantageMethod(
            "MC-GRPO (code)",
            options=McGrpoOptions,
            group_spread=True,
            deviation="clipped; set an odd schedule.group_size (G + 1); the pivot stays in the denominators",
            example={"schedule.group_size": 9},
        ),
        "grpo_lambda": AdvantageMethod(
            "GRPO-lambda (descriptions; no code of the authors read)",
            options=GrpoLambdaOptions,
            group_spread=True,
            whole_batch=True,
            ignores_shaping=True,
            uses_equal_rewards=True,
            deviation="wrong answers of the top groups get 0, unlike a third party's code; alpha is from that code",
            example=_EQUAL_REWARDS,
        ),
        "drpo": AdvantageMethod(
            "DRPO (code)",
            options=DrpoOptions,
            needs_policy=True,
            aggregation="sequence_mean_token_mean",
            ignores_shaping=True,
            deviation="the weights of its gradient as advantages; its KL penalty is kl_coefficient; groups without "
            "a right and a wrong answer stay in the denominators",
            example={
                "trainer.algorithm.advantage_options": {"longest_tokens": 512},
                "trainer.algorithm.aggregation": "sequence_mean_token_mean",
            },
        ),
        "xrpo_novelty": AdvantageMethod(
            "XRPO (reviews)",
            options=XrpoNoveltyOptions,
            group_spread=True,
            deviation="the advantage only; novelty under the behavior policy",
        ),
        "pairs": AdvantageMethod(
            "Shuffle-R1 (fork)",
            options=PairsOptions,
            group_spread=True,
            deviation="no batch reshuffle; dropped answers stay in the denominators; set twice the members to train on",
            example={"trainer.algorithm.skip_zero_advantage": True},
        ),
        "filtered_bc": AdvantageMethod(
            "TTI (code)", compares="none", ignores_shaping=True, uses_equal_rewards=True, example=_EQUAL_REWARDS
        ),
        "tba": AdvantageMethod(
            "TBA, arXiv 2503.18929",
            options=TbaOptions,
            needs_policy=True,
            needs_reference=True,
            aggregation="token_mean",
            uses_equal_rewards=True,
            deviation="its gradient times beta / 2, at the start of the step; no buffer; beta has no schedule; "
            "with old_logprobs: current, as it has no ratio",
            example={"trainer.algorithm.advantage_options": {"beta": 0.05}, **_EQUAL_REWARDS},
        ),
    },
)
