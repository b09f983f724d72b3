"""Trainer and algorithm sections."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from rollmesh.config.section import Section

DUAL_CLIP = 10.0
"""Default of ``dual_clip``, which every resolved run file contains for any loss."""
BATCH_ADVANTAGES = ("reinforce_pp",)
"""Advantages that compare the trajectories of a batch; the others compare those of a group."""
LOSS_NAMES = ("ppo_clip", "decoupled_ppo", "tis", "gspo", "cispo")


class AlgorithmConfig(Section):
    """Advantage, old-logprob source, loss."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    """Advantage: grpo, dr_grpo and rloo compare the trajectories of a group, reinforce_pp those of the whole batch."""
    loss: str = Field(default="ppo_clip", json_schema_extra={"examples": [*LOSS_NAMES, "module:function"]})
    """Policy loss: ppo_clip, decoupled_ppo, tis, gspo, cispo, or ``module:function`` of your code with the defaults of
    ppo_clip; decoupled_ppo and tis need old_logprobs other than sampler."""
    old_logprobs: Literal["sampler", "stage_end", "recompute", "current", "snapshot"] = "sampler"
    """Source of the denominator of the ratio."""
    clip_low: float | None = Field(default=None, gt=0)
    """Lower clip; null uses the default of the loss (ppo_clip, decoupled_ppo and tis 0.2, gspo 3e-4, cispo 1: none)."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clip; null uses the default of the loss (ppo_clip, decoupled_ppo and tis 0.28, gspo 4e-4, cispo 4)."""
    dual_clip: float | None = Field(default=DUAL_CLIP, gt=1)
    """c of the dual clip on negative advantages; null is off. gspo and cispo have no dual clip and reject other values
    than the default."""
    tis_cap: float = Field(default=2.0, gt=0)
    """C of truncated importance sampling."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean"] | None = None
    """Aggregation of the loss over tokens; null uses the default of the loss: token_mean (gspo:
    sequence_mean_token_mean)."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL to the pinned reference version; 0 is off."""
    kl_reference_version: int = Field(default=0, ge=0)
    """Reference policy version of the KL, which is then kept: 0 in a new run, a published and kept version in a
    continued run. Steps that are trained again after a crash keep their reference version."""

    @field_validator("loss")
    @classmethod
    def _loss_is_known(cls, loss: str) -> str:
        if loss not in LOSS_NAMES and re.fullmatch(r"[\w.]+:\w+", loss) is None:
            raise ValueError(f"expected {', '.join(LOSS_NAMES)}, or module:function of your code")
        return loss


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
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
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
