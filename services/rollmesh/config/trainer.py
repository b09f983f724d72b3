"""Trainer and algorithm sections."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmesh.config.section import Section

DUAL_CLIP = 10.0
"""Default of ``dual_clip``: in every resolved run file, whatever the loss."""


class AlgorithmConfig(Section):
    """Advantage, old-logprob source, loss."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Group-relative advantage."""
    loss: Literal["ppo_clip", "decoupled_ppo", "tis", "gspo", "cispo"] = "ppo_clip"
    """Policy loss; decoupled_ppo and tis need old_logprobs other than sampler."""
    old_logprobs: Literal["sampler", "stage_end", "recompute", "current", "snapshot"] = "sampler"
    """Where the denominator of the ratio comes from."""
    clip_low: float | None = Field(default=None, gt=0)
    """Lower clip; null takes the loss's default (ppo_clip, decoupled_ppo and tis 0.2, gspo 3e-4, cispo 1: none)."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clip; null takes the loss's default (ppo_clip, decoupled_ppo and tis 0.28, gspo 4e-4, cispo 4)."""
    dual_clip: float | None = Field(default=DUAL_CLIP, gt=1)
    """c of the dual clip on negative advantages; null is off. gspo and cispo have none and refuse another value."""
    tis_cap: float = Field(default=2.0, gt=0)
    """C of truncated importance sampling."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean"] | None = None
    """null takes the loss's default: token_mean (gspo: sequence_mean_token_mean)."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL to the pinned reference version; 0 is off."""
    kl_reference_version: int = Field(default=0, ge=0)
    """Policy version that the KL is measured against, which is then kept: 0 in a new run; one that is published and
    kept when the run is continued. Steps that are trained again after a crash keep theirs."""


class TrainerConfig(Section):
    """Optimisation."""

    train_steps: int = Field(default=40, ge=1)
    """Batches to train on."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate. Changed when the run is continued, it counts from the first new batch on, as a change of
    ``train_steps`` does for the schedule: steps that are trained again after a crash keep their rate."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up, in train steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping."""
    nonfinite_updates_limit: int = Field(default=2, ge=1)
    """Updates in a row, over train steps too, whose gradient is not finite: that many end the run with an error. Such
    an update changes no weight."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per batch; groups are split evenly."""
    tokens_per_microbatch: int = Field(default=4096, ge=16)
    """Token budget of one forward and backward pass."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer computes."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    sample_completions: int = Field(default=2, ge=0)
    """Completions recorded per step, for people."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """Advantage, old-logprob source, loss."""
