"""``rollmesh bench train``: a train step on ragged trajectories, beside padded micro-batches of the same work.

16k response tokens, lengths lognormal with median 99 and maximum 520, on the demo's model; CPU seconds at one thread,
runs interleaved, median. Ours is the whole ``PolicyTrainer.train`` (flattening, packing, loss, update, every number of
the report); the baselines are forward, the same loss, backward and update, with Hugging Face's own attention.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollmesh.algorithms.advantages.grpo import grpo
from rollmesh.algorithms.losses.base import LossInput
from rollmesh.algorithms.losses.registry import LOSSES
from rollmesh.bench.measure import Figure, Measure, at_least, compared
from rollmesh.config.trainer import TrainerConfig
from rollmesh.trainer.step import PolicyTrainer
from rollmesh.types import (
    Batch,
    FinishReason,
    Group,
    Int32Array,
    OutcomeKind,
    Prompt,
    RewardOutcome,
    Segment,
    Trajectory,
)

VOCAB = 96
MEDIAN, LONGEST, TOKENS = 99, 520, 16_384
PROMPT = 12
GROUP_SIZE = 8
RATE = 4e-4
_BARS = (at_least(Figure.RATIO, 2.5),)
"""Beside padded random micro-batches."""


def run(*, quick: bool = False) -> list[Measure]:
    """Measure; the ratio of each figure is ours over the baseline, larger is better."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_demo_model(Path(folder))
            return _measure(Path(folder), repetitions=2 if quick else 5)
    finally:
        torch.set_num_threads(threads)


def _measure(folder: Path, repetitions: int) -> list[Measure]:
    batch = ragged_batch(seed=0)
    trajectories = [t for g in batch.groups for t in g.trajectories]
    useful = sum(t.response_token_count for t in trajectories)
    order = np.random.default_rng(1).permutation(len(trajectories)).tolist()
    random16 = [order[i : i + 16] for i in range(0, len(order), 16)]
    by_length = sorted_bins([t.response_token_count + PROMPT for t in trajectories], budget=4096)
    trainer = PolicyTrainer.from_folder(folder, TrainerConfig(learning_rate=RATE), device="cpu")
    baseline = PaddedTrainer(folder)

    def ours() -> None:
        step = trainer.train_step + 1
        trainer.train(Batch(train_step=step, groups=batch.groups), {0: step - 1})

    seconds = interleaved(
        {
            "packed": ours,
            "random": lambda: baseline.step(batch, random16),
            "sorted": lambda: baseline.step(batch, by_length),
        },
        repetitions,
    )
    rate = {name: useful / value for name, value in seconds.items()}
    unit = "useful tokens per cpu-second"
    return [
        compared("train_packed", rate["packed"], unit, "padded random micro-batches of 16", rate["random"], _BARS),
        compared("train_packed_sorted", rate["packed"], unit, "padded length-sorted, 4096 tokens", rate["sorted"]),
    ]


def interleaved(work: dict[str, Callable[[], None]], repetitions: int) -> dict[str, float]:
    """Median process CPU seconds of each; one unmeasured round first, then all in turn."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for repetition in range(repetitions + 1):
        for name, function in work.items():
            start = time.process_time()
            function()
            if repetition:
                taken[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def write_demo_model(folder: Path) -> None:
    """A random model of the demo's shape: 250k parameters."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=192,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    disable_progress_bar()  # type: ignore[no-untyped-call]
    Qwen2ForCausalLM(config).save_pretrained(folder)


def ragged_batch(seed: int, tokens: int = TOKENS) -> Batch:
    """Groups of trajectories with at least ``tokens`` response tokens, all of version 0, rewards 0 or 1."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.extend(np.clip(rng.lognormal(np.log(MEDIAN), 0.9, GROUP_SIZE), 8, LONGEST).astype(int).tolist())
    groups = []
    for g in range(len(lengths) // GROUP_SIZE):
        prompt = Prompt(prompt_id=str(g), token_ids=_ids(rng, PROMPT), verifier="exact")
        members = [
            _trajectory(rng, prompt, f"g{g}", m, lengths[g * GROUP_SIZE + m], float(rng.integers(0, 2)))
            for m in range(GROUP_SIZE)
        ]
        groups.append(Group(group_id=f"g{g}", admission_index=g, trajectories=tuple(members)))
    return Batch(train_step=1, groups=tuple(groups))


def _ids(rng: np.random.Generator, count: int) -> Int32Array:
    return rng.integers(0, VOCAB, count).astype(np.int32)


def _trajectory(
    rng: np.random.Generator, prompt: Prompt, group_id: str, member: int, length: int, reward: float
) -> Trajectory:
    segment = Segment(
        token_ids=_ids(rng, length),
        behavior_logprobs=np.full(length, -np.log(VOCAB), np.float32),
        policy_version=0,
        kv_min_version=0,
    )
    return Trajectory(
        trajectory_id=f"{group_id}.{member}",
        group_id=group_id,
        member_index=member,
        prompt=prompt,
        segments=(segment,),
        finish_reason=FinishReason.STOP,
        outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=reward),
        shaped_reward=reward,
    )


def sorted_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Longest first, as many rows as the padded micro-batch has room for."""
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if bins and (len(bins[-1]) + 1) * lengths[bins[-1][0]] <= budget:
            bins[-1].append(i)
        else:
            bins.append([i])
    return bins


class PaddedTrainer:
    """The usual alternative: right-padded micro-batches through the model's own forward pass."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._loss = LOSSES["ppo_clip"]

    def step(self, batch: Batch, micro_batches: Sequence[Sequence[int]]) -> None:
        """One update with GRPO advantages and token-mean PPO-clip: what ``PolicyTrainer`` computes by default.

        ``micro_batches`` hold places of trajectories in the batch.
        """
        trajectories = [t for g in batch.groups for t in g.trajectories]
        rewards = torch.tensor([t.shaped_reward for t in trajectories])
        group_index = torch.tensor([i for i, g in enumerate(batch.groups) for _ in g.trajectories])
        advantages = grpo(rewards, group_index, len(batch.groups))
        total = sum(t.response_token_count for t in trajectories)
        for rows in micro_batches:
            loss = self._padded_loss([trajectories[i] for i in rows], advantages[list(rows)])
            torch.autograd.backward(loss / total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _padded_loss(self, rows: Sequence[Trajectory], advantages: Tensor) -> Tensor:
        width = max(PROMPT + t.response_token_count for t in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        old = torch.zeros(len(rows), width)
        for r, t in enumerate(rows):
            stop = PROMPT + t.response_token_count
            ids[r, :stop] = torch.from_numpy(np.concatenate([t.prompt.token_ids, t.response_ids]).astype(np.int64))
            mask[r, PROMPT:stop] = True
            known = t.segments[0].behavior_logprobs
            assert known is not None
            old[r, PROMPT:stop] = torch.from_numpy(known)
        seen = torch.arange(width)[None] < torch.tensor([PROMPT + t.response_token_count for t in rows])[:, None]
        logits = self.model(input_ids=ids, attention_mask=seen.long(), use_cache=False).logits[:, :-1]
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
        return self._loss.loss(data, self._loss.options(dual_clip=10.0)).loss.masked_fill(~data.mask, 0).sum()
