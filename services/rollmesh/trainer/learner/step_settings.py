"""Settings of one train step: from the run file when its batch file is written, from the batch file afterwards."""

from __future__ import annotations

from typing import Any

from rollmesh.algorithms.aggregation import AGGREGATIONS
from rollmesh.algorithms.losses.loss_registry import LOSSES, LossDefinition
from rollmesh.checkpoints.batches import StepRecipe, StepSettings
from rollmesh.config.loss_methods import loss_aggregation
from rollmesh.config.methods import is_own
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig, with_options
from rollmesh.trainer.learner.forward_backward import LossRecipe
from rollmesh.trainer.learner.method_binding import (
    bind_advantage,
    bind_loss,
    bind_masks,
    bind_update_scale,
    needs_reference,
)
from rollmesh.trainer.learner.optimizer import learning_rate


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


def without_skips(recipe: StepRecipe) -> StepRecipe:
    """Return the recipe with ``skip_zero_advantage`` off."""
    algorithm = recipe.algorithm.model_copy(update={"skip_zero_advantage": False})
    return recipe.model_copy(update={"algorithm": algorithm})


def differing_settings(recorded: StepSettings | None, present: StepSettings) -> dict[str, str]:
    """Return ``recorded -> present`` by name, for every recorded setting that differs from the run file."""
    if recorded is None:
        return {}
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
    recipe = plain.pop("recipe") or {}
    algorithm = recipe.pop("algorithm", {})
    # The step's own kl_reference_version is in ``plain``.
    algorithm.pop("kl_reference_version", None)
    return {**plain, **recipe, **algorithm}
