"""Gradient passes over parts of the next batch, before the batch is cut."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rollmesh.checkpoints.batches import StepRecipe, StepSettings
from rollmesh.trainer.learner.forward_backward import Compute, LossRecipe, accumulate_gradient
from rollmesh.trainer.learner.minibatches import Updates, finish_parts
from rollmesh.trainer.learner.old_logprob_scores import OldLogprobScorer
from rollmesh.trainer.learner.parts import Part, Parts, digests
from rollmesh.trainer.learner.policy_model import PolicyModel
from rollmesh.trainer.learner.step_inputs import StepInputs, flatten, passed_trajectories, step_inputs, token_columns
from rollmesh.trainer.learner.step_settings import loss_recipe
from rollmesh.trainer.learner.train_batch import TrainBatch
from rollmesh.types import Batch, Group


@dataclass(eq=False)
class EarlyParts:
    """Parts of the next batch whose gradient is in the parameters."""

    _model: PolicyModel
    _optimizer: torch.optim.Optimizer
    _compute: Compute
    _scorer: OldLogprobScorer
    _parts: Parts = field(default_factory=Parts, init=False)

    @property
    def group_ids(self) -> tuple[str, ...]:
        """Groups in the parts."""
        return self._parts.group_ids

    def fit(self, batch: Batch, settings: StepSettings) -> bool:
        """Tell whether every part belongs to this batch, with equal contents and settings."""
        return self._parts.fit(batch, settings)

    def forget(self) -> None:
        """Drop the gradients of all parts: their batch is not trained on these weights."""
        if self._parts.group_ids:
            self._parts.clear()
            self._optimizer.zero_grad(set_to_none=True)

    def add(
        self,
        step: int,
        groups: Sequence[Group],
        train_step_of_version: Mapping[int, int],
        settings: StepSettings,
        recipe: StepRecipe,
    ) -> None:
        """Add the gradient of these groups to the parameters. Raises DataError; then all parts are dropped."""
        try:
            self._add(step, groups, train_step_of_version, settings, recipe)
        except BaseException:
            # An interrupted pass may have added some of its gradient.
            self._parts.clear()
            self._optimizer.zero_grad(set_to_none=True)
            raise

    def _add(
        self,
        step: int,
        groups: Sequence[Group],
        train_step_of_version: Mapping[int, int],
        settings: StepSettings,
        recipe: StepRecipe,
    ) -> None:
        begin = time.perf_counter()
        flat = flatten(Batch(train_step=step, groups=tuple(groups)), train_step_of_version, recipe)
        inputs = step_inputs(
            flat,
            train_step_of_version,
            recipe,
            self._scorer,
            reference_version=settings.kl_reference_version,
            one_minibatch=True,
        )
        flat, columns, old = inputs.flat, inputs.columns, inputs.old
        every = np.arange(flat.trajectory_count)
        loss = loss_recipe(recipe.algorithm)
        done = accumulate_gradient(self._model, self._compute, loss, flat, columns, every, divisor=1.0)
        seconds = time.perf_counter() - begin
        part = Part(digests=digests(groups), flat=flat, columns=columns, old=old, done=done, seconds=seconds)
        self._parts.add(part, settings)

    def update(
        self,
        batch: Batch,
        flat: TrainBatch,
        train_step_of_version: Mapping[int, int],
        settings: StepSettings,
        recipe: StepRecipe,
        loss: LossRecipe,
    ) -> tuple[StepInputs, Updates, float]:
        """Accumulate the groups that are in no part, then update once with the gradient of all parts.

        The last result is the scoring time, which is in the seconds of the parts.
        """
        if rest := self._parts.rest(batch):
            self._add(batch.train_step, rest, train_step_of_version, settings, recipe)
        flat = replace(flat, passed=passed_trajectories(flat, recipe))
        whole, seconds = self._parts.whole(flat), self._parts.seconds
        done = finish_parts(
            self._model, self._optimizer, loss, flat, whole.done, seconds, max_grad_norm=recipe.max_grad_norm
        )
        self._parts.clear()
        columns = token_columns(flat, whole.old, whole.policy_share, whole.reference_logprobs)
        return StepInputs(flat=flat, columns=columns, old=whole.old), done, 0.0
