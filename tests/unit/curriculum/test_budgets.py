"""Budgets against the numbers of their sources, and within their bounds."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.curriculum.budgets import Budget, load_budget

SIRI = {"shortest": 8192, "longest": 16384}


def budget(name: str, options: dict[str, Any], most: int = 10**6) -> Budget:
    found = load_budget("token_budget", name, options, most=most, train_steps=1000)
    assert found is not None
    return found


def test_the_cosine_budget_has_the_numbers_of_siri() -> None:
    known = {0: 16384, 80: 15184, 160: 12288, 320: 8192, 480: 12288, 640: 16384}
    assert {step: budget("cosine", SIRI)(step) for step in known} == known


def test_the_stair_cosine_budget_has_the_numbers_of_siri() -> None:
    known = {0: 16384, 80: 16384, 160: 12288, 240: 8192, 320: 8192, 480: 12288, 560: 16384, 640: 16384}
    assert {step: budget("stair_cosine", SIRI)(step) for step in known} == known


def test_the_stair_budget_compresses_first() -> None:
    stair = budget("stair", SIRI | {"period": 10, "compression": 0.3})
    assert [stair(step) for step in range(11)] == [8192] * 3 + [16384] * 7 + [8192]


def test_the_steps_budget_has_the_stages_of_tti() -> None:
    turns = budget("steps", {"stages": [[0, 10], [2, 20], [4, 30]]})
    assert [turns(step) for step in (0, 1, 2, 3, 4, 100)] == [10, 10, 20, 20, 30, 30]


@pytest.mark.parametrize("name", ["cosine", "stair_cosine"])
@given(low=st.integers(1, 5000), span=st.integers(0, 5000), period=st.integers(2, 700), step=st.integers(0, 5000))
def test_a_periodic_budget_equals_the_formula_of_its_source(
    name: str, low: int, span: int, period: int, step: int
) -> None:
    phase = 2 * math.pi * step / period
    if name == "stair_cosine":
        eighth = 8 * (step % period) / period
        turn = 2 * math.pi * (step % period) / period
        if eighth < 1 or eighth >= 7:
            phase = 0.0
        elif eighth < 3:
            phase = 2 * (turn - math.pi / 4)
        elif eighth < 5:
            phase = math.pi
        else:
            phase = 2 * (turn - 3 * math.pi / 4)
    exact = low + span / 2 + span / 2 * math.cos(phase)
    found = budget(name, {"shortest": low, "longest": low + span, "period": period})(step)
    assert abs(found - exact) <= 0.5 + 1e-6


@pytest.mark.parametrize("name", ["cosine", "stair_cosine", "stair"])
@given(low=st.integers(1, 5000), span=st.integers(0, 5000), period=st.integers(2, 700))
def test_a_periodic_budget_repeats_between_its_bounds_and_reaches_both(
    name: str, low: int, span: int, period: int
) -> None:
    found = budget(name, {"shortest": low, "longest": low + span, "period": 8 * period})
    values = [found(step) for step in range(8 * period + 1)]
    assert (min(values), max(values)) == (low, low + span)
    assert values[0] == values[-1]


@pytest.mark.parametrize("name", ["cosine", "stair_cosine"])
@given(low=st.integers(1, 5000), span=st.integers(0, 5000), half=st.integers(1, 350))
def test_a_wave_falls_for_half_a_period_and_rises_for_the_other(name: str, low: int, span: int, half: int) -> None:
    found = budget(name, {"shortest": low, "longest": low + span, "period": 2 * half})
    values = [found(step) for step in range(2 * half + 1)]
    assert all(before >= after for before, after in pairwise(values[: half + 1]))
    assert all(before <= after for before, after in pairwise(values[half:]))


def test_no_budget_is_above_the_most_of_the_run() -> None:
    assert [budget("cosine", SIRI, most=10_000)(step) for step in (0, 320)] == [10_000, 8192]


def test_the_constant_budget_has_no_function() -> None:
    assert load_budget("token_budget", "constant", {}, most=100, train_steps=10) is None
