"""Forward and backward passes: scoring without a gradient, and the gradient of one minibatch."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rollmesh.algorithms.aggregation import Aggregation, aggregate
from rollmesh.algorithms.losses import LossInput, LossOptions, PolicyLoss, TokenLoss
from rollmesh.algorithms.ratios import UpdateScale, k3
from rollmesh.config.trainer import OptimizationConfig
from rollmesh.errors import ConfigError
from rollmesh.trainer.learner.distributed import World, pick_device, sum_over_ranks
from rollmesh.trainer.learner.packing import MicroBatch, pack, pack_sequences
from rollmesh.trainer.learner.packing_check import shares_prefixes
from rollmesh.trainer.learner.policy_model import PolicyModel
from rollmesh.trainer.learner.prefix_tree import prefix_bins
from rollmesh.trainer.learner.teacher_scores import TeacherScores
from rollmesh.trainer.learner.train_batch import TokenBatch, TrainBatch
from rollmesh.types import Float32Array, Float64Array, FloatArray, Int32Array, Int64Array, KeptSets

_LEAST_SAVED: Mapping[bool | str, int | None] = {"auto": 96, True: 1, False: None}
"""Tokens that a fork saves at least, by ``trainer.share_prefixes``. A fork costs as much as 50 to 90 of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Device, ranks and precision of the forward and backward passes."""

    device: torch.device
    world: World
    token_budget: int
    autocast: bool
    """bfloat16 autocast, for one process on CUDA. FSDP2 has its own mixed precision."""
    mixed_shards: bool = False
    """Sharded models gather bfloat16 parameters for every dtype of their shards: several processes on CUDA."""
    least_saved: int | None = None
    """Tokens that a shared beginning must save to be computed once (``prefix_tree``); None shares nothing."""

    def precision(self) -> torch.autocast | nullcontext[None]:
        """Return the context manager for a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def whole_precision(self) -> torch.autocast | nullcontext[None]:
        """Return the context manager for a forward pass of a model that is not sharded yet."""
        return replace(self, autocast=self.autocast or self.mixed_shards).precision()

    def sharing(self, model: PolicyModel, choice: Literal["auto"] | bool, longest: int) -> "Compute":
        """Return these settings with what ``trainer.share_prefixes`` chooses for a model that is not sharded yet.

        auto shares nothing where a shared token differs from one of its own sequence; true raises ConfigError there.
        """
        least = _LEAST_SAVED[choice]
        if least is None or model.has_dropout:
            return self
        if not shares_prefixes(model.causal_lm, longest=longest, precision=self.whole_precision):
            if choice == "auto":
                return self
            raise ConfigError(
                f"trainer.share_prefixes=true: {type(model.causal_lm).__name__} ignores the positions of its input, "
                "so that a token after a shared beginning is at another position; set it to auto or false"
            )
        return replace(self, least_saved=least)

    def share(self, batch: TokenBatch, sequences: Int64Array) -> list[MicroBatch]:
        """Return this rank's micro-batches of these sequences. Every rank has the same number of them."""
        ids = [batch.token_ids[batch.starts[s] : batch.starts[s + 1]] for s in sequences]
        bins = prefix_bins(ids, self.token_budget, self.world.size, self.least_saved)
        bins_of_rank = bins[self.world.rank :: self.world.size]
        return [pack(batch, sequences[indices].tolist(), self.device, self.least_saved) for indices in bins_of_rank]


def compute_of(
    config: OptimizationConfig, world: World, device: str | None = None, mixed_precision: bool | None = None
) -> Compute:
    """Return device and precision of a trainer; ``mixed_precision`` is for passes in bfloat16, None for CUDA only."""
    place = pick_device(device or config.device, world.local_rank)
    mixed = place.type == "cuda" if mixed_precision is None else mixed_precision
    return Compute(
        device=place,
        world=world,
        token_budget=config.tokens_per_microbatch,
        autocast=mixed and world.size == 1,
        mixed_shards=mixed and world.size > 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRecipe:
    """Loss, its options, its aggregation, the weights of the KL terms, and the factor on the learning rate."""

    loss: PolicyLoss
    options: LossOptions
    aggregation: Aggregation
    kl_coefficient: float
    forward_kl_coefficient: float = 0.0
    update_scale: UpdateScale | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """Inputs of the loss as CPU tensors over the flat batch, [tokens]."""

    old_logprobs: Tensor  # float64
    policy_share: Tensor  # float64, share of the policy in training in the denominator, detached; old_logprobs the rest
    behavior_logprobs: Tensor  # float64
    advantages: Tensor  # float64
    mask: Tensor  # bool
    sequence_index: Tensor  # int64
    reference_logprobs: Tensor | None  # float64

    def loss_input(self, logprobs: Tensor, index: Tensor, sequence_index: Tensor, sequence_count: int) -> LossInput:
        """Select the rows ``index`` to match ``logprobs`` [rows], on its device and in its dtype."""

        def take(column: Tensor) -> Tensor:
            return column[index].to(logprobs)

        share = take(self.policy_share)
        return LossInput(
            logprobs=logprobs,
            old_logprobs=share * logprobs.detach() + (1 - share) * take(self.old_logprobs),
            behavior_logprobs=take(self.behavior_logprobs),
            advantages=take(self.advantages),
            mask=self.mask[index].to(logprobs.device),
            sequence_index=sequence_index,
            sequence_count=sequence_count,
        )


def score_batch(model: PolicyModel, compute: Compute, batch: TokenBatch, sequences: Int64Array) -> Float64Array:
    """Score the policy tokens of these sequences: float64 [tokens] on every rank, 0 for all other tokens."""
    logprobs: Float64Array = score_with_entropy(model, compute, batch, sequences, entropy=False)[0]
    return logprobs


@torch.no_grad()
def score_with_entropy(
    model: PolicyModel, compute: Compute, batch: TokenBatch, sequences: Int64Array, *, entropy: bool = True
) -> Float64Array:
    """Score like ``score_batch``: log-probabilities and entropy (0 without ``entropy``), float64 [2, tokens]."""
    values = torch.zeros(2, len(batch.token_ids), dtype=torch.float64)
    for micro in compute.share(batch, sequences):
        with compute.precision():
            scores = model.score(micro, entropy=entropy)
        index = torch.from_numpy(micro.token_index)
        for row, column in zip(values[: 1 + entropy], scores, strict=False):
            row[index] = column.double().cpu()
    scored: Float64Array = sum_over_ranks(values, compute.world).numpy()
    return scored


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPass:
    """Loss, scores and counts of one minibatch. The gradient is in the parameters."""

    loss: float
    weight: float
    """Sum of the aggregation weights before the division, the divisor of the whole minibatch."""
    logprobs: Float64Array  # [tokens] of the flat batch, 0 outside the minibatch
    entropy: Float64Array  # [tokens]
    forward_kl: Float64Array  # [tokens], 0 unless it is in the loss
    microbatches: int
    forward_tokens: int


def accumulate_gradient(
    model: PolicyModel,
    compute: Compute,
    recipe: LossRecipe,
    batch: TrainBatch,
    columns: TokenColumns,
    sequences: Int64Array,
    *,
    divisor: float | None = None,
) -> GradientPass:
    """Add the gradient of a minibatch to the parameters, micro-batch by micro-batch.

    The aggregation weights are computed over the whole minibatch, so the sum does not depend on the split.
    Trajectories that the batch leaves out of the passes count in these weights. ``divisor`` replaces their sum: 1 for a
    part of a minibatch, whose sum is not known yet.
    """
    member = np.isin(batch.sequence_index, sequences) & batch.policy_mask
    weights = recipe.aggregation(torch.from_numpy(member), columns.sequence_index, batch.trajectory_count)
    weight = float(weights.sum())
    weights = weights / (max(1.0, weight) if divisor is None else divisor)

    def loss_of(micro: MicroBatch, logprobs: Tensor, forward_kl: Tensor | None = None) -> Tensor:
        index = torch.from_numpy(micro.token_index)
        data = columns.loss_input(logprobs, index, micro.sequence_index, micro.sequence_count)
        token_loss = recipe.loss(data, recipe.options).loss
        if (reference := columns.reference_logprobs) is not None:
            token_loss = token_loss + recipe.kl_coefficient * k3(logprobs, reference[index].to(logprobs))
        if forward_kl is not None:
            token_loss = token_loss + recipe.forward_kl_coefficient * forward_kl
        return aggregate(token_loss, data.mask, weights[index].to(logprobs))

    teacher = batch.teacher if recipe.forward_kl_coefficient else None
    return gradient_pass(model, compute, batch, sequences[batch.passed[sequences]], loss_of, weight, teacher=teacher)


def gradient_pass(
    model: PolicyModel,
    compute: Compute,
    batch: TokenBatch,
    sequences: Int64Array,
    loss_of: Callable[..., Tensor],
    weight: float,
    *,
    entropy: bool = True,
    teacher: TeacherScores | None = None,
) -> GradientPass:
    """Add the gradient of these sequences to the parameters, micro-batch by micro-batch.

    ``loss_of`` returns the part of the loss of a micro-batch, from its log-probabilities [scored] and, with a
    ``teacher``, the forward KL to that, [scored]; the parts add up.
    """
    values = torch.zeros(3, len(batch.token_ids), dtype=torch.float64)
    totals = torch.zeros(3, dtype=torch.float64)
    for micro in compute.share(batch, sequences):
        with compute.precision():
            top = None if teacher is None else teacher.top_of(micro.token_index, compute.device)
            scores = model.score(micro, entropy=entropy, top=top)
        loss = loss_of(micro, scores[0], *scores[2:])
        # FSDP2 averages gradients over the ranks. Multiplying by the number of ranks makes it a sum.
        torch.autograd.backward(loss * compute.world.size)
        index = torch.from_numpy(micro.token_index)
        for row, column in zip(values, scores, strict=False):
            row[index] = column.detach().double().cpu()
        totals += torch.tensor([loss.item(), 1, micro.token_count], dtype=torch.float64)
    sum_over_ranks(values, compute.world)
    sum_over_ranks(totals, compute.world)
    return GradientPass(
        loss=float(totals[0]),
        weight=weight,
        logprobs=values[0].numpy(),
        entropy=values[1].numpy(),
        forward_kl=values[2].numpy(),
        microbatches=int(totals[1]),
        forward_tokens=int(totals[2]),
    )


@torch.no_grad()
def judge_tokens(
    recipe: LossRecipe, batch: TrainBatch, columns: TokenColumns, logprobs: Float64Array
) -> tuple[Int64Array, TokenLoss]:
    """Evaluate the loss for every policy token on the CPU: (flat index [policy tokens], result [policy tokens])."""
    index = np.flatnonzero(batch.policy_mask)
    rows = torch.from_numpy(index)
    data = columns.loss_input(
        torch.from_numpy(logprobs[index]), rows, columns.sequence_index[rows], batch.trajectory_count
    )
    return index, recipe.loss(data, recipe.options)


def score_sequences(
    model: PolicyModel,
    compute: Compute,
    sequences: Sequence[Int32Array],
    temperature: float,
    kept_sets: Sequence[KeptSets | None] | None = None,
) -> list[Float32Array]:
    """Score sequences of at least 2 tokens, packed, and return the results in their order. Every rank scores all.

    ``kept_sets`` has the kept sets of each sequence, one set per token; None for full sampling.
    """
    scored = score_in_model_dtype(model, compute, sequences, temperature, kept_sets)
    return [values.astype(np.float32, copy=False) for values in scored]


@torch.no_grad()
def score_in_model_dtype(
    model: PolicyModel,
    compute: Compute,
    sequences: Sequence[Int32Array],
    temperature: float,
    kept_sets: Sequence[KeptSets | None] | None = None,
) -> list[FloatArray]:
    """Score sequences like ``score_sequences``, without rounding the scores of a float64 model."""
    results: list[FloatArray] = [np.empty(0, np.float32)] * len(sequences)
    for indices in prefix_bins(sequences, compute.token_budget, least_saved=compute.least_saved):
        chosen, sets = [sequences[i] for i in indices], kept_sets and [kept_sets[i] for i in indices]
        micro = pack_sequences(chosen, temperature, compute.device, sets, compute.least_saved)
        with compute.precision():
            values = model.score(micro, entropy=False)[0].cpu().numpy()
        edges = np.cumsum([len(sequences[i]) - 1 for i in indices])[:-1]
        for i, scores in zip(indices, np.split(values, edges), strict=True):
            results[i] = scores
    return results
