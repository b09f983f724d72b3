"""Planners against the numbers of their sources, and within their bounds."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.config.round_methods import PLANNERS, planned_members
from rollmesh.curriculum.planners import RolloutPlanner, Round, load_planner, more_members

from .outcomes import group_of


def second_round(planner: RolloutPlanner, solved: int, size: int) -> int:
    """Return the members that a second round launches."""
    found = planner.next(group_of([1.0] * solved + [0.0] * (size - solved)))
    assert found is None or found.needed == size + found.launched
    return 0 if found is None else found.launched


@pytest.mark.parametrize(
    ("rule", "known"), [("et", [24, 11, 3, 1, 0, 0, 0, 0, 0]), ("hw", [56, 24, 8, 3, 0, 0, 0, 0, 0])]
)
def test_dars_gives_hard_prompts_the_second_rounds_of_its_source(rule: str, known: list[int]) -> None:
    planner = load_planner("dars", {"rule": rule})
    assert planner.first(None, 8) == Round(needed=8, launched=8)
    assert [second_round(planner, solved, 8) for solved in range(9)] == known


@given(count=st.integers(1, 600), solved=st.integers(0, 600), rule=st.sampled_from(["et", "hw"]))
def test_dars_rounds_up_the_exact_quotient(count: int, solved: int, rule: str) -> None:
    solved = min(solved, count)
    p = Fraction(solved, count) if solved else Fraction(1, 2 * count)
    divisor = 2 * p if rule == "hw" else 4 * p * (1 - p)
    expected = math.ceil(count * (1 / divisor - 1)) if p < Fraction(1, 2) else 0
    assert more_members(count, solved, rule) == expected


@given(
    size=st.integers(1, 64),
    solved=st.integers(0, 64),
    lost=st.integers(0, 8),
    most=st.integers(2, 80),
    rule=st.sampled_from(["et", "hw"]),
)
def test_dars_closes_after_two_rounds_with_at_most_its_most_members(
    size: int, solved: int, lost: int, most: int, rule: str
) -> None:
    options = {"rule": rule, "most_members": most}
    planner, solved = load_planner("dars", options), min(size, solved)
    outcomes = [1.0] * solved + [0.0] * (size - solved)
    found = planner.next(group_of(outcomes, launched=size + lost))
    if found is not None:
        assert found.launched >= 1
        assert size + lost + found.launched <= planned_members("dars", options, size)[1]
        assert planner.next(group_of([*outcomes, *[0.0] * found.launched], round=1)) is None


def test_dars_closes_a_group_without_a_scored_member() -> None:
    assert load_planner("dars", {}).next(group_of([], launched=8)) is None


def test_quorum_needs_its_share_of_the_group_rounded_up() -> None:
    assert load_planner("quorum", {}).first(None, 512) == Round(needed=487, launched=512)
    assert load_planner("quorum", {}).first(None, 20) == Round(needed=19, launched=20)
    assert load_planner("quorum", {"share": 1}).first(None, 7) == Round(needed=7, launched=7)
    assert load_planner("quorum", {"share": 0.01}).first(None, 8) == Round(needed=1, launched=8)


def test_spare_launches_and_needs_more_than_the_group_size() -> None:
    assert load_planner("spare", {}).first(None, 8) == Round(needed=9, launched=9)
    assert load_planner("spare", {"factor": 2, "extra": 0}).first(None, 8) == Round(needed=16, launched=16)


@given(
    size=st.integers(1, 512),
    plan=st.one_of(
        st.tuples(st.just("single"), st.just({})),
        st.tuples(st.just("dars"), st.fixed_dictionaries({"rule": st.sampled_from(["et", "hw"])})),
        st.tuples(st.just("quorum"), st.fixed_dictionaries({"share": st.floats(0.001, 1)})),
        st.tuples(st.just("spare"), st.fixed_dictionaries({"factor": st.integers(1, 4), "extra": st.integers(1, 9)})),
    ),
)
def test_the_first_round_of_every_planner_is_possible(size: int, plan: tuple[str, dict[str, Any]]) -> None:
    name, options = plan
    first = load_planner(name, options).first(None, size)
    assert 1 <= first.needed <= first.launched <= planned_members(name, options, size)[1]


@pytest.mark.parametrize("name", sorted(PLANNERS.methods.keys() - {"dars"}))
def test_planners_of_one_round_close_every_group(name: str) -> None:
    assert load_planner(name, {}).next(group_of([0.0] * 8)) is None
