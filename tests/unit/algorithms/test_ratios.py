"""Old logprobs, KL estimators, the factor on the rate, distillation, and token masks by their definitions."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.algorithms.ratios import (
    OldLogprobs,
    choose_old_logprobs,
    ess_scale,
    k1,
    k3,
    loglinear_share,
    reverse_kl_advantages,
)
from rollmesh.algorithms.token_masks import MaskInput, ratio_bounds
from rollmesh.config.loss_methods import MASKS
from rollmesh.config.old_logprob_methods import OLD_LOGPROBS

BEHAVIOR = torch.tensor([-1.0, -2.0, -3.0, 0.0])
TRAINER = torch.tensor([-1.5, -2.5, -3.5, -9.0])
POLICY = torch.tensor([True, True, True, False])


def choose(name: str, available: list[bool], pure: list[bool]) -> OldLogprobs:
    return choose_old_logprobs(
        OLD_LOGPROBS[name],
        behavior=BEHAVIOR,
        trainer=TRAINER,
        available=torch.tensor(available),
        pure=torch.tensor(pure),
        policy=POLICY,
    )


def test_sampler_takes_the_behavior_logprobs_everywhere() -> None:
    old = choose("sampler", [True] * 4, [True] * 4)
    assert torch.equal(old.values, BEHAVIOR) and not old.from_trainer.any() and old.fallbacks == {}


def test_current_takes_the_trainer_even_for_mixed_caches() -> None:
    old = choose("current", [True] * 4, [False] * 4)
    assert old.values.tolist() == [-1.5, -2.5, -3.5, 0.0] and old.fallbacks == {}


def test_exact_sources_fall_back_for_mixed_caches_and_count_them() -> None:
    for name in ("recompute", "stage_end", "snapshot"):
        old = choose(name, [True] * 4, [True, False, True, True])
        assert old.values.tolist() == [-1.5, -2.0, -3.5, 0.0], name
        assert old.fallbacks == {"mixed_cache": 1}, name


def test_a_missing_value_falls_back_with_the_reason_of_its_source() -> None:
    for name, reason in (("stage_end", "stage_not_recorded"), ("snapshot", "version_not_kept")):
        old = choose(name, [True, False, False, False], [True, True, False, False])
        assert old.values.tolist() == [-1.5, -2.0, -3.0, 0.0], name
        assert old.fallbacks == {"mixed_cache": 1, reason: 1}, name


def test_loglinear_moves_from_the_behavior_policy_to_the_policy_with_the_age_of_a_token() -> None:
    share = loglinear_share(torch.tensor([0, 1, 3], dtype=torch.int32))
    assert share.tolist() == [0.0, 0.5, 0.75] and share.dtype is torch.float64
    old = choose("loglinear", [False] * 4, [False] * 4)
    assert torch.equal(old.values, BEHAVIOR) and old.fallbacks == {}


def test_kl_estimators_average_to_the_exact_divergence() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(7).double().log_softmax(0), torch.randn(7).double().log_softmax(0)
    exact = float((p.exp() * (p - q)).sum())
    assert float((p.exp() * k1(p, q)).sum()) == pytest.approx(exact, abs=1e-12)
    assert float((p.exp() * k3(p, q)).sum()) == pytest.approx(exact, abs=1e-12)
    assert (k3(p, q) >= 0).all()


def test_the_factor_is_the_root_or_the_share_itself_and_never_above_one() -> None:
    assert ess_scale(0.25, base=1.0, rule="sqrt") == 0.5
    assert ess_scale(0.25, base=0.5, rule="linear") == 0.5
    assert ess_scale(0.1, base=0.4, rule="sqrt") == pytest.approx(0.5)
    assert ess_scale(0.9, base=0.55, rule="sqrt") == ess_scale(0.9, base=0.55, rule="linear") == 1.0


SAMPLED = torch.tensor([-1.0, -0.5, -2.0, -3.0, -1.0, -4.0], dtype=torch.float64)
TEACHER = SAMPLED + torch.tensor([1.0, -2.0, 0.5, 0.25, -0.5, 3.0], dtype=torch.float64)
SEQUENCES = torch.tensor([0, 0, 0, 2, 3, 3])
"""Four sequences; the second one has no token."""


@pytest.mark.parametrize(
    ("coefficient", "discount", "expected"),
    [
        (1.0, 0.0, [1.0, -2.0, 0.5, 0.25, -0.5, 3.0]),
        # 0.5 * 0.5 = 0.25 reaches the second token, and half of -2 + 0.25 the first.
        (1.0, 0.5, [0.125, -1.75, 0.5, 0.25, 1.0, 3.0]),
        (2.0, 1.0, [-1.0, -3.0, 1.0, 0.5, 5.0, 6.0]),
    ],
)
def test_a_token_has_the_log_ratios_from_itself_on(coefficient: float, discount: float, expected: list[float]) -> None:
    got = reverse_kl_advantages(TEACHER, SAMPLED, SEQUENCES, 4, coefficient=coefficient, discount=discount)
    assert got.tolist() == pytest.approx(expected, abs=1e-12)


def test_a_token_that_the_teacher_rules_out_has_a_bounded_advantage() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    got = reverse_kl_advantages(SAMPLED[:1] - 9000, SAMPLED[:1], one, 1, coefficient=0.5, discount=0.0)
    assert got.tolist() == [-10.0]


def random_input(seed: int, spread: float | None = None) -> MaskInput:
    """1 to 6 sequences of 1 to 12 tokens; some tokens are already out of the loss."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    sequence = np.repeat(np.arange(count), rng.integers(1, 13, count))
    n = len(sequence)
    behavior = -rng.exponential(1.0, n)
    width = float(rng.choice([0.001, 0.3, 3.0])) if spread is None else spread
    return MaskInput(
        old_logprobs=torch.from_numpy(behavior + rng.normal(0, width, n)),
        behavior_logprobs=torch.from_numpy(behavior),
        policy_logprobs=torch.from_numpy(np.where(rng.random(n) < 0.5, -1e-3, -1.0)),
        entropy=torch.from_numpy(rng.exponential(0.2, n)),
        advantages=torch.from_numpy(rng.normal(0, 1, count)[sequence]),
        solved=torch.from_numpy((rng.random(count) < 0.6)[sequence]),
        mask=torch.from_numpy(rng.random(n) < 0.8),
        sequence_index=torch.from_numpy(sequence),
        sequence_count=count,
    )


def logs(data: MaskInput) -> list[float]:
    """log(pi_old / mu), 0 for a token out of the loss."""
    pairs = zip(data.old_logprobs.tolist(), data.behavior_logprobs.tolist(), data.mask.tolist(), strict=True)
    return [min(max(old - mu, -20.0), 20.0) if inside else 0.0 for old, mu, inside in pairs]


def same(data: MaskInput, t: int) -> list[int]:
    """The tokens of the sequence of token t."""
    index = data.sequence_index.tolist()
    return [j for j in range(len(index)) if index[j] == index[t]]


def icepop(data: MaskInput, t: int) -> bool:
    return 0.5 <= math.exp(logs(data)[t]) <= 5.0


def ratio(data: MaskInput, t: int) -> bool:
    found = [logs(data)[j] for j in same(data, t)]
    total = min(max(sum(found), -20.0), 20.0)
    return (
        0.5 <= math.exp(logs(data)[t]) <= 2.0
        and 0.1 <= math.exp(total) <= 10.0
        and 0.8 <= math.exp(statistics.fmean(found)) <= 1.25
        and min(math.exp(x) for x in found) >= 1e-2
    )


def opsm(data: MaskInput, t: int) -> bool:
    divergence = -statistics.fmean(logs(data)[j] for j in same(data, t))
    return not (float(data.advantages[t]) < 0 and divergence > 1e-4)


def m2po(data: MaskInput, t: int) -> bool:
    inside = [j for j, kept in enumerate(data.mask.tolist()) if kept]
    order = sorted(inside, key=lambda j: logs(data)[j] ** 2)
    while order and statistics.fmean(logs(data)[j] ** 2 for j in order) > 0.04:
        order.pop()
    return t in order or t not in inside


def mastered(data: MaskInput, t: int) -> bool:
    assert data.entropy is not None and data.policy_logprobs is not None
    calm = statistics.fmean(float(data.entropy[j]) for j in same(data, t)) < 0.2
    return not (bool(data.solved[t]) and calm and math.exp(float(data.policy_logprobs[t])) >= 0.99)


OPTIONS: dict[str, dict[str, Any]] = {
    "icepop": {"low": 0.5, "high": 5.0},
    "ratio": {"token": (0.5, 2.0), "sequence": (0.1, 10.0), "geometric": (0.8, 1.25), "veto": 1e-2},
    "opsm": {"delta": 1e-4},
    "m2po": {"threshold": 0.04},
    "mastered": {"entropy": 0.2, "probability": 0.99},
}
FORMULAS: dict[str, Callable[[MaskInput, int], bool]] = {
    "icepop": icepop,
    "ratio": ratio,
    "opsm": opsm,
    "m2po": m2po,
    "mastered": mastered,
}


@pytest.mark.parametrize("name", sorted(MASKS.methods))
def test_a_mask_equals_its_definition_on_random_ragged_inputs(name: str) -> None:
    masked = kept = 0
    for seed in range(40):
        data = random_input(seed)
        got = MASKS.bind(name, OPTIONS[name])(data)
        assert got.dtype is torch.bool
        assert got.tolist() == [FORMULAS[name](data, t) for t in range(len(got))]
        masked += int((~got & data.mask).sum())
        kept += int((got & data.mask).sum())
    assert masked > 0 and kept > 0


@pytest.mark.parametrize("option", ["token", "sequence", "geometric", "veto"])
def test_each_bound_of_the_ratio_mask_works_alone(option: str) -> None:
    nothing: dict[str, Any] = dict.fromkeys(OPTIONS["ratio"])
    data = random_input(2, spread=3.0)
    assert ratio_bounds(data, **nothing).all()
    alone = nothing | {option: OPTIONS["ratio"][option]}
    assert not ratio_bounds(data, **alone).all()
