"""Settings of passes and updates that a train step of every kind has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollmesh.config.section import Section, one_error

_Beta = Annotated[float, Field(ge=0, lt=1)]


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
