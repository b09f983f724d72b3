"""The minibatches of one train step: gradient, clip, update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollmesh.trainer.learner.forward_backward import (
    Compute,
    GradientPass,
    LossRecipe,
    TokenColumns,
    accumulate_gradient,
    judge_tokens,
)
from rollmesh.trainer.learner.optimizer import apply_update
from rollmesh.trainer.learner.policy_model import PolicyModel
from rollmesh.trainer.learner.step_statistics import TokenResults, effective_sample_size
from rollmesh.trainer.learner.train_batch import BoolArray, Float64Array, Int64Array, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """Totals over the minibatches of a train step."""

    logprobs: Float64Array  # [tokens], each at the start of its own minibatch
    entropy: Float64Array  # [tokens]
    as_served: BoolArray  # [tokens], True in the first minibatch; nowhere if the gradient pass has dropout
    loss: float
    grad_norm: float
    rate_factor: float
    """Mean factor on the learning rate."""
    applied: tuple[bool, ...]
    """One entry per update: True if it was applied, False if its gradient was not finite."""
    microbatches: int
    forward_tokens: int
    gradient_seconds: float
    update_seconds: float

    @property
    def trailing_skipped(self) -> int:
        """Number of skipped updates after the last applied one."""
        return next((i for i, applied in enumerate(reversed(self.applied)) if applied), len(self.applied))


def run_minibatches(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    compute: Compute,
    recipe: LossRecipe,
    batch: TrainBatch,
    columns: TokenColumns,
    minibatches: Sequence[Int64Array],
    *,
    max_grad_norm: float,
) -> Updates:
    """Run one optimizer step per minibatch (trajectory indices)."""
    passes, norms, updates, factors = [], [], [], []
    gradient_seconds = update_seconds = 0.0
    for sequences in minibatches:
        begin = time.perf_counter()
        passes.append(accumulate_gradient(model, compute, recipe, batch, columns, sequences))
        middle = time.perf_counter()
        factors.append(_rate_factor(recipe, batch, passes[-1].logprobs, sequences))
        norm, updated = apply_update(optimizer, max_grad_norm, factors[-1])
        norms.append(norm)
        updates.append(updated)
        gradient_seconds += middle - begin
        update_seconds += time.perf_counter() - middle
    return Updates(
        logprobs=np.sum([p.logprobs for p in passes], axis=0),
        entropy=np.sum([p.entropy for p in passes], axis=0),
        as_served=np.isin(batch.sequence_index, minibatches[0]) & (not model.has_dropout),
        loss=float(np.mean([p.loss for p in passes])),
        grad_norm=float(np.mean(norms)),
        rate_factor=float(np.mean(factors)),
        applied=tuple(updates),
        microbatches=sum(p.microbatches for p in passes),
        forward_tokens=sum(p.forward_tokens for p in passes),
        gradient_seconds=gradient_seconds,
        update_seconds=update_seconds,
    )


def finish_parts(
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    recipe: LossRecipe,
    batch: TrainBatch,
    done: GradientPass,
    seconds: float,
    *,
    max_grad_norm: float,
) -> Updates:
    """Run the optimizer step of a batch whose gradient is in the parameters, not yet divided by its weight."""
    begin = time.perf_counter()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(max(1.0, done.weight))
    factor = _rate_factor(recipe, batch, done.logprobs, np.arange(batch.trajectory_count))
    norm, updated = apply_update(optimizer, max_grad_norm, factor)
    return Updates(
        logprobs=done.logprobs,
        entropy=done.entropy,
        as_served=np.ones(len(done.logprobs), np.bool_),
        loss=done.loss,
        grad_norm=norm,
        rate_factor=factor,
        applied=(updated,),
        microbatches=done.microbatches,
        forward_tokens=done.forward_tokens,
        gradient_seconds=seconds,
        update_seconds=time.perf_counter() - begin,
    )


def _rate_factor(recipe: LossRecipe, batch: TrainBatch, logprobs: Float64Array, sequences: Int64Array) -> float:
    """Return the factor of the update scale, from the weights of the trajectories over their tokens in the loss."""
    if recipe.update_scale is None:
        return 1.0
    # With an update scale every trajectory has a pass (passed_trajectories).
    inside = batch.loss_mask & np.isin(batch.sequence_index, sequences)
    size = effective_sample_size((logprobs - batch.behavior_logprobs)[inside], batch.sequence_index[inside])
    count = len(np.unique(batch.sequence_index[inside]))
    return recipe.update_scale(size / count) if count else 1.0


def token_results(recipe: LossRecipe, flat: TrainBatch, columns: TokenColumns, done: Updates) -> TokenResults:
    """Return the results of a step for every token: scores, ratios, clips and where the loss has a gradient."""
    index, judged = judge_tokens(recipe, flat, columns, done.logprobs)
    ratio, clip = np.ones(len(flat.token_ids)), np.zeros(len(flat.token_ids), np.int8)
    ratio[index], clip[index] = judged.ratio.numpy(), judged.clip.numpy()
    active = np.zeros(len(flat.token_ids), np.bool_)
    active[index] = judged.weight.numpy() != 0
    reference = columns.reference_logprobs
    return TokenResults(
        logprobs=done.logprobs,
        entropy=done.entropy,
        ratio=ratio,
        clip=clip,
        active=active,
        as_served=done.as_served,
        reference_logprobs=None if reference is None else reference.numpy(),
    )
