"""Trainer and algorithm sections."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollmesh.config.advantage_methods import ADVANTAGES, NO_REWARD, AdvantageMethod
from rollmesh.config.loss_methods import LOSSES, MASKS, LossMethod, MaskConfig
from rollmesh.config.methods import Point, listed
from rollmesh.config.old_logprob_methods import (
    OLD_LOGPROBS,
    REPLAYS,
    UPDATE_SCALES,
    OldLogprobMethod,
    OldLogprobName,
    ReplayConfig,
    UpdateScaleName,
)
from rollmesh.config.section import Section, one_error
from rollmesh.config.teachers import TeacherObjective

_Beta = Annotated[float, Field(ge=0, lt=1)]

TRAINER_POINTS: Mapping[str, Point[Any]] = {
    "advantage": ADVANTAGES,
    "loss": LOSSES,
    "masks": MASKS,
    "old_logprobs": OLD_LOGPROBS,
    "update_scale": UPDATE_SCALES,
    "replay": REPLAYS,
}
"""Points by the name that ``rollmesh config methods`` prints."""

DUAL_CLIP = 10.0
"""Default of ``dual_clip``, which every resolved run file contains for any loss."""


def _default_bounds(bound: int) -> str:
    """Return the losses by their default of the lower (0) or upper (1) bound, and those without bounds."""
    names: dict[float, list[str]] = {}
    for name, row in LOSSES.methods.items():
        if row.bounds is not None:
            names.setdefault(row.bounds[bound], []).append(name)
    defaults = ", ".join(f"{listed(of)} {value:g}" for value, of in names.items())
    return f"null uses the default of the loss ({defaults}). {listed(LOSSES.names(bounds=None))} have no bounds."


_OTHER_AGGREGATIONS = ", ".join(
    f"{name}: {row.aggregation}" for name, row in LOSSES.methods.items() if row.aggregation != "token_mean"
)


class AlgorithmConfig(Section):
    """Advantage, old-logprob source, loss, token masks."""

    advantage: str = Field(
        default="grpo",
        json_schema_extra={"examples": [*ADVANTAGES.methods, "module:function"]},
        description=f"Advantage: {listed(ADVANTAGES.names(compares='group', whole_batch=False))} compare the "
        f"trajectories of a group, {listed(ADVANTAGES.names(compares='batch'))} those of the whole batch, "
        f"{listed(ADVANTAGES.names(compares='group', whole_batch=True))} both, "
        f"{listed(ADVANTAGES.names(compares='none'))} none; or ``module:function`` of your code.",
    )
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the advantage; ``rollmesh config methods`` lists them."""
    credit: Literal["trajectory", "turn", "shared"] = Field(
        default="trajectory",
        description="What has one reward and one advantage. trajectory: a trajectory; turn: a turn of the policy, by "
        "the rewards from this turn on, which an agent posts by turn and an environment returns with its replies; "
        "shared: a session of an agent with all sessions of its sub-agents. turn and shared need an advantage "
        f"of returns alone: {listed(ADVANTAGES.names(of_returns=True), 'or')}, or your code.",
    )
    teacher: TeacherObjective | None = None
    """What the policy learns from the scores of ``teachers``; null without teachers."""
    loss: str = Field(
        default="ppo_clip",
        json_schema_extra={"examples": [*LOSSES.methods, "module:function"]},
        description=f"Policy loss: {', '.join(LOSSES.methods)}, or ``module:function`` of your code with the defaults "
        f"of ppo_clip; {listed(LOSSES.names(corrects_behavior=True))} need "
        "old_logprobs other than sampler.",
    )
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the loss beyond the fields of this section; ``rollmesh config methods`` lists them."""
    masks: tuple[MaskConfig, ...] = Field(
        default=(),
        description="Token masks in order; each takes tokens out of the loss that the ones before it left. "
        f"{listed(MASKS.names(needs='old_logprobs'))} need old_logprobs "
        f"{listed(OLD_LOGPROBS.names(is_known_early=True), 'or')}.",
    )
    old_logprobs: OldLogprobName = "sampler"
    """Source of the denominator of the ratio."""
    old_logprobs_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the old-logprob source; ``rollmesh config methods`` lists them."""
    clip_low: float | None = Field(default=None, gt=0, description=f"Lower clip, 1 for none; {_default_bounds(0)}")
    clip_high: float | None = Field(default=None, gt=0, description=f"Upper clip; {_default_bounds(1)}")
    dual_clip: float | None = Field(
        default=DUAL_CLIP,
        gt=1,
        description="c of the dual clip on negative advantages; null is off. Losses without it "
        f"({listed(LOSSES.names(has_dual_clip=False))}) reject other values than the default.",
    )
    tis_cap: float = Field(default=2.0, gt=0)
    """C of truncated importance sampling."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean"] | None = Field(
        default=None,
        description="Aggregation of the loss over tokens; null uses the default of the loss: token_mean "
        f"({_OTHER_AGGREGATIONS}).",
    )
    update_scale: UpdateScaleName = "none"
    """Factor on the learning rate of an update: none, or ess, which lowers it with the effective sample size of the
    trajectories (VCPO)."""
    update_scale_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the update scale; ``rollmesh config methods`` lists them."""
    skip_zero_advantage: bool = Field(
        default=False,
        description="Leave trajectories with advantage 0 out of the forward and backward passes, which do not change "
        "the gradient: not with kl_coefficient, update_scale, "
        f"loss {listed(LOSSES.names(pulls_without_advantage=True))}, "
        f"mask {listed(MASKS.names(whole_batch=True))}, or a loss or mask of your "
        "code. Denominators still count their tokens; the statistics of the policy (entropy, ratios, KL) then describe "
        "the other trajectories.",
    )
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL to the reference; 0 is off."""
    kl_reference: Literal["version", "teacher"] = "version"
    """Reference of the KL and of advantage tba. version: the policy version ``kl_reference_version``; teacher: the
    teacher of the prompt, whose scores are there without a pass and a second model."""
    kl_reference_version: int = Field(default=0, ge=0)
    """Reference policy version of the KL and of advantage tba, which is then kept: 0 in a new run, a published and
    kept version in a continued run. Steps that are trained again after a crash keep their reference version."""

    @field_validator("advantage")
    @classmethod
    def _advantage_is_known(cls, advantage: str) -> str:
        return ADVANTAGES.check_name(advantage)

    @field_validator("loss")
    @classmethod
    def _loss_is_known(cls, loss: str) -> str:
        return LOSSES.check_name(loss)

    @model_validator(mode="after")
    def _options_fit_their_methods(self) -> Self:
        _complete_options(self)
        return self

    @property
    def rewarded(self) -> bool:
        """True if the reward takes part in the advantage."""
        return self.teacher is None or self.teacher.with_reward

    @property
    def reads_teachers(self) -> bool:
        """True if a train step reads the scores of teachers."""
        return self.teacher is not None or self.kl_reference == "teacher"

    @property
    def advantage_method(self) -> AdvantageMethod:
        """Row of the advantage, which reads no reward if the policy learns from teachers alone."""
        return ADVANTAGES[self.advantage] if self.rewarded else NO_REWARD

    @property
    def loss_method(self) -> LossMethod:
        """Row of the loss; a user's code has the bounds and the aggregation of ppo_clip."""
        return LOSSES[self.loss]

    @property
    def old_logprob_method(self) -> OldLogprobMethod:
        """Row of the old-logprob source."""
        return OLD_LOGPROBS[self.old_logprobs]

    def filled(self) -> Self:
        """Return the section with the defaults of its loss and of the options of its methods filled in."""
        low, high = self.loss_method.bounds or (None, None)
        masks = tuple(
            mask.model_copy(update={"options": MASKS.complete_options(mask.name, mask.options, "options")})
            for mask in self.masks
        )
        return self.model_copy(
            update={
                "clip_low": low if self.clip_low is None else self.clip_low,
                "clip_high": high if self.clip_high is None else self.clip_high,
                "aggregation": self.aggregation or self.loss_method.aggregation,
                "masks": masks,
                **_complete_options(self),
            }
        )


def _complete_options(algorithm: AlgorithmConfig) -> dict[str, dict[str, Any]]:
    found = {}
    for name in ("advantage", "loss", "old_logprobs", "update_scale"):
        field = f"{name}_options"
        method, options = getattr(algorithm, name), getattr(algorithm, field)
        found[field] = TRAINER_POINTS[name].complete_options(method, options, field)
    return found


class OptimizationConfig(Section):
    """Learning rate, optimizer, and how the passes are computed."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate. In a continued run, a change applies from the first new batch on, like a change of
    ``train_steps`` to the learning-rate schedule. Steps that are trained again after a crash keep their rate."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Length of the linear warm-up, in train steps; step k of it has k / warmup_steps of the peak."""
    optimizer: Literal["adamw", "adamw_8bit", "adamw_offload"] = "adamw"
    """AdamW with moments in float32, in 8 bits (2 bytes a parameter instead of 8; one trainer process only), or in
    float32 in host memory (none on the GPU; 16 bytes a parameter cross the bus in an update, which is the same)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """AdamW betas."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum norm of the gradient; larger gradients are clipped."""
    nonfinite_updates_limit: int = Field(default=2, ge=1)
    """Number of consecutive updates with a non-finite gradient, across train steps too, that ends the run with an
    error. An update with a non-finite gradient changes no weights."""
    tokens_per_microbatch: int = Field(default=4096, ge=16)
    """Token budget of one forward and backward pass."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer."""
    share_prefixes: Annotated[Literal["auto"] | bool, one_error("auto, true or false")] = "auto"
    """Compute the tokens that sequences begin with in common once a micro-batch. auto does so where it saves 96
    tokens or more, and not with model.adapter.dropout or a model that ignores positions, which true refuses."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""


class TrainerConfig(OptimizationConfig):
    """Optimization."""

    train_steps: int = Field(default=40, ge=1)
    """Number of batches to train on."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch; the groups are split evenly."""
    sample_completions: int = Field(default=2, ge=0)
    """Completions recorded per train step for inspection."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """Advantage, old-logprob source, loss."""
    replay: ReplayConfig | None = Field(
        default=None,
        description="Groups of earlier batches in every batch; null for none. It needs old_logprobs "
        f"{listed(OLD_LOGPROBS.names(corrects_replay=True), 'or')}.",
    )
