"""The advantage, the loss and the masks of a run file as functions with their options bound, a user's code included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns
from rollmesh.algorithms.advantages.advantage_registry import ADVANTAGES
from rollmesh.algorithms.losses.loss_protocol import LossInput, LossOptions, PolicyLoss, TokenLoss
from rollmesh.algorithms.losses.loss_registry import LOSSES
from rollmesh.algorithms.token_masks.mask_protocol import MaskInput
from rollmesh.algorithms.token_masks.mask_registry import MASKS
from rollmesh.algorithms.update_scale import UpdateScale, ess_scale
from rollmesh.config.advantage_methods import ADVANTAGE_METHODS
from rollmesh.config.loss_methods import LOSS_METHODS
from rollmesh.config.mask_methods import MASK_METHODS, OWN_MASK
from rollmesh.config.methods import complete_options, is_own
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.config.update_scales import EssOptions
from rollmesh.errors import DataError
from rollmesh.types import LARGEST_REWARD
from rollmesh.user_code import load_function, own_code

_NO_SIZE = f"not a finite number of at most {LARGEST_REWARD:g} in size"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundAdvantage:
    """Advantage with its options."""

    compute: Callable[[TrajectoryColumns], Tensor]
    needs_policy: bool
    needs_reference: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundMask:
    """Token mask with its options."""

    name: str
    keep: Callable[[MaskInput], Tensor]
    needs_policy: bool


def bind_advantage(algorithm: AlgorithmConfig) -> BoundAdvantage:
    """Return the advantage of an algorithm section. Raises ConfigError for code that cannot be called as one.

    A user's function declares the columns that it needs: ``function.needs_policy = True``, ``needs_reference``.
    """
    name, field = algorithm.advantage, "trainer.algorithm.advantage"
    options = complete_options(name, algorithm.advantage_options, ADVANTAGE_METHODS, f"{field}_options")
    if not is_own(name):
        method = ADVANTAGE_METHODS[name]
        return BoundAdvantage(
            compute=partial(ADVANTAGES[name], **options),
            needs_policy=method.needs_policy,
            needs_reference=method.needs_reference,
        )
    function = load_function(name, field, ("TrajectoryColumns",), options)

    def compute(data: TrajectoryColumns) -> Tensor:
        with own_code(f"{field}={name}"):
            result: Tensor = function(data, **options)
        _check_column(result, data.rewards, field, name, "trajectory")
        if not result.is_floating_point() or not (result.abs() <= LARGEST_REWARD).all():
            raise DataError(f"{field}={name}: returned an advantage that is {_NO_SIZE}")
        return result.double()

    return BoundAdvantage(
        compute=compute,
        needs_policy=bool(getattr(function, "needs_policy", False)),
        needs_reference=bool(getattr(function, "needs_reference", False)),
    )


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Tell whether the KL term or the advantage reads the pinned reference version."""
    return algorithm.kl_coefficient > 0 or bind_advantage(algorithm).needs_reference


def bind_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """Return the loss function of an algorithm section. Raises ConfigError for code that cannot be called as one."""
    name, field = algorithm.loss, "trainer.algorithm.loss"
    options = complete_options(name, algorithm.loss_options, LOSS_METHODS, f"{field}_options")
    if not is_own(name):
        return partial(LOSSES[name].loss, **options) if options else LOSSES[name].loss
    function = load_function(name, field, ("LossInput", "LossOptions"), options)

    def loss(data: LossInput, shared: LossOptions) -> TokenLoss:
        with own_code(f"{field}={name}"):
            result = function(data, shared, **options)
        if not isinstance(result, TokenLoss):
            raise DataError(f"{field}={name}: returned {type(result).__name__} instead of TokenLoss")
        for column in ("loss", "ratio", "weight", "clip"):
            _check_column(getattr(result, column), data.logprobs, f"{field}={name}", column, "token")
        if torch.is_grad_enabled() and data.logprobs.requires_grad and not result.loss.requires_grad:
            raise DataError(f"{field}={name}: returned a loss without a gradient; compute it from LossInput.logprobs")
        # A policy that has diverged has log-probabilities that are not finite: that is not the function's fault.
        if (data.mask & torch.isfinite(data.logprobs) & ~(result.loss.detach().abs() <= LARGEST_REWARD)).any():
            raise DataError(f"{field}={name}: returned a loss that is {_NO_SIZE} for a token in the loss")
        return result

    return loss


def bind_masks(algorithm: AlgorithmConfig) -> tuple[BoundMask, ...]:
    """Return the masks of an algorithm section in order. Raises ConfigError for code that cannot be called as one."""
    return tuple(_bind_mask(mask.name, mask.options, i) for i, mask in enumerate(algorithm.masks))


def bind_update_scale(algorithm: AlgorithmConfig) -> UpdateScale | None:
    """Return the update scale of an algorithm section; None for none."""
    if algorithm.update_scale == "none":
        return None
    return partial(ess_scale, **EssOptions.model_validate(algorithm.update_scale_options).model_dump())


def _bind_mask(name: str, given: Mapping[str, Any], index: int) -> BoundMask:
    field = f"trainer.algorithm.masks.{index}"
    options = complete_options(name, given, MASK_METHODS, f"{field}.options")
    if not is_own(name):
        needs_policy = MASK_METHODS[name].needs == "policy"
        return BoundMask(name=name, keep=partial(MASKS[name], **options), needs_policy=needs_policy)
    function = load_function(name, field, ("MaskInput",), options, f"{field}.options")

    def keep(data: MaskInput) -> Tensor:
        with own_code(f"{field}={name}"):
            result: Tensor = function(data, **options)
        _check_column(result, data.mask, field, name, "token")
        if result.dtype is not torch.bool:
            raise DataError(f"{field}={name}: returned {result.dtype} instead of torch.bool")
        return result

    return BoundMask(name=OWN_MASK, keep=keep, needs_policy=bool(getattr(function, "needs_policy", False)))


def _check_column(result: Any, like: Tensor, field: str, name: str, unit: str) -> None:
    """Raise DataError unless ``result`` is a tensor with one value per unit, on the device of ``like``."""
    if not isinstance(result, Tensor):
        raise DataError(f"{field}: {name} is {type(result).__name__} instead of a tensor")
    if result.shape != like.shape:
        raise DataError(
            f"{field}: {name} has shape {tuple(result.shape)} instead of {tuple(like.shape)}: one per {unit}"
        )
    if result.device != like.device:
        raise DataError(f"{field}: {name} is on {result.device} instead of {like.device}")
