"""The train step of supervised fine-tuning, cross-entropy of the target tokens of a batch, and its line of progress."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

import numpy as np
import torch
from torch import Tensor

from rollmesh.config.sft_config import SftTrainerConfig
from rollmesh.sft.training_rows import SftRow, token_batch
from rollmesh.trainer.learner.forward_backward import gradient_pass, score_batch
from rollmesh.trainer.learner.packing import MicroBatch
from rollmesh.trainer.learner.policy_learner import PolicyLearner
from rollmesh.trainer.learner.policy_state import apply_update, learning_rate, set_hyperparameters

_EVALUATED_ROWS = 256
"""Rows that are packed together for an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftStep:
    """Report of one train step."""

    train_step: int
    loss: float
    """Nats per target token, before the update."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    applied: bool
    """False if the gradient was not finite, which changes no weights."""
    rows: int
    trained_tokens: int
    """Target tokens."""
    forward_tokens: int
    """Tokens in the forward passes, a shared beginning once."""
    microbatches: int
    seconds: float


@dataclass(slots=True)
class SftTrainer:
    """A learner that trains on rows. Every rank must make the same calls."""

    learner: PolicyLearner
    config: SftTrainerConfig
    train_steps: int
    """Length of the run, for the schedule of the learning rate."""
    seed: int
    train_step: int = 0
    """Number of batches that the policy was trained on."""

    def train(self, rows: Sequence[SftRow]) -> SftStep:
        """Train on one batch. The same step on the same rows and weights gives the same weights."""
        begin, step, learner = time.perf_counter(), self.train_step + 1, self.learner
        rate = learning_rate(self.config, step, self.train_steps)
        set_hyperparameters(
            learner.optimizer, rate=rate, betas=self.config.betas, weight_decay=self.config.weight_decay
        )
        if learner.model.has_dropout:
            torch.manual_seed((self.seed << 32 ^ step) % 2**63)  # a repeated step drops the same inputs
        batch = token_batch(rows)
        count = int(batch.policy_mask.sum())

        def loss_of(_: MicroBatch, logprobs: Tensor) -> Tensor:
            return -logprobs.sum() / count

        every = np.arange(len(rows))
        done = gradient_pass(learner.model, learner.compute, batch, every, loss_of, count, entropy=False)
        norm, applied = apply_update(learner.optimizer, self.config.max_grad_norm)
        self.train_step = step
        return SftStep(
            train_step=step,
            loss=done.loss,
            learning_rate=rate,
            grad_norm=norm,
            applied=applied,
            rows=len(rows),
            trained_tokens=count,
            forward_tokens=done.forward_tokens,
            microbatches=done.microbatches,
            seconds=time.perf_counter() - begin,
        )

    def evaluate(self, rows: Sequence[SftRow]) -> float:
        """Return the loss of held-out rows, in nats per target token over all of them."""
        total = count = 0.0
        for start in range(0, len(rows), _EVALUATED_ROWS):
            batch = token_batch(rows[start : start + _EVALUATED_ROWS])
            every = np.arange(len(batch.starts) - 1)
            total -= float(score_batch(self.learner.model, self.learner.compute, batch, every).sum())
            count += int(batch.policy_mask.sum())
        return total / count


_LOG_SECONDS = 10.0


@dataclass(slots=True)
class ProgressLine:
    """Lines of one process; silent without a stream."""

    _stream: TextIO | None
    _open: bool = field(default=False, init=False)
    _written: float = field(default=-_LOG_SECONDS, init=False)

    def note(self, text: str) -> None:
        """Write a line that stays."""
        if self._stream is not None:
            print("\n" * self._open + text, file=self._stream, flush=True)
        self._open = False

    def step(self, done: SftStep, train_steps: int) -> None:
        """Show a train step: in place on a terminal, else the first, the last, and one every few seconds."""
        if self._stream is None:
            return
        speed = done.forward_tokens / done.seconds
        text = (
            f"step {done.train_step}/{train_steps}  loss {done.loss:.4f}  rate {done.learning_rate:.2e}  "
            f"gradient {done.grad_norm:.3f}  {speed:,.0f} tokens/s"
        )
        if self._stream.isatty():
            print(f"\r\x1b[K{text}", end="", file=self._stream, flush=True)
            self._open = True
        elif done.train_step == train_steps or time.monotonic() - self._written >= _LOG_SECONDS:
            self._written = time.monotonic()
            self.note(text)
