"""Old logprobs, KL estimators, the factor on the learning rate, and the advantage of the reverse KL."""

from __future__ import annotations

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
