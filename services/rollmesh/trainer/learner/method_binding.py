"""The methods of a run file as functions with their options bound, and the settings of a train step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns
from rollmesh.algorithms.advantages.advantage_registry import ADVANTAGES
from rollmesh.algorithms.aggregation import AGGREGATIONS
from rollmesh.algorithms.losses.loss_protocol import LossInput, LossOptions, PolicyLoss, TokenLoss
from rollmesh.algorithms.losses.loss_registry import LOSSES, LossDefinition
from rollmesh.algorithms.token_masks.mask_protocol import MaskInput
from rollmesh.algorithms.token_masks.mask_registry import MASKS
from rollmesh.algorithms.update_scale import UpdateScale, ess_scale
from rollmesh.checkpoints.batches import StepRecipe, StepSettings
from rollmesh.config.advantage_methods import ADVANTAGE_METHODS
from rollmesh.config.loss_methods import LOSS_METHODS, loss_aggregation
from rollmesh.config.mask_methods import MASK_METHODS, OWN_MASK
from rollmesh.config.methods import complete_options, is_own
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig, with_options
from rollmesh.config.update_scales import EssOptions
from rollmesh.errors import DataError
from rollmesh.trainer.learner.forward_backward import LossRecipe
from rollmesh.trainer.learner.optimizer import learning_rate
from rollmesh.types import LARGEST_REWARD
from rollmesh.user_code import load_function, own_code


def step_recipe(config: TrainerConfig, max_token_staleness: int | None) -> StepRecipe:
    """Return the recipe of the run file, which is the same for every train step.

    Raises ConfigError for a user's code that cannot be called as the method that it is named for.
    """
    algorithm = config.algorithm
    bind_loss(algorithm), bind_advantage(algorithm), bind_masks(algorithm)
    definition = _definition(algorithm.loss)
    filled = {
        "clip_low": definition.clip_low if algorithm.clip_low is None else algorithm.clip_low,
        "clip_high": definition.clip_high if algorithm.clip_high is None else algorithm.clip_high,
        "aggregation": algorithm.aggregation or loss_aggregation(algorithm.loss),
        **with_options(algorithm),
    }
    return StepRecipe(
        algorithm=algorithm.model_copy(update=filled),
        minibatches=config.minibatches,
        max_grad_norm=config.max_grad_norm,
        betas=config.betas,
        weight_decay=config.weight_decay,
        max_token_staleness=max_token_staleness,
    )


def step_settings(config: TrainerConfig, recipe: StepRecipe, train_step: int) -> StepSettings:
    """Return the settings of the run file for a train step."""
    algorithm = config.algorithm
    reference = algorithm.kl_reference_version if needs_reference(algorithm) else None
    rate = learning_rate(config, train_step)
    return StepSettings(learning_rate=rate, kl_reference_version=reference, recipe=recipe)


def without_skips(settings: StepSettings) -> StepSettings:
    """Return the settings with ``skip_zero_advantage`` off."""
    algorithm = settings.recipe.algorithm.model_copy(update={"skip_zero_advantage": False})
    return settings.model_copy(update={"recipe": settings.recipe.model_copy(update={"algorithm": algorithm})})


def differing_settings(recorded: StepSettings, present: StepSettings) -> dict[str, str]:
    """Return ``recorded -> present`` by name, for every recorded setting that differs from the run file."""
    before, now = _flat(recorded), _flat(present)
    return {name: f"{value} -> {now.get(name)}" for name, value in before.items() if value != now.get(name)}


def loss_recipe(config: AlgorithmConfig) -> LossRecipe:
    """Return the loss of an algorithm section, with the defaults of that loss for unset fields."""
    definition = _definition(config.loss)
    return LossRecipe(
        loss=bind_loss(config),
        options=definition.options(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            tis_cap=config.tis_cap,
        ),
        aggregation=AGGREGATIONS[config.aggregation or loss_aggregation(config.loss)],
        kl_coefficient=config.kl_coefficient,
        update_scale=bind_update_scale(config),
    )


def _definition(name: str) -> LossDefinition:
    """Return a registered loss; a user's code has the defaults of ppo_clip."""
    return LOSSES["ppo_clip" if is_own(name) else name]


def _flat(settings: StepSettings) -> dict[str, Any]:
    plain = settings.model_dump(mode="json")
    recipe = plain.pop("recipe")
    algorithm = recipe.pop("algorithm")
    # The step's own kl_reference_version is in ``plain``.
    del algorithm["kl_reference_version"]
    return {**plain, **recipe, **algorithm}


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
