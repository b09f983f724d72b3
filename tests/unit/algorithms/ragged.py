"""Random ragged inputs of the losses, and their formulas written out token by token in plain Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from rollmesh.algorithms.losses import LossInput, LossOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """One minibatch as lists of floats."""

    logprobs: list[float]
    old: list[float]
    behavior: list[float]
    advantages: list[float]
    mask: list[bool]
    sequence: list[int]
    count: int

    def loss_input(self, dtype: torch.dtype = torch.float64) -> LossInput:
        """The same as tensors; ``logprobs`` requires a gradient."""
        return LossInput(
            logprobs=torch.tensor(self.logprobs, dtype=dtype, requires_grad=True),
            old_logprobs=torch.tensor(self.old, dtype=dtype),
            behavior_logprobs=torch.tensor(self.behavior, dtype=dtype),
            advantages=torch.tensor(self.advantages, dtype=dtype),
            mask=torch.tensor(self.mask),
            sequence_index=torch.tensor(self.sequence),
            sequence_count=self.count,
        )


def random_ragged(seed: int) -> Ragged:
    """1 to 6 sequences of 1 to 12 tokens; some ratios far off, some advantages 0, some tokens masked."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    sequence = np.repeat(np.arange(count), rng.integers(1, 13, count))
    n = len(sequence)
    logprobs = -rng.exponential(1.5, n)
    spread = rng.choice([0.01, 0.3, 3.0, 30.0])
    old = logprobs + rng.normal(0, spread, n)
    behavior = old + rng.normal(0, rng.choice([0.01, 0.5]), n)
    advantages = rng.choice([0.0, 1.0, -1.0], count) * rng.exponential(1.0, count)
    mask = rng.random(n) < 0.8
    return Ragged(
        logprobs=logprobs.tolist(),
        old=old.tolist(),
        behavior=behavior.tolist(),
        advantages=advantages[sequence].tolist(),
        mask=mask.tolist(),
        sequence=sequence.tolist(),
        count=count,
    )


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def _ratio(a: float, b: float) -> float:
    return math.exp(_clip(a - b, -20.0, 20.0))


TokenFormula = Callable[[float, int], float]
"""(log-probability of the token, its index) -> loss, everything under a stop-gradient held fixed."""


def ppo_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    def loss(x: float, t: int) -> float:
        a, r = data.advantages[t], _ratio(x, data.old[t])
        value = -min(r * a, _clip(r, 1 - options.clip_low, 1 + options.clip_high) * a)
        if a < 0 and options.dual_clip is not None:
            value = min(value, -options.dual_clip * a)
        return value

    return loss


def decoupled_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    inner = ppo_formula(data, options)
    return lambda x, t: _ratio(data.old[t], data.behavior[t]) * inner(x, t)


def tis_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    inner = ppo_formula(data, options)
    return lambda x, t: min(_ratio(data.old[t], data.behavior[t]), options.tis_cap) * inner(x, t)


def gspo_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    def loss(x: float, t: int) -> float:
        same = [j for j in range(len(data.sequence)) if data.sequence[j] == data.sequence[t]]
        mean = sum(data.logprobs[j] - data.old[j] for j in same if data.mask[j]) / len(same)
        s = math.exp(_clip(mean, -20.0, 20.0)) * math.exp(x - data.logprobs[t])
        a = data.advantages[t]
        return -min(s * a, _clip(s, 1 - options.clip_low, 1 + options.clip_high) * a)

    return loss


def cispo_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    def loss(x: float, t: int) -> float:
        fixed = _clip(_ratio(data.logprobs[t], data.old[t]), 1 - options.clip_low, 1 + options.clip_high)
        return -fixed * data.advantages[t] * x

    return loss


def minpro_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    def loss(x: float, t: int) -> float:
        earlier = [j for j in range(t) if data.sequence[j] == data.sequence[t]]
        ratios = [_ratio(data.logprobs[j], data.old[j]) if data.mask[j] else 1.0 for j in earlier]
        product = (min(ratios) if ratios else 1.0) * _ratio(data.logprobs[t], data.old[t])
        return -_clip(product, 1 - options.clip_low, 1 + options.clip_high) * data.advantages[t] * x

    return loss


def topr_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    def loss(x: float, t: int) -> float:
        a = data.advantages[t]
        return -a * x if a > 0 else -min(_ratio(data.logprobs[t], data.old[t]), 1.0) * a * x

    return loss


def kimi_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    return lambda x, t: -data.advantages[t] * x + 0.05 * _clip(x - data.old[t], -20.0, 20.0) ** 2


FORMULAS: dict[str, Callable[[Ragged, LossOptions], TokenFormula]] = {
    "ppo_clip": ppo_formula,
    "decoupled_ppo": decoupled_formula,
    "tis": tis_formula,
    "gspo": gspo_formula,
    "cispo": cispo_formula,
    "minpro": minpro_formula,
    "topr": topr_formula,
    "kimi": kimi_formula,
}
