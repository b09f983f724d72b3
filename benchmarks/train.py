"""A train step on ragged trajectories, with padded micro-batches as the baseline.

16k response tokens, lengths lognormal with median 99 and maximum 520, on the demo's model; CPU seconds with one thread,
runs interleaved, median. Ours is the whole ``PolicyTrainer.train`` (flattening, packing, loss, update, all numbers of
the report). The baselines are forward, the same loss, backward and update, with the attention of Hugging Face. The long
rows train on and score trajectories of 2,500 to 3,500 tokens, each above the token budget of a micro-batch.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.fine_tuning import measure_fine_tuning
from benchmarks.frame import Measure, Quick, at_least, compared, interleaved
from benchmarks.large_models import measure_large
from benchmarks.models import SMALL, write_random_model
from benchmarks.shared_prefixes import measure_sharing, train_again
from benchmarks.workloads import group_of_answers, random_ids
from rollmesh.algorithms.losses import LossInput, loss_options, ppo_clip
from rollmesh.config.loss_methods import LOSSES
from rollmesh.config.trainer import TrainerConfig
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch, Group, Int32Array, Trajectory

VOCAB: int = SMALL["vocab_size"]
MEDIAN, LONGEST, TOKENS = 99, 520, 16_384
PROMPT = 12
GROUP_SIZE = 8
LONG_TOKENS, LONG_BUDGET = (2_500, 3_500), 2_048
RATE = 4e-4
_UNIT = "useful tokens per cpu-second"


def run(*, quick: Quick = False) -> list[Measure]:
    """Measure; the ratio of each figure is ours divided by the baseline, so larger is better."""
    with tempfile.TemporaryDirectory() as folder:
        write_demo_model(Path(folder))
        padded = _measure(Path(folder), 2 if quick else 5) + _measure_long(Path(folder), 1 if quick else 3)
    pairs = 1 if quick else 3
    return padded + measure_sharing(pairs) + measure_large(pairs) + measure_fine_tuning(pairs)


def _measure(folder: Path, repetitions: int) -> list[Measure]:
    batch = ragged_batch(seed=0)
    lengths = [t.response_token_count for g in batch.groups for t in g.trajectories]
    order = np.random.default_rng(1).permutation(len(lengths)).tolist()
    random16 = [order[i : i + 16] for i in range(0, len(order), 16)]
    by_length = sorted_bins([length + PROMPT for length in lengths], budget=4096)
    trainer, baseline = _trainer(folder), PaddedTrainer(folder)
    work = {
        "packed": lambda: train_again(trainer, batch),
        "random": lambda: baseline.step(batch, random16),
        "sorted": lambda: baseline.step(batch, by_length),
    }
    rate = {name: sum(lengths) / seconds for name, seconds in interleaved(work, repetitions).items()}
    bars = (at_least("ratio", 2.5),)
    return [
        compared("train_packed", rate["packed"], _UNIT, "padded random micro-batches of 16", rate["random"], bars),
        compared("train_packed_sorted", rate["packed"], _UNIT, "padded length-sorted, 4096 tokens", rate["sorted"]),
    ]


def _measure_long(folder: Path, repetitions: int) -> list[Measure]:
    batch = long_batch(seed=0)
    trainer, baseline = _trainer(folder, tokens_per_microbatch=LONG_BUDGET), PaddedTrainer(folder)
    trajectories = [t for g in batch.groups for t in g.trajectories]
    ids = [_token_ids(t) for t in trajectories]
    work = {
        "train": lambda: train_again(trainer, batch),
        "train_alone": lambda: baseline.step(batch, [[i] for i in range(len(trajectories))]),
        "score": lambda: trainer.logprobs(ids),
        "score_alone": lambda: baseline.score(ids),
    }
    useful = sum(t.response_token_count for t in trajectories)
    rate = {name: useful / seconds for name, seconds in interleaved(work, repetitions).items()}
    other, bars = "one trajectory at a time", (at_least("ratio", 0.8),)  # alone, nothing is padded
    return [
        compared(f"{name}_packed_long", rate[name], _UNIT, other, rate[f"{name}_alone"], bars)
        for name in ("train", "score")
    ]


def _trainer(folder: Path, **settings: int) -> PolicyTrainer:
    config = TrainerConfig.model_validate({"learning_rate": RATE, **settings})
    return PolicyTrainer(folder, config, device="cpu")


def write_demo_model(folder: Path) -> None:
    """Write a random model of the demo's shape that is long enough for all trajectories."""
    write_random_model(folder, {**SMALL, "max_position_embeddings": 4096})


def ragged_batch(seed: int, tokens: int = TOKENS) -> Batch:
    """Return groups of trajectories with at least ``tokens`` response tokens, all of version 0, rewards 0 or 1."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.extend(np.clip(rng.lognormal(np.log(MEDIAN), 0.9, GROUP_SIZE), 8, LONGEST).astype(int).tolist())
    groups = [_group(rng, g, lengths[g * GROUP_SIZE : (g + 1) * GROUP_SIZE]) for g in range(len(lengths) // GROUP_SIZE)]
    return Batch(train_step=1, groups=tuple(groups))


def long_batch(seed: int) -> Batch:
    """Return one group of 4 trajectories, each longer than ``LONG_BUDGET``."""
    rng = np.random.default_rng(seed)
    return Batch(train_step=1, groups=(_group(rng, 0, rng.integers(*LONG_TOKENS, 4).tolist()),))


def _group(rng: np.random.Generator, index: int, lengths: Sequence[int]) -> Group:
    answers = [random_ids(rng, VOCAB, length) for length in lengths]
    return group_of_answers(rng, index, random_ids(rng, VOCAB, PROMPT), answers, VOCAB)


def _token_ids(trajectory: Trajectory) -> Int32Array:
    return np.concatenate([trajectory.prompt.token_ids, trajectory.response_ids])


def sorted_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Fill padded micro-batches with rows within the token budget, longest first; return the row indices."""
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= budget:
            bins[-1].append(i)
        else:
            bins.append([i])
    return bins


class PaddedTrainer:
    """Baseline: right-padded micro-batches through the model's own forward pass."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._options = loss_options(LOSSES["ppo_clip"], dual_clip=10.0)

    def step(self, batch: Batch, micro_batches: Sequence[Sequence[int]]) -> None:
        """Make one update with GRPO advantages and token-mean PPO-clip, the default of ``PolicyTrainer``.

        ``micro_batches`` are lists of trajectory indices in the batch.
        """
        trajectories = [t for g in batch.groups for t in g.trajectories]
        rewards = [torch.tensor([t.shaped_reward for t in g.trajectories]) for g in batch.groups]
        advantages = torch.cat([(group - group.mean()) / (group.std() + 1e-6) for group in rewards])
        total = sum(t.response_token_count for t in trajectories)
        for rows in micro_batches:
            loss = self._padded_loss([trajectories[i] for i in rows], advantages[list(rows)])
            torch.autograd.backward(loss / total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def score(self, sequences: Sequence[Int32Array]) -> list[Tensor]:
        """Return the log-probability of each token given its predecessors, one sequence at a time."""
        scored = []
        for ids in sequences:
            row = torch.from_numpy(ids.astype(np.int64))[None]
            logits = self.model(input_ids=row[:, :-1], use_cache=False).logits
            scored.append(logits.log_softmax(-1).gather(-1, row[:, 1:, None])[0, :, 0])
        return scored

    def _padded_loss(self, rows: Sequence[Trajectory], advantages: Tensor) -> Tensor:
        width = max(PROMPT + t.response_token_count for t in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        old = torch.zeros(len(rows), width)
        for r, t in enumerate(rows):
            stop = PROMPT + t.response_token_count
            ids[r, :stop] = torch.from_numpy(_token_ids(t).astype(np.int64))
            mask[r, PROMPT:stop] = True
            known = t.segments[0].behavior_logprobs
            assert known is not None
            old[r, PROMPT:stop] = torch.from_numpy(known)
        attended = torch.arange(width)[None] < torch.tensor([PROMPT + t.response_token_count for t in rows])[:, None]
        logits = self.model(input_ids=ids, attention_mask=attended.long(), use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        data = LossInput(
            logprobs=logprobs,
            old_logprobs=old[:, 1:],
            behavior_logprobs=old[:, 1:],
            advantages=advantages[:, None].expand_as(logprobs),
            mask=mask[:, 1:],
            sequence_index=torch.arange(len(rows))[:, None].expand_as(logprobs),
            sequence_count=len(rows),
        )
        return ppo_clip(data, self._options).loss.masked_fill(~data.mask, 0).sum()
