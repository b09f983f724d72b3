"""AdamW, the learning-rate schedule and gradient clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import ConfigError


def learning_rate(config: TrainerConfig, train_step: int) -> float:
    """Return the learning rate of ``train_step`` (the first is 1): linear warm-up, then the schedule.

    It depends on the step only, so a restarted trainer needs no scheduler state.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if train_step <= warmup:
        return peak * train_step / warmup
    progress = min(1.0, (train_step - 1 - warmup) / max(1, config.train_steps - warmup))
    if config.lr_schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    if config.lr_schedule == "linear":
        return peak * (1 - progress)
    return peak


def build_optimizer(model: nn.Module, config: TrainerConfig, processes: int = 1) -> Optimizer:
    """Build AdamW over all parameters that are trained, with weight decay on matrices only.

    The optimizer state is allocated here, so that a saved state can be loaded into it. Shard the model first: the
    moments take the layout of the parameters. Raises ConfigError if the optimizer's package is not installed, or if its
    moments cannot be split over so many processes.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw_8bit":
        # The run file has the processes of a run on one machine; the chart sets those on Kubernetes.
        if processes > 1:
            raise ConfigError(
                f"trainer.optimizer=adamw_8bit with {processes} trainer processes: the 8-bit moments cannot be split "
                "over processes; use optimizer=adamw, whose moments are split, or 1 process"
            )
        return _eight_bit(groups, config)
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _eight_bit(groups: list[dict[str, Any]], config: TrainerConfig) -> Optimizer:
    """Build AdamW whose moments are 8-bit codes with one float32 scale per 256 elements (bitsandbytes).

    Tensors below 4,096 elements keep float32. Source: 8-bit optimizers via block-wise quantization (Dettmers et al.,
    2022). Raises ConfigError if the package is not installed.
    """
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"trainer.optimizer=adamw_8bit requires the package {error.name}: pip install 'rollmesh[bitsandbytes]'"
        ) from error

    class EightBitAdamW(AdamW8bit):
        """AdamW8bit whose state contains tensors only, so that it can be saved and filled in place."""

        def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
            """Update one parameter; the library counts its steps in an int."""
            state = self.state[p]
            count = state["step"]
            state["step"] = int(count)
            super().update_step(group, p, gindex, pindex)  # type: ignore[no-untyped-call]
            state["step"] = count.fill_(state["step"])

    optimizer = EightBitAdamW(groups, lr=config.learning_rate, betas=config.betas)  # type: ignore[no-untyped-call]
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            optimizer.init_state(group, parameter, index, position)  # type: ignore[no-untyped-call]
            optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.float32)
    return optimizer


def saved_moments(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the state of a parameter by name, live, without the constant tables of the 8-bit codes."""
    return {key: value for key, value in optimizer.state[parameter].items() if not key.startswith("qmap")}


def set_hyperparameters(optimizer: Optimizer, *, rate: float, betas: tuple[float, float], weight_decay: float) -> None:
    """Set the hyperparameters of the next updates. Vectors are not decayed."""
    for group in optimizer.param_groups:
        decays = group["params"][0].ndim >= 2
        group.update(lr=rate, betas=betas, weight_decay=weight_decay if decays else 0.0)


def apply_update(optimizer: Optimizer, max_norm: float, factor: float = 1.0) -> tuple[float, bool]:
    """Clip over all ranks, step and clear the gradients; return (norm before clipping, True if weights were updated).

    A gradient that is not finite is skipped: one broken batch must not destroy the policy. ``factor`` multiplies the
    learning rate of this update.
    """
    total = torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], max_norm)
    norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
    updated = math.isfinite(norm)
    if updated:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= factor
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    return norm, updated
