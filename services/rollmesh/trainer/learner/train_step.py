"""One train step: its plan, what is computed before its first update, and its updates.

plan.flatten -> advantages, old logprobs, masks -> per minibatch: gradient (micro-batches), clip, update
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from rollmesh.algorithms.ratios import OldLogprobs, reverse_kl_advantages
from rollmesh.algorithms.token_masks import MaskInput
from rollmesh.checkpoints.batches import StepRecipe, StepSettings
from rollmesh.config.loss_methods import MASKS
from rollmesh.config.teachers import TeacherObjective
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.errors import DataError
from rollmesh.trainer.learner.forward_backward import (
    Compute,
    GradientPass,
    LossRecipe,
    TokenColumns,
    accumulate_gradient,
    judge_tokens,
    score_with_entropy,
)
from rollmesh.trainer.learner.method_binding import BoundAdvantage, BoundMask, bind_advantage, bind_masks, loss_recipe
from rollmesh.trainer.learner.old_logprob_scores import OldLogprobScorer, current_version
from rollmesh.trainer.learner.policy_model import PolicyModel
from rollmesh.trainer.learner.policy_state import apply_update
from rollmesh.trainer.learner.step_report import TokenResults, effective_sample_size
from rollmesh.trainer.learner.train_batch import TrainBatch, build_train_batch, split_minibatches, trajectory_columns
from rollmesh.types import Batch, BoolArray, Float64Array, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Settings of a train step, its methods with their options, and the train steps of the versions that it reads."""

    train_step: int
    settings: StepSettings
    train_step_of_version: Mapping[int, int]
    """Train step of every policy version that wrote tokens of the batch."""
    advantage: BoundAdvantage
    masks: tuple[BoundMask, ...]
    loss: LossRecipe

    @classmethod
    def of(cls, train_step: int, settings: StepSettings, train_step_of_version: Mapping[int, int]) -> Self:
        """Bind the methods of the settings. Raises ConfigError for code that cannot be called as one of them."""
        algorithm = settings.recipe.algorithm
        return cls(
            train_step=train_step,
            settings=settings,
            train_step_of_version=train_step_of_version,
            advantage=bind_advantage(algorithm),
            masks=bind_masks(algorithm),
            loss=loss_recipe(algorithm),
        )

    @property
    def recipe(self) -> StepRecipe:
        """Settings of the updates."""
        return self.settings.recipe

    @property
    def algorithm(self) -> AlgorithmConfig:
        """Algorithm section, with every default filled in."""
        return self.settings.recipe.algorithm

    @property
    def current_version(self) -> int:
        """Newest version with the weights at the start of the step; NO_VERSION if there is none."""
        return current_version(self.train_step_of_version, self.train_step - 1)

    def flatten(self, batch: Batch) -> TrainBatch:
        """Flatten a batch, with its advantages unless they need a forward pass. Raises DataError."""
        known = not (self.advantage.needs_policy or self.advantage.needs_reference)
        objective = self.algorithm.teacher
        flat = build_train_batch(
            batch,
            self.train_step_of_version,
            self.advantage.compute if known else None,
            credit=self.algorithm.credit,
            max_token_staleness=self.recipe.max_token_staleness,
            with_teacher=self.algorithm.reads_teachers,
        )
        return flat if objective is None else _taught(flat, objective)

    def passed(self, flat: TrainBatch) -> BoolArray:
        """Return the trajectories with a gradient, bool [trajectories]: all unless ``skip_zero_advantage``.

        A minibatch without any keeps all: an update without a gradient still moves the weights by the moments.
        """
        if not self.algorithm.skip_zero_advantage or self._needs_every_pass:
            return np.ones(flat.trajectory_count, np.bool_)
        gradients = np.bincount(flat.sequence_index, flat.token_advantages != 0, flat.trajectory_count)
        passed: BoolArray = gradients > 0
        for minibatch in split_minibatches(flat, self.recipe.minibatches):
            if not passed[minibatch].any():
                passed[minibatch] = True
        return passed

    @property
    def _needs_every_pass(self) -> bool:
        """True if the gradient reads trajectories with advantage 0: by themselves, in a mask, or in its rate."""
        algorithm = self.algorithm
        return (
            algorithm.kl_coefficient > 0
            or self.loss.forward_kl_coefficient > 0
            or algorithm.loss_method.pulls_without_advantage
            or algorithm.update_scale != "none"
            or any(MASKS[mask.name].whole_batch for mask in algorithm.masks)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of the gradient passes of a train step."""

    flat: TrainBatch
    columns: TokenColumns
    old: OldLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step: the pass that gave its gradient, and what was done with it."""

    done: GradientPass
    grad_norm: float
    rate_factor: float
    """Factor on the learning rate."""
    applied: bool
    """False if the gradient was not finite."""
    gradient_seconds: float
    update_seconds: float


@dataclass(frozen=True, eq=False, slots=True)
class StepRunner:
    """The passes and updates of a train step, for one policy. Every rank must make the same calls."""

    model: PolicyModel
    optimizer: Optimizer
    compute: Compute
    scorer: OldLogprobScorer

    def run(self, plan: StepPlan, flat: TrainBatch) -> tuple[StepInputs, list[Update], float]:
        """Compute old and reference logprobs, whose time is the last result, then one update per minibatch."""
        begin = time.perf_counter()
        minibatches = split_minibatches(flat, plan.recipe.minibatches)
        inputs = self.inputs(plan, flat, one_minibatch=len(minibatches) == 1)
        scoring_seconds = time.perf_counter() - begin
        updates = []
        for sequences in minibatches:
            begin = time.perf_counter()
            done = accumulate_gradient(self.model, self.compute, plan.loss, inputs.flat, inputs.columns, sequences)
            seconds = time.perf_counter() - begin
            updates.append(self.update(plan, inputs.flat, done, sequences, seconds))
        return inputs, updates, scoring_seconds

    def inputs(self, plan: StepPlan, flat: TrainBatch, *, one_minibatch: bool) -> StepInputs:
        """Compute what the plan needs, with at most one forward pass of the policy at the start of the step.

        With one minibatch the gradient pass gives the trainer-side log-probabilities, unless an advantage or a mask
        needs them earlier.
        """
        policy = entropy = reference = None
        if plan.advantage.needs_policy or any(mask.needs_policy for mask in plan.masks):
            every = np.arange(flat.trajectory_count)
            policy, entropy = score_with_entropy(self.model, self.compute, flat, every)
        if (version := plan.settings.kl_reference_version) is not None:
            reference = self.scorer.reference(flat, version)
        elif plan.algorithm.kl_reference == "teacher" and flat.teacher is not None:
            reference = flat.teacher.logprobs.astype(np.float64)
        if plan.advantage.needs_policy or plan.advantage.needs_reference:
            sums = trajectory_columns(flat, policy=policy, reference=reference)
            flat = replace(flat, advantages=plan.advantage.compute(sums).numpy())
        flat = replace(flat, passed=plan.passed(flat))
        early = bool(plan.masks) or policy is not None
        old, share = self.scorer.denominator(
            flat,
            plan.algorithm.old_logprob_method,
            plan.current_version,
            one_minibatch=one_minibatch and not early,
            policy=policy,
        )
        flat = apply_masks(flat, plan.masks, old.values, policy, entropy)
        kl = reference if plan.algorithm.kl_coefficient > 0 else None
        columns = token_columns(flat, old, torch.from_numpy(share), None if kl is None else torch.from_numpy(kl))
        return StepInputs(flat=flat, columns=columns, old=old)

    def update(
        self, plan: StepPlan, flat: TrainBatch, done: GradientPass, sequences: Int64Array, gradient_seconds: float
    ) -> Update:
        """Update the weights with the gradient in the parameters, which is of these trajectories, [sequences]."""
        begin = time.perf_counter()
        factor = 1.0
        if plan.loss.update_scale is not None:  # of the weights of the trajectories over their tokens in the loss
            # With an update scale every trajectory has a pass (StepPlan.passed).
            inside = flat.loss_mask & np.isin(flat.sequence_index, sequences)
            size = effective_sample_size((done.logprobs - flat.behavior_logprobs)[inside], flat.sequence_index[inside])
            if count := len(np.unique(flat.sequence_index[inside])):
                factor = plan.loss.update_scale(size / count)
        norm, applied = apply_update(self.optimizer, plan.recipe.max_grad_norm, factor)
        return Update(
            done=done,
            grad_norm=norm,
            rate_factor=factor,
            applied=applied,
            gradient_seconds=gradient_seconds,
            update_seconds=time.perf_counter() - begin,
        )


def _taught(flat: TrainBatch, objective: TeacherObjective) -> TrainBatch:
    """Return a batch with the advantages of the reverse KL to its teachers."""
    scores, written = flat.teacher, flat.policy_mask
    assert scores is not None
    if objective.forward_kl_coefficient and scores.top_ids is None:
        raise DataError(
            f"batch {flat.train_step}: the columns of its teachers have no top tokens, or different numbers of them; "
            "forward_kl_coefficient needs the same teachers.*.top_k in all"
        )
    advantages = np.zeros(len(written))
    advantages[written] = reverse_kl_advantages(
        torch.from_numpy(scores.logprobs[written]).double(),
        torch.from_numpy(flat.behavior_logprobs[written]).double(),
        torch.from_numpy(flat.sequence_index[written]),
        flat.trajectory_count,
        coefficient=objective.reverse_kl_coefficient,
        discount=objective.discount,
    )
    return replace(flat, teacher=replace(scores, advantages=advantages))


def apply_masks(
    flat: TrainBatch,
    masks: Sequence[BoundMask],
    old: Tensor,
    policy: Float64Array | None,
    entropy: Float64Array | None,
) -> TrainBatch:
    """Take the tokens of the masks out of the loss of a batch; ``old``, ``policy`` and ``entropy`` are [tokens]."""
    if not masks:
        return flat
    index = np.flatnonzero(flat.policy_mask)
    rows = torch.from_numpy(index)
    loss_mask, masked_by = flat.loss_mask.copy(), dict(flat.masked_by)
    solved = trajectory_columns(flat).solved
    sequences, units = torch.from_numpy(flat.sequence_index[index]), torch.from_numpy(flat.unit_index[index])
    advantages = torch.from_numpy(flat.token_advantages[index])
    for mask in masks:
        before = loss_mask[index]
        data = MaskInput(
            old_logprobs=old[rows],
            behavior_logprobs=torch.from_numpy(flat.behavior_logprobs[index].astype(np.float64)),
            policy_logprobs=None if policy is None else torch.from_numpy(policy[index]),
            entropy=None if entropy is None else torch.from_numpy(entropy[index]),
            advantages=advantages,
            solved=solved[units],
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
        advantages=torch.from_numpy(flat.token_advantages),
        mask=torch.from_numpy(flat.loss_mask),
        sequence_index=torch.from_numpy(flat.sequence_index),
        reference_logprobs=reference,
    )


def trailing_skipped(applied: Sequence[bool]) -> int:
    """Return the number of skipped updates after the last one that was applied."""
    return next((i for i, done in enumerate(reversed(applied)) if done), len(applied))


def token_results(plan: StepPlan, inputs: StepInputs, updates: Sequence[Update], *, dropout: bool) -> TokenResults:
    """Return the results of a step for every token: scores, ratios, clips and where the loss has a gradient.

    Each token has the scores of its own minibatch, at the start of that. ``dropout`` tells that no gradient pass
    computes as the policy is served.
    """
    flat, reference = inputs.flat, inputs.columns.reference_logprobs
    logprobs = np.sum([update.done.logprobs for update in updates], axis=0)
    index, judged = judge_tokens(plan.loss, flat, inputs.columns, logprobs)
    ratio, clip = np.ones(len(flat.token_ids)), np.zeros(len(flat.token_ids), np.int8)
    ratio[index], clip[index] = judged.ratio.numpy(), judged.clip.numpy()
    active = np.zeros(len(flat.token_ids), np.bool_)
    active[index] = judged.weight.numpy() != 0
    first = split_minibatches(flat, plan.recipe.minibatches)[0]
    return TokenResults(
        logprobs=logprobs,
        entropy=np.sum([update.done.entropy for update in updates], axis=0),
        forward_kl=np.sum([u.done.forward_kl for u in updates], axis=0) if plan.loss.forward_kl_coefficient else None,
        ratio=ratio,
        clip=clip,
        active=active,
        as_served=np.isin(flat.sequence_index, first) & (not dropout),
        reference_logprobs=None if reference is None else reference.numpy(),
    )
