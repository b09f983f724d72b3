"""Old-logprob sources, update scales and draws of replayed groups that a run file names."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from pydantic import Field

from rollmesh.config.methods import Method, Point
from rollmesh.config.section import Section


class TrainerLogprobs(Enum):
    """Trainer-side log-probabilities that a source of old logprobs uses."""

    NONE = "none"
    STEP_START = "step_start"
    """Log-probabilities of one pass with the weights before the first update of the train step."""
    STAGE_END = "stage_end"
    """Log-probabilities recorded at the end of the stage that sampled the token."""
    SNAPSHOT = "snapshot"
    """Log-probabilities recomputed with the stored weights of the token's version."""
    AVERAGE = "average"
    """Log-probabilities under the average of the weights at the start of the train step."""
    GRADIENT_PASS = "gradient_pass"
    """Log-probabilities of the gradient pass, in a share that grows with the token's staleness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldLogprobMethod(Method):
    """One source of old logprobs, the denominator of the ratio."""

    value: str
    """``pi_old`` of a token, in words."""
    trainer_logprobs: TrainerLogprobs
    needs_pure: bool = False
    """Cannot reproduce a token that attended to another version's KV cache, and takes the sampler's own instead."""
    missing_reason: str = "missing"
    """Reason counted for tokens without a trainer-side value."""

    @property
    def is_known_early(self) -> bool:
        """True if the trainer has log-probabilities of its own before the gradient pass."""
        return self.trainer_logprobs not in (TrainerLogprobs.NONE, TrainerLogprobs.GRADIENT_PASS)

    @property
    def corrects_replay(self) -> bool:
        """True if it gives tokens of earlier batches a denominator that corrects their age."""
        return self.trainer_logprobs not in (TrainerLogprobs.NONE, TrainerLogprobs.STAGE_END)


class EwmaOptions(Section):
    """Options of ewma."""

    window: float = Field(default=2.0, gt=0, le=1000)
    """W, the staleness in train steps that the average is made for."""
    reset_below: float = Field(default=0.9, ge=0, le=1)
    """Share of tokens outside masks and with a gradient below which the average begins again with the current weights;
    0 never resets it."""

    @property
    def beta(self) -> float:
        """Factor of the weights that are one train step older: W / (W + 2)."""
        return self.window / (self.window + 2)


OldLogprobName = Literal["sampler", "stage_end", "recompute", "current", "snapshot", "loglinear", "ewma"]

OLD_LOGPROBS: Point[OldLogprobMethod] = Point(
    field="trainer.algorithm.old_logprobs",
    methods={
        "sampler": OldLogprobMethod(
            value="the logprob of the engine that sampled it, of its own version",
            source="our variant of CoPRIS",
            trainer_logprobs=TrainerLogprobs.NONE,
        ),
        "stage_end": OldLogprobMethod(
            value="the trainer's logprob at the end of the stage that sampled it; needs a barrier",
            source="CoPRIS, arXiv 2511.05589",
            trainer_logprobs=TrainerLogprobs.STAGE_END,
            needs_pure=True,
            missing_reason="stage_not_recorded",
            example={"schedule.preset": "copris_paper"},
        ),
        "recompute": OldLogprobMethod(
            value="the trainer's logprob before the step",
            source="decoupled PPO, arXiv 2505.24298",
            trainer_logprobs=TrainerLogprobs.STEP_START,
            needs_pure=True,
        ),
        "current": OldLogprobMethod(
            value="the trainer's logprob before the step, mixed caches included",
            source="POIS of UloRL, arXiv 2507.19766",
            trainer_logprobs=TrainerLogprobs.STEP_START,
        ),
        "snapshot": OldLogprobMethod(
            value="the logprob under the stored weights of its version",
            source="Missing Old Logits, arXiv 2605.12070",
            trainer_logprobs=TrainerLogprobs.SNAPSHOT,
            needs_pure=True,
            missing_reason="version_not_kept",
        ),
        "loglinear": OldLogprobMethod(
            value="``(1 - a) log mu + a log pi``, ``a = d / (d + 1)`` for a token of staleness d; ``log pi`` is "
            "that of the gradient pass, detached: no pass of its own, and the ratio to pi is "
            "``(pi / mu)^(1 / (d + 1))``",
            source="AReaL (documentation)",
            trainer_logprobs=TrainerLogprobs.GRADIENT_PASS,
            deviation="versions are train steps, and that of the update is one above the weights at its start",
        ),
        "ewma": OldLogprobMethod(
            value="the logprob under ``theta(t) = sum_k beta^(t-k) theta(k) / sum_k beta^(t-k)``, an average "
            "of the weights of the train steps k since its start or last reset, ``beta = W / (W + 2)``; one pass "
            "of its own, mixed caches included",
            source="revised PPO-EWMA of Missing Old Logits, arXiv 2605.12070",
            options=EwmaOptions,
            trainer_logprobs=TrainerLogprobs.AVERAGE,
            missing_reason="average_not_kept",
            deviation="once per train step, also with several minibatches; a token is active if it is in the loss "
            "and its weight is not 0 (a clip of ppo_clip sets it to 0, a cap does not)",
            example={"trainer.algorithm.loss": "decoupled_ppo"},
        ),
    },
)


class EssOptions(Section):
    """Options of ess."""

    base: float = Field(default=1.0, gt=0, le=1)
    """rho_base: share of the effective sample size from which on the rate is not lowered."""
    rule: Literal["sqrt", "linear"] = "sqrt"
    """Power of the share: 1/2 or 1."""


UpdateScaleName = Literal["none", "ess"]

UPDATE_SCALES: Point[Method] = Point(
    field="trainer.algorithm.update_scale",
    module="rollmesh.algorithms.ratios",
    inputs=("share",),
    methods={
        "none": Method("the learning rate of the run file", function=None),
        "ess": Method(
            "VCPO, arXiv 2602.17616",
            function="ess_scale",
            options=EssOptions,
            deviation="the factor only, not its baseline; weights over the tokens in the loss",
        ),
    },
)

MOST_BATCHES = 64


class ReplayConfig(Section):
    """Groups drawn from the last batch files, beside the groups of the cut."""

    share: float = Field(default=0.5, gt=0, le=0.9)
    """Share of replayed groups in a batch. The cut stays at schedule.groups_per_batch fresh groups, and the draw adds
    share / (1 - share) times as many, or all that the staleness bound allows: 0.5 doubles the batch."""
    batches: int = Field(default=4, ge=1, le=MOST_BATCHES)
    """K: the draw is among the fresh groups of the last K batches, which stay in the memory of the trainer."""
    by: Literal["uniform", "reward"] = "uniform"
    """Weight of a group in the draw, which is without replacement: uniform, or exp of the mean shaped reward of its
    answers (reward)."""


def replayed_count(fresh: int, share: float) -> int:
    """Return the number of groups to draw beside ``fresh`` ones, so that they are ``share`` of the batch."""
    return round(fresh * share / (1 - share))


_SNAPSHOT = {"trainer.algorithm.old_logprobs": "snapshot"}

REPLAYS: Point[Method] = Point(
    field="trainer.replay.by",
    methods={
        "uniform": Method(
            "Rollout Replay, with DOTS",
            deviation="from the last batches instead of a buffer of prompts, and within max_staleness",
            example=_SNAPSHOT,
        ),
        "reward": Method(
            "TBA, arXiv 2503.18929",
            deviation="whole groups by their mean reward; no share for the newest policy",
            example=_SNAPSHOT,
        ),
    },
)
