"""Settings of one train step: from the run file when its batch file is written, from the batch file afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollmesh.algorithms.aggregation import AGGREGATIONS
from rollmesh.algorithms.losses.loss_registry import LOSSES, LossDefinition
from rollmesh.checkpoints.batches import StepRecipe, StepSettings
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.errors import ConfigError
from rollmesh.tasks.loading import load_target
from rollmesh.trainer.learner.forward_backward import LossRecipe
from rollmesh.trainer.learner.optimizer import learning_rate


def step_recipe(config: TrainerConfig, max_token_staleness: int | None) -> StepRecipe:
    """Return the recipe of the run file, which is the same for every train step."""
    algorithm = config.algorithm
    definition = _loss(algorithm.loss)
    options = definition.options(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)
    filled = {
        "clip_low": options.clip_low,
        "clip_high": options.clip_high,
        "aggregation": algorithm.aggregation or definition.aggregation,
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
    reference = algorithm.kl_reference_version if algorithm.kl_coefficient > 0 else None
    rate = learning_rate(config, train_step)
    return StepSettings(learning_rate=rate, kl_reference_version=reference, recipe=recipe)


def differing_settings(recorded: StepSettings | None, present: StepSettings) -> dict[str, str]:
    """Return ``recorded -> present`` by name, for every recorded setting that differs from the run file."""
    if recorded is None:
        return {}
    before, now = _flat(recorded), _flat(present)
    return {name: f"{value} -> {now.get(name)}" for name, value in before.items() if value != now.get(name)}


def loss_recipe(config: AlgorithmConfig) -> LossRecipe:
    """Return the loss of an algorithm section, with the defaults of that loss for unset fields."""
    definition = _loss(config.loss)
    return LossRecipe(
        loss=definition.loss,
        options=definition.options(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            tis_cap=config.tis_cap,
        ),
        aggregation=AGGREGATIONS[config.aggregation or definition.aggregation],
        kl_coefficient=config.kl_coefficient,
    )


def _loss(name: str) -> LossDefinition:
    """Return a registered loss, or the loss of a user's code with the defaults of ppo_clip."""
    if name in LOSSES:
        return LOSSES[name]
    function = load_target(name, "trainer.algorithm.loss")
    if not callable(function):
        raise ConfigError(f"trainer.algorithm.loss: {name} must be a function of (LossInput, LossOptions)")
    return replace(LOSSES["ppo_clip"], loss=function)


def _flat(settings: StepSettings) -> dict[str, Any]:
    plain = settings.model_dump(mode="json")
    recipe = plain.pop("recipe") or {}
    algorithm = recipe.pop("algorithm", {})
    # The step's own kl_reference_version is in ``plain``.
    algorithm.pop("kl_reference_version", None)
    return {**plain, **recipe, **algorithm}
