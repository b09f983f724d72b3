"""Everything of a train step that is computed before its first update: advantages, old logprobs, token masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rollmesh.algorithms.old_logprobs import SOURCES, OldLogprobs
from rollmesh.algorithms.token_masks.mask_protocol import MaskInput
from rollmesh.checkpoints.batches import StepRecipe
from rollmesh.config.loss_methods import LOSS_METHODS
from rollmesh.config.mask_methods import reads_whole_batch
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.trainer.learner.forward_backward import TokenColumns
from rollmesh.trainer.learner.method_binding import BoundMask, bind_advantage, bind_masks
from rollmesh.trainer.learner.old_logprob_scores import OldLogprobScorer
from rollmesh.trainer.learner.stage_logprobs import current_version
from rollmesh.trainer.learner.train_batch import (
    BoolArray,
    Float64Array,
    TrainBatch,
    build_train_batch,
    split_minibatches,
    trajectory_columns,
)
from rollmesh.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of the gradient passes of a train step."""

    flat: TrainBatch
    columns: TokenColumns
    old: OldLogprobs


def step_inputs(
    flat: TrainBatch,
    train_step_of_version: Mapping[int, int],
    recipe: StepRecipe,
    scorer: OldLogprobScorer,
    *,
    reference_version: int | None,
    one_minibatch: bool,
) -> StepInputs:
    """Compute what the recipe needs, with at most one forward pass of the policy at the start of the step.

    ``reference_version`` replaces that of the recipe. With one minibatch the gradient pass gives the trainer-side
    log-probabilities, unless an advantage or a mask needs them earlier.
    """
    algorithm = recipe.algorithm
    advantage, masks = bind_advantage(algorithm), bind_masks(algorithm)
    policy = entropy = reference = None
    if advantage.needs_policy or any(mask.needs_policy for mask in masks):
        policy, entropy = scorer.policy(flat)
    if algorithm.kl_coefficient > 0 or advantage.needs_reference:
        version = algorithm.kl_reference_version if reference_version is None else reference_version
        reference = scorer.reference(flat, version)
    if advantage.needs_policy or advantage.needs_reference:
        sums = trajectory_columns(flat, policy=policy, reference=reference)
        flat = replace(flat, advantages=advantage.compute(sums).numpy())
    flat = replace(flat, passed=passed_trajectories(flat, recipe))
    current = current_version(train_step_of_version, flat.train_step - 1)
    early = bool(masks) or policy is not None
    source = SOURCES[algorithm.old_logprobs]
    old, share = scorer.denominator(flat, source, current, one_minibatch=one_minibatch and not early, policy=policy)
    if masks:
        flat = apply_masks(flat, masks, old.values, policy, entropy)
    kl = reference if algorithm.kl_coefficient > 0 else None
    columns = token_columns(flat, old, torch.from_numpy(share), None if kl is None else torch.from_numpy(kl))
    return StepInputs(flat=flat, columns=columns, old=old)


def flatten(batch: Batch, train_step_of_version: Mapping[int, int], recipe: StepRecipe) -> TrainBatch:
    """Flatten a batch, with its advantages unless they need a forward pass. Raises DataError."""
    advantage = bind_advantage(recipe.algorithm)
    known = not (advantage.needs_policy or advantage.needs_reference)
    return build_train_batch(
        batch,
        train_step_of_version,
        advantage.compute if known else None,
        max_token_staleness=recipe.max_token_staleness,
    )


def passed_trajectories(flat: TrainBatch, recipe: StepRecipe) -> BoolArray:
    """Return the trajectories with a gradient; all unless ``skip_zero_advantage``, and all of a minibatch without any.

    An update without a gradient still moves the weights by the moments of the optimizer. Returns bool [trajectories].
    """
    algorithm = recipe.algorithm
    if not algorithm.skip_zero_advantage or _needs_every_pass(algorithm):
        return np.ones(flat.trajectory_count, np.bool_)
    passed: BoolArray = flat.advantages != 0
    for minibatch in split_minibatches(flat, recipe.minibatches):
        if not passed[minibatch].any():
            passed[minibatch] = True
    return passed


def _needs_every_pass(algorithm: AlgorithmConfig) -> bool:
    """Tell whether the gradient reads trajectories with advantage 0: by themselves, in a mask, or in its rate."""
    loss = LOSS_METHODS.get(algorithm.loss)
    return (
        algorithm.kl_coefficient > 0
        or loss is None
        or loss.pulls_without_advantage
        or algorithm.update_scale != "none"
        or any(reads_whole_batch(mask.name) for mask in algorithm.masks)
    )


def apply_masks(
    flat: TrainBatch,
    masks: Sequence[BoundMask],
    old: Tensor,
    policy: Float64Array | None,
    entropy: Float64Array | None,
) -> TrainBatch:
    """Take the tokens of the masks out of the loss of a batch; ``old``, ``policy`` and ``entropy`` are [tokens]."""
    index = np.flatnonzero(flat.policy_mask)
    rows = torch.from_numpy(index)
    loss_mask, masked_by = flat.loss_mask.copy(), dict(flat.masked_by)
    solved = trajectory_columns(flat).solved
    sequences = torch.from_numpy(flat.sequence_index[index])
    for mask in masks:
        before = loss_mask[index]
        data = MaskInput(
            old_logprobs=old[rows],
            behavior_logprobs=torch.from_numpy(flat.behavior_logprobs[index].astype(np.float64)),
            policy_logprobs=None if policy is None else torch.from_numpy(policy[index]),
            entropy=None if entropy is None else torch.from_numpy(entropy[index]),
            advantages=torch.from_numpy(flat.advantages)[sequences],
            solved=solved[sequences],
            mask=torch.from_numpy(before),
            sequence_index=sequences,
            sequence_count=flat.trajectory_count,
        )
        after = before & mask.keep(data).numpy()
        loss_mask[index] = after
        taken = masked_by.get(mask.name, np.zeros_like(loss_mask)).copy()
        taken[index] |= before & ~after
        masked_by[mask.name] = taken
    return replace(flat, loss_mask=loss_mask, masked_by=masked_by)


def token_columns(flat: TrainBatch, old: OldLogprobs, policy_share: Tensor, reference: Tensor | None) -> TokenColumns:
    """Return the inputs of the loss, [tokens] each."""
    return TokenColumns(
        old_logprobs=old.values,
        policy_share=policy_share,
        behavior_logprobs=torch.from_numpy(flat.behavior_logprobs.astype(np.float64)),
        advantages=torch.from_numpy(flat.advantages[flat.sequence_index]),
        mask=torch.from_numpy(flat.loss_mask),
        sequence_index=torch.from_numpy(flat.sequence_index),
        reference_logprobs=reference,
    )
