"""``rollmesh bench old-logprob-cost``: the source loglinear beside recompute, which it approximates without a pass.

The batch of ``bench train``, in four minibatches: with one, the gradient pass is the pass of recompute. The answers are
those of a random model; their behavior logprobs are its own. Seconds are CPU seconds of a whole ``PolicyTrainer.train``
with one thread, in turn, median. Ratios are those of every token at the start of a step, 1 and 4 updates after the
policy that sampled it; there the ratio under recompute is 1.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rollmesh.bench.measure import Measure, at_most, compared, interleaved
from rollmesh.bench.train import PROMPT, RATE, TOKENS, ragged_batch, write_demo_model
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch, Float32Array, Group, Trajectory

_SOURCES = ("loglinear", "recompute")
_UPDATES = (1, 4)
"""Updates between the policy of the answers and the compared ratios."""
_BARS = (at_most("ratio", 0.9),)
"""Bar of the seconds: the pass costs more than a tenth of a step."""


def run(*, quick: bool = False) -> list[Measure]:
    """Measure seconds per step, and the largest and the mean difference of a token's ratio."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_demo_model(Path(folder))
            batch = _sampled(_trainer(Path(folder), "recompute", 1), ragged_batch(0, TOKENS // 8 if quick else TOKENS))
            return [_seconds(Path(folder), batch, 1 if quick else 5), *_differences(Path(folder), batch)]
    finally:
        torch.set_num_threads(threads)


def _trainer(folder: Path, source: str, minibatches: int) -> PolicyTrainer:
    algorithm = AlgorithmConfig.model_validate({"old_logprobs": source})
    config = TrainerConfig(learning_rate=RATE, minibatches=minibatches, algorithm=algorithm)
    return PolicyTrainer.from_folder(folder, config, device="cpu")


def _sampled(trainer: PolicyTrainer, batch: Batch) -> Batch:
    """Return the batch with the trainer's log-probabilities as those of the behavior policy."""
    members = [trajectory for group in batch.groups for trajectory in group.trajectories]
    scores = iter(trainer.logprobs([np.concatenate([t.prompt.token_ids, t.response_ids]) for t in members]))

    def sampled(trajectory: Trajectory, logprobs: Float32Array) -> Trajectory:
        (segment,) = trajectory.segments
        return replace(trajectory, segments=(replace(segment, behavior_logprobs=logprobs[PROMPT - 1 :]),))

    def of_group(group: Group) -> Group:
        return replace(group, trajectories=tuple(sampled(t, next(scores)) for t in group.trajectories))

    return replace(batch, groups=tuple(of_group(group) for group in batch.groups))


def _train(trainer: PolicyTrainer, batch: Batch) -> None:
    """Train on the batch as that of the next step; its tokens are of the policy before the first one."""
    step = trainer.train_step + 1
    trainer.train(replace(batch, train_step=step), {version: version for version in range(step)})


def _seconds(folder: Path, batch: Batch, repetitions: int) -> Measure:
    trainers = {source: _trainer(folder, source, 4) for source in _SOURCES}
    seconds = interleaved({source: partial(_train, t, batch) for source, t in trainers.items()}, repetitions)
    unit, baseline = "cpu-seconds per step", "recompute"
    return compared("loglinear_step", seconds["loglinear"], unit, baseline, seconds[baseline], _BARS)


def _differences(folder: Path, batch: Batch) -> Iterator[Measure]:
    trainer = _trainer(folder, "recompute", 1)
    for updates in _UPDATES:
        while trainer.train_step < updates:
            _train(trainer, batch)
        ratios = {source: _ratios(trainer, batch, source) for source in _SOURCES}
        difference = np.abs(ratios["loglinear"] - ratios["recompute"])
        name = f"loglinear_ratio_{updates}"
        yield Measure(name=f"{name}_largest", value=float(difference.max()), unit="difference of a token's ratio")
        yield Measure(name=f"{name}_mean", value=float(difference.mean()), unit="difference of a token's ratio")


def _ratios(trainer: PolicyTrainer, batch: Batch, source: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the ratio of every response token under the current weights, [tokens]."""
    step = trainer.train_step + 1
    settings = trainer.settings(step)
    assert settings.recipe is not None
    algorithm = settings.recipe.algorithm.model_copy(update={"old_logprobs": source})
    recipe = settings.recipe.model_copy(update={"algorithm": algorithm})
    steps = {version: version for version in range(step)}
    tokens = trainer.explain(replace(batch, train_step=step), steps, settings.model_copy(update={"recipe": recipe}))
    return np.array([token.ratio for token in tokens])
