"""Train steps whose trajectories begin alike, with ``trainer.share_prefixes`` auto beside false.

CPU seconds of the whole ``PolicyTrainer.train`` with one thread, in turn, median; memory by the allocations of tensors.
Each case has two bounds of the ratio: by tokens in the passes, and by multiplications of layers, attention and head.
They are those of a machine whose rate does not depend on the size of what it computes.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.allocation import peak_bytes
from benchmarks.frame import Bar, Measure, at_least, at_most, compared, interleaved
from benchmarks.models import SMALL, write_random_model
from benchmarks.workloads import group_of_answers, random_ids
from rollmesh.config.trainer import TrainerConfig
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch, Group, Int32Array

_WORDS = 96
_WIDE: Mapping[str, Any] = {**SMALL, "hidden_size": 512, "num_hidden_layers": 1, "intermediate_size": 1536}
"""Layers as large, beside their attention, as those of a model of half a billion parameters."""
_HEAVY: Mapping[str, Any] = {**SMALL, "vocab_size": 32_000}
_NO_LOSS = (at_least("ratio", 0.98),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Groups that are trained on, the model, and the bars."""

    groups: Callable[[np.random.Generator], Sequence[Group]]
    shape: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    budget: int = 4_096
    """Tokens of a micro-batch."""
    bars: tuple[Bar, ...] = _NO_LOSS
    memory: bool = False
    """Compare the memory too, all in one micro-batch."""


def _groups(count: int, members: int, prompt: int, answer: int) -> Callable[[np.random.Generator], list[Group]]:
    """Return a function that makes groups of random answers to random prompts."""

    def make(rng: np.random.Generator) -> list[Group]:
        def one(index: int) -> Group:
            answers = list(random_ids(rng, _WORDS, members, answer))
            return group_of_answers(rng, index, random_ids(rng, _WORDS, prompt), answers, _WORDS)

        return [one(index) for index in range(count)]

    return make


def _forks(rng: np.random.Generator) -> list[Group]:
    """Return groups of two sessions with a first turn each, which is continued four times."""

    def session() -> list[Int32Array]:
        first = random_ids(rng, _WORDS, 128)
        return [np.concatenate([first, random_ids(rng, _WORDS, 96)]) for _ in range(4)]

    def group(index: int) -> Group:
        return group_of_answers(rng, index, random_ids(rng, _WORDS, 64), session() + session(), _WORDS)

    return [group(index) for index in range(4)]


_LONG_ANSWERS, _LONG_PROMPT = _groups(1, 8, 512, 512), _groups(1, 8, 2_048, 128)
_DEMO = _groups(16, 8, 24, 100)
CASES: Mapping[str, Case] = {
    "prompts of 512, answers of 512, width 512": Case(
        groups=_LONG_ANSWERS, shape=_WIDE, budget=8_192, bars=(at_least("ratio", 1.6),), memory=True
    ),
    "prompts of 2,048, answers of 128, width 512": Case(
        groups=_LONG_PROMPT, shape=_WIDE, budget=17_408, bars=(at_least("ratio", 5.0),), memory=True
    ),
    "prompts of 512, answers of 512": Case(groups=_LONG_ANSWERS, budget=8_192, memory=True),
    "prompts of 2,048, answers of 128": Case(groups=_LONG_PROMPT, budget=17_408, memory=True),
    "prompts of 24, answers of 100": Case(groups=_DEMO, bars=(at_least("ratio", 1.1),)),
    "prompts of 24, answers of 100, 32,000 words": Case(groups=_groups(4, 8, 24, 100), shape=_HEAVY),
    "sessions with forks": Case(groups=_forks),
    "single sequences of 124": Case(groups=_groups(64, 1, 24, 100)),
}
"""Of the demo's model, unless they name another width or vocabulary."""


def measure_sharing(repetitions: int) -> list[Measure]:
    """Measure every case; the ratio of a rate is with sharing divided by without."""
    return [measure for name, case in CASES.items() for measure in _measured(name, case, repetitions)]


def _measured(name: str, case: Case, repetitions: int) -> list[Measure]:
    batch = Batch(train_step=1, groups=tuple(case.groups(np.random.default_rng(0))))
    useful = sum(t.response_token_count for g in batch.groups for t in g.trajectories)
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder), {**case.shape, "max_position_embeddings": 4_096})
        steps = {share: _step(Path(folder), case, share, batch) for share in ("auto", False)}
        seconds = interleaved({str(share): step for share, step in steps.items()}, repetitions)
        bytes_of = {share: peak_bytes(step) for share, step in steps.items()} if case.memory else {}
    rate = {share: useful / taken for share, taken in seconds.items()}
    unit, bounds = "useful tokens per cpu-second", bounds_of(batch, case.shape)
    found = [compared(name, rate["auto"], unit, "without shared prefixes", rate["False"], case.bars)]
    found += [Measure(name=f"{name}: bound by {what}", value=bound, unit="times") for what, bound in bounds.items()]
    if bytes_of:
        mega, bars = {share: count / 1e6 for share, count in bytes_of.items()}, (at_most("ratio", 0.7),)
        found.append(compared(f"{name}: memory", mega["auto"], "MB", "without shared prefixes", mega[False], bars))
    return found


def _step(folder: Path, case: Case, share: bool | str, batch: Batch) -> Callable[[], object]:
    fields = {"learning_rate": 4e-4, "tokens_per_microbatch": case.budget, "share_prefixes": share}
    return partial(train_again, PolicyTrainer(folder, TrainerConfig.model_validate(fields), device="cpu"), batch)


def train_again(trainer: PolicyTrainer, batch: Batch) -> None:
    """Train on a batch as the next one of the trainer."""
    step = trainer.train_step + 1
    trainer.train(Batch(train_step=step, groups=batch.groups), {0: step - 1})


def bounds_of(batch: Batch, shape: Mapping[str, Any]) -> dict[str, float]:
    """Return how many times as much is computed without sharing: tokens, and multiplications of a forward pass."""
    ids = sorted(
        np.concatenate([t.prompt.token_ids, t.response_ids])[:-1].tolist() for g in batch.groups for t in g.trajectories
    )
    begun = [0, *(_common(a, b) for a, b in pairwise(ids))]
    answers = sum(t.response_token_count for g in batch.groups for t in g.trajectories)
    width, head_keys = shape["hidden_size"], 32
    layer = width * (2 * width + 2 * head_keys + 3 * shape["intermediate_size"])

    def work(starts: Sequence[int]) -> tuple[int, int]:
        spans = list(zip(starts, map(len, ids), strict=True))
        tokens = sum(end - start for start, end in spans)
        pairs = sum((end * (end + 1) - start * (start + 1)) // 2 for start, end in spans)
        layers = shape["num_hidden_layers"] * (tokens * layer + 2 * pairs * width)
        return tokens, layers + answers * width * shape["vocab_size"]

    alone, shared = work([0] * len(ids)), work(begun)
    return {what: a / s for what, a, s in zip(("tokens", "multiplications"), alone, shared, strict=True)}


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
