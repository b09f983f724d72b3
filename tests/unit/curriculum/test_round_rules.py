"""Decisions at the end of rounds: results of planners and shapers are checked, and bounded by the most members."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rollmesh.curriculum.planners import Round, RoundRules
from rollmesh.curriculum.shapers import unshaped
from rollmesh.errors import DataError
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord

from ...kit.run_files import run_config
from .inputs import group_of


@dataclass
class Planner:
    begins: Callable[[], Any]
    continues: Callable[[GroupOutcome], Any]

    def first(self, seen: PromptRecord | None, group_size: int) -> Round:
        found: Round = self.begins()
        return found

    def next(self, group: GroupOutcome) -> Round | None:
        found: Round | None = self.continues(group)
        return found


def rules(first: Any = None, following: Any = None, **changes: Any) -> RoundRules:
    found = RoundRules(
        planner=Planner(lambda: first, following if callable(following) else lambda _: following),
        shaper=unshaped,
        planner_name="mine:planner",
        group_size=4,
        spare_members=0,
        most_members=8,
    )
    return replace(found, **changes)


def group(scored: int = 4, launched: int = 4) -> GroupOutcome:
    return group_of([i / 2 for i in range(scored)], launched=launched)


def test_a_run_without_planner_and_group_shaper_has_no_rules() -> None:
    assert RoundRules.from_config(run_config(), group_size=8, spare_members=0) is None


def test_a_run_with_a_group_shaper_alone_has_one_round_of_the_members_of_its_schedule() -> None:
    found = RoundRules.from_config(
        run_config("curriculum.group_shaper=dot curriculum.group_shaper_options.alpha=1"), group_size=8, spare_members=2
    )
    assert found is not None
    assert found.first(None) == Round(needed=8, launched=10)
    closing = found.decide(group(), {}).closing
    assert closing is not None and closing.shaped_rewards == (0.0, 0.5, 1.0, 1.5)


def test_a_planner_that_never_closes_is_bounded_by_the_most_members() -> None:
    endless = rules(following=lambda g: Round(needed=len(g.members) + 3, launched=3))
    first = endless.decide(group(), {})
    assert (first.extension, first.is_bounded) == (Round(needed=7, launched=3), False)
    last = endless.decide(group(7, 7), {})
    assert (last.extension, last.is_bounded) == (Round(needed=8, launched=1), True)
    end = endless.decide(group(8, 8), {})
    assert (end.extension, end.is_bounded) == (None, True)
    assert end.closing is not None


def test_a_round_needs_no_more_than_the_members_that_can_be_scored() -> None:
    following = Round(needed=8, launched=4)
    assert rules(following=following).decide(group(scored=3), {}).extension == Round(needed=7, launched=4)


@pytest.mark.parametrize(
    "first",
    [
        Round(needed=0, launched=0),
        Round(needed=1, launched=4),
        Round(needed=4, launched=3),
        Round(needed=4, launched=9),
    ],
)
def test_an_impossible_first_round_names_the_planner_and_the_bounds(first: Round) -> None:
    with pytest.raises(DataError, match=r"curriculum\.planner=mine:planner.*2 <= needed <= launched <= 8"):
        rules(first).first(None)


@pytest.mark.parametrize("following", [Round(needed=6, launched=0), Round(needed=4, launched=4)])
def test_a_next_round_that_asks_for_nothing_is_an_error(following: Round) -> None:
    with pytest.raises(DataError, match=r"mine:planner: after round 0 of group e0-0 .* None to close"):
        rules(following=following).decide(group(), {})


@pytest.mark.parametrize("plan", [{"share": math.nan}, {"hint": object()}])
def test_a_plan_that_is_not_json_is_an_error(plan: dict[str, Any]) -> None:
    asked = Round(needed=4, launched=4, plan=plan)
    with pytest.raises(DataError, match=r"curriculum\.planner=mine:planner: the plan .* is not JSON"):
        rules(asked).encode_plan(asked)
