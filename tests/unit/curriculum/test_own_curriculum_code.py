"""Planners, group shapers and budgets of a user's code: the example, and clear errors for what cannot be one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rollmesh.curriculum.budgets import load_budget
from rollmesh.curriculum.planners import Round, load_planner
from rollmesh.curriculum.shapers import load_shaper
from rollmesh.errors import ConfigError, DataError

from .outcomes import group_of

ROOT = Path(__file__).parents[3]
OWN = """
from rollmesh.curriculum.planners import Round
from rollmesh.curriculum.shapers import Closing

class Planner:
    def __init__(self, needed=1, launched=1):
        self.round = Round(needed=needed, launched=launched)

    def first(self, seen, group_size):
        return self.round

    def next(self, group):
        return self.round

class Words(Planner):
    def first(self, seen, group_size):
        return "eight"

class Fails(Planner):
    def next(self, group):
        return group.difficulty

def fails(group, records):
    return group.difficulty

class OnlyFirst:
    def first(self, seen, group_size):
        return Round(needed=1, launched=1)

class OtherFirst(Planner):
    def first(self, seen):
        return self.round

def doubled(group, records, *, factor=2.0):
    return Closing(shaped_rewards=tuple(factor * member.shaped_reward for member in group.members))

def short(group, records):
    return Closing(shaped_rewards=())

def missing(group, records):
    return Closing(shaped_rewards=tuple(float("nan") for _ in group.members))

def huge(group, records):
    return Closing(shaped_rewards=tuple(1e160 for _ in group.members))

def longer(group, records):
    return Closing(
        shaped_rewards=tuple(0.0 for _ in group.members),
        kept_tokens=tuple(member.token_count + 1 for member in group.members),
    )

def rewards_only(group, records):
    return [0.0 for _ in group.members]

def no_records(group):
    return None

def growing(train_step, *, slope=2):
    return 10 + slope * train_step

def falling(train_step):
    return 3 - train_step

def fraction(train_step):
    return 0.5

constant = 3
"""


@pytest.fixture(autouse=True)
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_curriculum.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_curriculum", raising=False)


def test_the_planner_of_the_examples_asks_for_one_more_answer_until_one_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    planner = load_planner("own_planner:UntilSolved", {"most": 3})
    assert planner.first(None, 4) == Round(needed=4, launched=4)
    assert planner.next(group_of([0.0] * 4)) == Round(needed=5, launched=1)
    assert planner.next(group_of([0.0] * 4 + [1.0], round=1)) is None
    assert planner.next(group_of([0.0] * 6, round=2)) is None


def test_the_planner_of_the_examples_has_at_most_20_lines() -> None:
    source = (ROOT / "examples" / "own_planner.py").read_text().split('"""\n', 1)[1].strip()
    assert len(source.splitlines()) <= 20


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("Planner", {"most": 1}, "_options: own_curriculum:Planner rejects"),
        ("constant", {}, "_options: own_curriculum:constant rejects"),
        ("OnlyFirst", {}, r"needs a method next\(group\)"),
        ("OtherFirst", {}, r"needs a method first\(seen, group_size\)"),
        ("nothing", {}, "has no 'nothing'"),
    ],
)
def test_code_that_cannot_be_a_planner_is_refused_at_startup(name: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"curriculum.planner(: .*)?{problem}"):
        load_planner(f"own_curriculum:{name}", options)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("Words", {}, "first returned str instead of a Round"),
        ("Planner", {"needed": 0}, "first returned needed=0; expected 1 or more"),
        ("Planner", {"launched": 0}, "first returned launched=0; expected 1 or more"),
        ("Planner", {"launched": 1.5}, "first returned launched=1.5; expected 1 or more"),
    ],
)
def test_a_round_without_members_is_refused(name: str, options: dict[str, Any], problem: str) -> None:
    planner = load_planner(f"own_curriculum:{name}", options)
    with pytest.raises(DataError, match=f"curriculum.planner=own_curriculum:{name}: {problem}"):
        planner.first(None, 8)
    if options:
        with pytest.raises(DataError, match="next returned"):
            planner.next(group_of([0.0]))


def test_an_error_of_a_planner_or_a_shaper_names_its_field_and_its_line() -> None:
    with pytest.raises(DataError, match=r"planner=own_curriculum:Fails: raised AttributeError.*own_curriculum.py:\d+"):
        load_planner("own_curriculum:Fails", {}).next(group_of([0.0]))
    with pytest.raises(DataError, match=r"shaper=own_curriculum:fails: raised AttributeError.*own_curriculum.py:\d+"):
        load_shaper("own_curriculum:fails", {})(group_of([0.0]), {})


def test_a_shaper_of_a_users_code_gets_its_options() -> None:
    assert load_shaper("own_curriculum:doubled", {"factor": 3})(group_of([1.0, 0.5]), {}).shaped_rewards == (3.0, 1.5)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("short", "other than 2 values"),
        ("missing", "a reward that is not a finite number"),
        ("huge", "a reward that is not a finite number of at most 1e.09 in size"),
        ("longer", "kept_tokens=101, expected 1 to 100"),
        ("rewards_only", "list instead of a Closing"),
    ],
)
def test_a_closing_that_does_not_fit_its_group_is_refused(name: str, problem: str) -> None:
    shaper = load_shaper(f"own_curriculum:{name}", {})
    with pytest.raises(DataError, match=f"group_shaper=own_curriculum:{name}: returned {problem}.* for group e0-0"):
        shaper(group_of([1.0, 0.0]), {})


def test_code_that_cannot_be_called_as_a_shaper_is_refused_at_startup() -> None:
    with pytest.raises(ConfigError, match="curriculum.group_shaper: own_curriculum:no_records cannot be called"):
        load_shaper("own_curriculum:no_records", {})


def test_a_budget_of_a_users_code_is_capped() -> None:
    budget = load_budget("token_budget", "own_curriculum:growing", {"slope": 5}, most=40, train_steps=100)
    assert budget is not None
    assert [budget(step) for step in (0, 2, 50)] == [10, 20, 40]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("falling", "falling: returned 0; expected an int above 0 .train step 3"),
        ("fraction", "fraction: returned 0.5; expected an int above 0 .train step 0"),
    ],
)
def test_a_budget_that_has_no_value_at_some_step_is_refused_at_startup(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"curriculum.turn_budget=own_curriculum:{problem}"):
        load_budget("turn_budget", f"own_curriculum:{name}", {}, most=9, train_steps=10)
