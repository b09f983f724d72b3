"""The advantage of the reverse KL, with numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from rollmesh.algorithms.distillation import reverse_kl_advantages

BEHAVIOR = torch.tensor([-1.0, -0.5, -2.0, -3.0, -1.0, -4.0], dtype=torch.float64)
TEACHER = BEHAVIOR + torch.tensor([1.0, -2.0, 0.5, 0.25, -0.5, 3.0], dtype=torch.float64)
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
    got = reverse_kl_advantages(TEACHER, BEHAVIOR, SEQUENCES, 4, coefficient=coefficient, discount=discount)
    assert got.tolist() == pytest.approx(expected, abs=1e-12)


def test_a_token_that_the_teacher_rules_out_has_a_bounded_advantage() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    got = reverse_kl_advantages(BEHAVIOR[:1] - 9000, BEHAVIOR[:1], one, 1, coefficient=0.5, discount=0.0)
    assert got.tolist() == [-10.0]
