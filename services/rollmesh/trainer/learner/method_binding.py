"""The methods of a run file as functions with their options bound, and the settings of a train step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollmesh.algorithms.advantages import TrajectoryColumns
from rollmesh.algorithms.aggregation import AGGREGATIONS
from rollmesh.algorithms.losses import LossInput, LossOptions, PolicyLoss, TokenLoss, loss_options
from rollmesh.algorithms.token_masks import MaskInput
from rollmesh.checkpoints.batches import StepRecipe, StepSettings
from rollmesh.config.advantage_methods import ADVANTAGES
from rollmesh.config.loss_methods import LOSSES, MASKS, OWN_MASK
from rollmesh.config.old_logprob_methods import UPDATE_SCALES
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.trainer.learner.forward_backward import LossRecipe
from rollmesh.trainer.learner.policy_state import learning_rate
from rollmesh.types import LARGEST_REWARD
from rollmesh.user_code import OwnFunction


def step_recipe(config: TrainerConfig, max_token_staleness: int | None) -> StepRecipe:
    """Return the recipe of the run file, for every train step. Raises ConfigError for code that cannot be called."""
    algorithm = config.algorithm
    bind_loss(algorithm), bind_advantage(algorithm), bind_masks(algorithm)
    return StepRecipe(
        algorithm=algorithm.filled(),
        minibatches=config.minibatches,
        max_grad_norm=config.max_grad_norm,
        betas=config.betas,
        weight_decay=config.weight_decay,
        max_token_staleness=max_token_staleness,
    )


def step_settings(config: TrainerConfig, recipe: StepRecipe, train_step: int) -> StepSettings:
    """Return the settings of the run file for a train step."""
    reference = config.algorithm.kl_reference_version if needs_reference(config.algorithm) else None
    rate = learning_rate(config, train_step, config.train_steps)
    return StepSettings(learning_rate=rate, kl_reference_version=reference, recipe=recipe)


def differing_settings(recorded: StepSettings, present: StepSettings) -> dict[str, str]:
    """Return ``recorded -> present`` by name, for every recorded setting that differs from the run file."""
    before, now = _flat(recorded), _flat(present)
    return {name: f"{value} -> {now.get(name)}" for name, value in before.items() if value != now.get(name)}


def loss_recipe(config: AlgorithmConfig) -> LossRecipe:
    """Return the loss of an algorithm section, with the defaults of that loss for unset fields."""
    scale = None
    if config.update_scale != "none":
        scale = UPDATE_SCALES.bind(config.update_scale, config.update_scale_options)
    return LossRecipe(
        loss=bind_loss(config),
        options=loss_options(
            config.loss_method,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            tis_cap=config.tis_cap,
        ),
        aggregation=AGGREGATIONS[config.aggregation or config.loss_method.aggregation],
        kl_coefficient=config.kl_coefficient,
        forward_kl_coefficient=0.0 if config.teacher is None else config.teacher.forward_kl_coefficient,
        update_scale=scale,
    )


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
    if not algorithm.rewarded:
        return BoundAdvantage(
            compute=lambda data: torch.zeros_like(data.rewards), needs_policy=False, needs_reference=False
        )
    function = ADVANTAGES.bind(algorithm.advantage, algorithm.advantage_options, _problem_of_advantage)
    if not isinstance(function, OwnFunction):
        row = algorithm.advantage_method
        return BoundAdvantage(compute=function, needs_policy=row.needs_policy, needs_reference=row.needs_reference)
    return BoundAdvantage(
        compute=lambda data: function(data).double(),
        needs_policy=function.declares("needs_policy"),
        needs_reference=function.declares("needs_reference"),
    )


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Tell whether the KL term or the advantage reads the pinned reference version."""
    return algorithm.kl_reference == "version" and (
        algorithm.kl_coefficient > 0 or bind_advantage(algorithm).needs_reference
    )


def bind_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """Return the loss function of an algorithm section. Raises ConfigError for code that cannot be called as one."""
    return LOSSES.bind(algorithm.loss, algorithm.loss_options, _problem_of_loss)


def bind_masks(algorithm: AlgorithmConfig) -> tuple[BoundMask, ...]:
    """Return the masks of an algorithm section in order. Raises ConfigError for code that cannot be called as one."""
    bound = []
    for i, mask in enumerate(algorithm.masks):
        field = f"{MASKS.field}.{i}"
        keep = MASKS.bind(mask.name, mask.options, _problem_of_mask, of_field=field, options_field=f"{field}.options")
        if isinstance(keep, OwnFunction):
            bound.append(BoundMask(name=OWN_MASK, keep=keep, needs_policy=keep.declares("needs_policy")))
        else:
            bound.append(BoundMask(name=mask.name, keep=keep, needs_policy=MASKS[mask.name].needs == "policy"))
    return tuple(bound)


def _problem_of_advantage(result: Any, data: TrajectoryColumns) -> str:
    if problem := _problem_of_column(result, data.rewards, "trajectory"):
        return problem
    is_sized = result.is_floating_point() and bool((result.abs() <= LARGEST_REWARD).all())
    return "" if is_sized else f"an advantage that is {_NO_SIZE}"


def _problem_of_loss(result: Any, data: LossInput, shared: LossOptions) -> str:
    if not isinstance(result, TokenLoss):
        return f"{type(result).__name__} instead of TokenLoss"
    for column in ("loss", "ratio", "weight", "clip"):
        if problem := _problem_of_column(getattr(result, column), data.logprobs, "token"):
            return f"as {column} {problem}"
    if torch.is_grad_enabled() and data.logprobs.requires_grad and not result.loss.requires_grad:
        return "a loss without a gradient; compute it from LossInput.logprobs"
    # A policy that has diverged has log-probabilities that are not finite: that is not the function's fault.
    if (data.mask & torch.isfinite(data.logprobs) & ~(result.loss.detach().abs() <= LARGEST_REWARD)).any():
        return f"a loss that is {_NO_SIZE} for a token in the loss"
    return ""


def _problem_of_mask(result: Any, data: MaskInput) -> str:
    problem = _problem_of_column(result, data.mask, "token")
    return problem or ("" if result.dtype is torch.bool else f"{result.dtype} instead of torch.bool")


def _problem_of_column(result: Any, like: Tensor, unit: str) -> str:
    """Return the problem of a result unless it is a tensor with one value per unit, on the device of ``like``."""
    if not isinstance(result, Tensor):
        return f"{type(result).__name__} instead of a tensor"
    if result.shape != like.shape:
        return f"a tensor of shape {tuple(result.shape)} instead of {tuple(like.shape)}: one per {unit}"
    return "" if result.device == like.device else f"a tensor on {result.device} instead of {like.device}"
