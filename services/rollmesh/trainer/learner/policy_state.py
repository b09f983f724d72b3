"""The optimizer and the saved state of the policy in training."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from rollmesh.checkpoints.describe import ADAPTER_CONFIG_FILE
from rollmesh.checkpoints.states import load_weights
from rollmesh.config.model import AdapterConfig
from rollmesh.config.trainer import OptimizationConfig
from rollmesh.errors import ConfigError
from rollmesh.trainer.learner.adapter_layers import reset_adapter
from rollmesh.trainer.learner.distributed import local_part, zeros_on_host
from rollmesh.trainer.learner.frozen_policies import WeightAverage
from rollmesh.trainer.learner.old_logprob_scores import StageRecord
from rollmesh.trainer.learner.policy_model import PolicyModel


def learning_rate(config: OptimizationConfig, train_step: int, train_steps: int) -> float:
    """Return the rate of a step of ``train_steps``: linear warm-up, then the schedule. A restart needs no state of it.

    It is that of transformers' schedulers, but in a warm-up one step ahead: its first update has a rate above 0.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if train_step <= warmup:
        return peak * train_step / warmup
    progress = min(1.0, (train_step - 1 - warmup) / max(1, train_steps - warmup))
    if config.lr_schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    if config.lr_schedule == "linear":
        return peak * (1 - progress)
    return peak


def build_optimizer(model: nn.Module, config: OptimizationConfig, processes: int = 1) -> Optimizer:
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
    on_host = config.optimizer == "adamw_offload"
    kind = _OffloadedAdamW if on_host else torch.optim.AdamW
    optimizer = kind(groups, lr=config.learning_rate, betas=config.betas)
    for parameter in parameters:
        moments = {key: zeros_on_host(parameter) if on_host else torch.zeros_like(parameter) for key in _MOMENTS}
        optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32)} | moments
    return optimizer


_MOMENTS = ("exp_avg", "exp_avg_sq")


class _OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments are in host memory, and on the device for the update of one parameter after the other."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state, weight = self.state[parameter], local_part(parameter)
        on_host = [local_part(state[key]) for key in _MOMENTS]
        first, second = (moment.to(weight.device, non_blocking=True) for moment in on_host)
        adamw(
            [weight],
            [local_part(gradient)],
            [first],
            [second],
            [],
            [state["step"]],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for moment, updated in zip(on_host, (first, second), strict=True):
            moment.copy_(updated)


def _eight_bit(groups: list[dict[str, Any]], config: OptimizationConfig) -> Optimizer:
    """Build AdamW with 8-bit moments, one float32 scale per 256 elements (bitsandbytes; Dettmers et al., 2022)."""
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


_STAGE_TENSOR, _STAGE_LAYOUT, _ADAPTER = "stage.logprobs", "stage", "adapter"


@dataclass(eq=False)
class LearnerState:
    """Tensors and JSON values of a policy and its optimizer. With an adapter they leave the frozen base out."""

    _model: PolicyModel
    _optimizer: torch.optim.Optimizer

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and moments by name: live tensors, to save or to fill."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._model.trained_parameters().items():
            tensors[f"model.{name}"] = parameter.detach()
            for key, value in saved_moments(self._optimizer, parameter).items():
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def tensors_to_fill(self, extra: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors to load a state with this ``extra`` into. Raises ConfigError for other trained weights."""
        saved, own = extra.get(_ADAPTER), adapter_identity(self._model.adapter)
        if saved != own:
            raise ConfigError(
                f"model.adapter={_named(own)}: this run was trained with {_named(saved)}; set "
                "model.adapter as it was, or start a new run (another name and folder)"
            )
        return LearnerState.tensors(self)

    def extra(self, train_step: int) -> dict[str, Any]:
        """Return the rest of the state, as JSON values."""
        adapter = adapter_identity(self._model.adapter)
        return {"train_step": train_step} | ({} if adapter is None else {_ADAPTER: adapter})

    def take(self, folder: Path) -> None:
        """Load the weights of a published policy and reset the moments; a CheckpointError leaves the weights."""
        adapter = self._model.adapter
        if adapter is not None and not (folder / ADAPTER_CONFIG_FILE).is_file():
            reset_adapter(self._model.causal_lm)
        else:
            load_weights(folder, {name: p.detach() for name, p in self._model.trained_parameters().items()})
        for parameter in self._model.trained_parameters().values():
            for value in saved_moments(self._optimizer, parameter).values():
                value.zero_()


@dataclass(eq=False)
class PolicyState(LearnerState):
    """State of a trainer of rollouts, with its stage records and its average."""

    _stage: StageRecord
    _average: WeightAverage

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, moments, stage records (a copy) and average by name, to save."""
        recorded = torch.from_numpy(self._stage.values())
        return super().tensors() | self._average.tensors() | ({_STAGE_TENSOR: recorded} if len(recorded) else {})

    def tensors_to_fill(self, extra: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors to load a state with this ``extra`` into. Raises ConfigError for other trained weights."""
        live = super().tensors_to_fill(extra) | self._average.tensors_to_fill(extra)
        recorded = sum(int(count) for _, count, _ in extra.get(_STAGE_LAYOUT, ()))
        return live | ({_STAGE_TENSOR: torch.empty(recorded)} if recorded else {})

    def extra(self, train_step: int) -> dict[str, Any]:
        """Return the rest of the state, as JSON values."""
        layout = self._stage.layout()
        return super().extra(train_step) | self._average.extra() | ({_STAGE_LAYOUT: layout} if layout else {})

    def restore(self, extra: Mapping[str, Any], filled: Mapping[str, Tensor]) -> None:
        """Restore ``extra`` after its ``tensors_to_fill`` are ``filled``."""
        self._average.restore(extra)
        values = filled.get(_STAGE_TENSOR, torch.empty(0))
        self._stage.restore(extra.get(_STAGE_LAYOUT, ()) if len(values) else (), values.numpy())


def adapter_identity(adapter: AdapterConfig | None) -> dict[str, Any] | None:
    """Return the settings that fix an adapter's tensors and their effect; None for full weights."""
    if adapter is None:
        return None
    return {"rank": adapter.rank, "alpha": adapter.alpha, "target": list(adapter.target)}


def _named(adapter: Mapping[str, Any] | None) -> str:
    if adapter is None:
        return "null (full weights)"
    return ", ".join(f"{name} {adapter[name]}" for name in ("rank", "alpha", "target"))
