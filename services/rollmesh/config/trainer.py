"""Trainer and algorithm sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollmesh.config.advantage_methods import ADVANTAGE_METHODS
from rollmesh.config.loss_methods import LOSS_METHODS
from rollmesh.config.mask_methods import MASK_METHODS, MaskConfig
from rollmesh.config.methods import check_name, complete_options
from rollmesh.config.old_logprob_methods import OLD_LOGPROB_METHODS
from rollmesh.config.replay_methods import ReplayConfig
from rollmesh.config.section import Section
from rollmesh.config.update_scales import UPDATE_SCALES

_Beta = Annotated[float, Field(ge=0, lt=1)]
DUAL_CLIP = 10.0
"""Default of ``dual_clip``, which every resolved run file contains for any loss."""


class AlgorithmConfig(Section):
    """Advantage, old-logprob source, loss, token masks."""

    advantage: str = Field(default="grpo", json_schema_extra={"examples": [*ADVANTAGE_METHODS, "module:function"]})
    """Advantage: grpo, dr_grpo, rloo, mc_grpo, drpo, xrpo_novelty, pairs and tba compare the trajectories of a group,
    reinforce_pp those of the whole batch, grpo_lambda both, filtered_bc none; or ``module:function`` of your code."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the advantage; ``rollmesh methods`` lists them."""
    loss: str = Field(default="ppo_clip", json_schema_extra={"examples": [*LOSS_METHODS, "module:function"]})
    """Policy loss: ppo_clip, decoupled_ppo, tis, gspo, cispo, minpro, topr, kimi, or ``module:function`` of your code
    with the defaults of ppo_clip; decoupled_ppo and tis need old_logprobs other than sampler."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the loss beyond the fields of this section; ``rollmesh methods`` lists them."""
    masks: tuple[MaskConfig, ...] = ()
    """Token masks in order; each takes tokens out of the loss that the ones before it left. icepop, ratio, opsm and
    m2po need old_logprobs recompute, current, snapshot, ewma or stage_end."""
    old_logprobs: Literal["sampler", "stage_end", "recompute", "current", "snapshot", "loglinear", "ewma"] = "sampler"
    """Source of the denominator of the ratio."""
    old_logprobs_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the old-logprob source; ``rollmesh methods`` lists them."""
    clip_low: float | None = Field(default=None, gt=0)
    """Lower clip; null uses the default of the loss (ppo_clip, decoupled_ppo, tis and minpro 0.2, gspo 3e-4, cispo 1:
    none). topr and kimi have no bounds."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clip; null uses the default of the loss (ppo_clip, decoupled_ppo, tis and minpro 0.28, gspo 4e-4,
    cispo 4). topr and kimi have no bounds."""
    dual_clip: float | None = Field(default=DUAL_CLIP, gt=1)
    """c of the dual clip on negative advantages; null is off. Losses without it (gspo, cispo, minpro, topr, kimi)
    reject other values than the default."""
    tis_cap: float = Field(default=2.0, gt=0)
    """C of truncated importance sampling."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean"] | None = None
    """Aggregation of the loss over tokens; null uses the default of the loss: token_mean (gspo:
    sequence_mean_token_mean)."""
    update_scale: Literal["none", "ess"] = "none"
    """Factor on the learning rate of an update: none, or ess, which lowers it with the effective sample size of the
    trajectories (VCPO)."""
    update_scale_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the update scale; ``rollmesh methods`` lists them."""
    skip_zero_advantage: bool = False
    """Leave trajectories with advantage 0 out of the forward and backward passes, which do not change the gradient: not
    with kl_coefficient, update_scale, loss kimi, mask m2po, or a loss or mask of your code. Denominators still count
    their tokens; the statistics of the policy (entropy, ratios, KL) then describe the other trajectories."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL to the pinned reference version; 0 is off."""
    kl_reference_version: int = Field(default=0, ge=0)
    """Reference policy version of the KL and of advantage tba, which is then kept: 0 in a new run, a published and
    kept version in a continued run. Steps that are trained again after a crash keep their reference version."""

    @field_validator("advantage")
    @classmethod
    def _advantage_is_known(cls, advantage: str) -> str:
        return check_name(advantage, ADVANTAGE_METHODS)

    @field_validator("loss")
    @classmethod
    def _loss_is_known(cls, loss: str) -> str:
        return check_name(loss, LOSS_METHODS)

    @model_validator(mode="after")
    def _options_fit_their_methods(self) -> Self:
        complete_options(self.advantage, self.advantage_options, ADVANTAGE_METHODS, "advantage_options")
        complete_options(self.loss, self.loss_options, LOSS_METHODS, "loss_options")
        complete_options(self.old_logprobs, self.old_logprobs_options, OLD_LOGPROB_METHODS, "old_logprobs_options")
        complete_options(self.update_scale, self.update_scale_options, UPDATE_SCALES, "update_scale_options")
        return self


def with_options(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return the option fields of an algorithm section with the defaults of its methods filled in."""
    masks = [
        mask.model_copy(update={"options": complete_options(mask.name, mask.options, MASK_METHODS, "options")})
        for mask in algorithm.masks
    ]
    return {
        "advantage_options": complete_options(
            algorithm.advantage, algorithm.advantage_options, ADVANTAGE_METHODS, "advantage_options"
        ),
        "loss_options": complete_options(algorithm.loss, algorithm.loss_options, LOSS_METHODS, "loss_options"),
        "old_logprobs_options": complete_options(
            algorithm.old_logprobs, algorithm.old_logprobs_options, OLD_LOGPROB_METHODS, "old_logprobs_options"
        ),
        "update_scale_options": complete_options(
            algorithm.update_scale, algorithm.update_scale_options, UPDATE_SCALES, "update_scale_options"
        ),
        "masks": tuple(masks),
    }


class TrainerConfig(Section):
    """Optimization."""

    train_steps: int = Field(default=40, ge=1)
    """Number of batches to train on."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate. In a continued run, a change applies from the first new batch on, like a change of
    ``train_steps`` to the learning-rate schedule. Steps that are trained again after a crash keep their rate."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Length of the linear warm-up, in train steps."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with moments in float32, or in 8 bits (2 bytes a parameter instead of 8; one trainer process only)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """AdamW betas."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum norm of the gradient; larger gradients are clipped."""
    nonfinite_updates_limit: int = Field(default=2, ge=1)
    """Number of consecutive updates with a non-finite gradient, across train steps too, that ends the run with an
    error. An update with a non-finite gradient changes no weights."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch; the groups are split evenly."""
    tokens_per_microbatch: int = Field(default=4096, ge=16)
    """Token budget of one forward and backward pass."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    sample_completions: int = Field(default=2, ge=0)
    """Completions recorded per train step for inspection."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """Advantage, old-logprob source, loss."""
    replay: ReplayConfig | None = None
    """Groups of earlier batches in every batch; null for none. It needs old_logprobs recompute, current, snapshot,
    loglinear or ewma."""
