"""Samplers, planners, group shapers and budgets of a user: the examples, and clear errors for what cannot be one."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config.curriculum import CurriculumConfig
from rollmesh.curriculum.budgets import Budget, load_budget
from rollmesh.curriculum.planners import Round, load_planner
from rollmesh.curriculum.prompt_tables import Draw
from rollmesh.curriculum.samplers import PromptSampler, load_sampler
from rollmesh.curriculum.shapers import load_shaper
from rollmesh.errors import ConfigError, DataError

from .inputs import group_of, record, tables

EXAMPLES = Path(__file__).parents[3] / "examples"
DRAW = Draw(epoch=0, index=0, seed=0)
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

def gives(draw, prompts, history, train_step, *, result):
    return {}["math"] if result == "error" else result

def growing(train_step, *, slope=2):
    return 10 + slope * train_step

def falling(train_step):
    return 3 - train_step

def fraction(train_step):
    return 0.5
"""


@pytest.fixture(autouse=True)
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "own", raising=False)


def sampler(name: str, **options: Any) -> PromptSampler:
    return load_sampler(CurriculumConfig(sampler=name, sampler_options=options))


def turns(name: str, options: dict[str, Any], most: int = 9) -> Budget:
    return load_budget("turn_budget", name, options, most=most, train_steps=10)


def test_the_planner_of_the_examples_asks_for_one_more_answer_until_one_is_right() -> None:
    planner = load_planner("own_planner:UntilSolved", {"most": 3})
    assert planner.first(None, 4) == Round(needed=4, launched=4)
    assert planner.next(group_of([0.0] * 4)) == Round(needed=5, launched=1)
    assert planner.next(group_of([0.0] * 4 + [1.0], round=1)) is None
    assert planner.next(group_of([0.0] * 6, round=2)) is None


def test_the_sampler_of_the_examples_draws_short_prompts_first() -> None:
    short = sampler("own_sampler:short_first", steps=10)
    table, history = tables([record(0, members) for members in (8, 1, 4)])
    assert [short.choose(DRAW, table, history, step) for step in (0, 1)] == [0, 0]
    assert {short.choose(Draw(epoch=0, index=i, seed=0), table, history, 10) for i in range(50)} == {0, 1, 2}


def test_a_shaper_and_a_budget_get_their_options_and_a_budget_is_capped() -> None:
    assert load_shaper("own:doubled", {"factor": 3})(group_of([1.0, 0.5]), {}).shaped_rewards == (3.0, 1.5)
    assert [turns("own:growing", {"slope": 5}, most=40)(step) for step in (0, 2, 50)] == [10, 20, 40]


@pytest.mark.parametrize(
    ("load", "problem"),
    [
        (lambda: load_planner("own:Planner", {"most": 1}), r"planner_options: own:Planner rejects {'most': 1}"),
        (lambda: load_planner("own:OnlyFirst", {}), r"planner: own:OnlyFirst needs a method next\(group\)"),
        (lambda: load_planner("own:OtherFirst", {}), r"planner: own:OtherFirst needs a method first\(seen, g"),
        (lambda: turns("own:falling", {}), "turn_budget=own:falling: returned 0; .* above 0 .train step 3"),
        (lambda: turns("own:fraction", {}), "turn_budget=own:fraction: returned 0.5; .*train step 0"),
    ],
)
def test_code_that_cannot_be_what_it_is_named_for_is_refused_at_startup(load: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^curriculum.{problem}"):
        load()


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("Words", {}, "first returned str instead of a Round"),
        ("Planner", {"needed": 0}, "first returned needed=0; expected 1 or more"),
        ("Planner", {"launched": 1.5}, "first returned launched=1.5; expected 1 or more"),
    ],
)
def test_a_round_without_members_is_refused(name: str, options: dict[str, Any], problem: str) -> None:
    planner = load_planner(f"own:{name}", options)
    with pytest.raises(DataError, match=f"curriculum.planner=own:{name}: {problem}"):
        planner.first(None, 8)
    if options:
        with pytest.raises(DataError, match="next returned"):
            planner.next(group_of([0.0]))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("short", "returned other than 2 values.* for group e0-0"),
        ("missing", "returned a reward that is not a finite number"),
        ("huge", "returned a reward that is not a finite number of at most 1e.09 in size"),
        ("longer", "returned kept_tokens=101, expected 1 to 100"),
        ("rewards_only", "returned list instead of a Closing"),
        ("fails", r"raised AttributeError.*own.py:\d+"),
    ],
)
def test_a_closing_that_does_not_fit_its_group_is_refused(name: str, problem: str) -> None:
    with pytest.raises(DataError, match=f"curriculum.group_shaper=own:{name}: {problem}"):
        load_shaper(f"own:{name}", {})(group_of([1.0, 0.0]), {})


def test_an_error_of_a_planner_names_its_field_and_its_line() -> None:
    with pytest.raises(DataError, match=r"curriculum.planner=own:Fails: raised AttributeError.*own.py:\d+"):
        load_planner("own:Fails", {}).next(group_of([0.0]))


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (3, " named row 3; the data has 2 rows"),
        (-1, " named row -1"),
        (None, ": returned None instead of the number of a row"),
        (True, ": returned True"),
        ("error", ": raised KeyError: 'math'"),
    ],
)
def test_a_result_that_is_no_row_is_an_error_that_names_it(result: Any, problem: str) -> None:
    table, history = tables([None, None])
    with pytest.raises(DataError, match=f"curriculum.sampler=own:gives{problem}"):
        sampler("own:gives", result=result).choose(DRAW, table, history, 0)
