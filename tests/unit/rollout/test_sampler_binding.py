"""Samplers of the run file: options, a user's function, and errors that name what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.config.curriculum import CurriculumConfig
from rollmesh.curriculum.prompt_tables import Draw, History, PromptTable
from rollmesh.curriculum.samplers import load_sampler
from rollmesh.errors import ConfigError, DataError

from ..curriculum.tables import record, tables

EXAMPLES = Path(__file__).parents[3] / "examples"
DRAW = Draw(epoch=0, index=0, seed=0)


def takes_three(draw: Draw, prompts: PromptTable, history: History) -> int:
    return 0


def gives(*_: object, result: object) -> object:
    return {}["math"] if result == "error" else result


def test_the_default_order_needs_no_sampler() -> None:
    assert load_sampler(CurriculumConfig()) is None


def test_a_built_in_sampler_gets_its_options_and_their_defaults() -> None:
    bound = load_sampler(CurriculumConfig(sampler="difficulty", sampler_options={"unseen": 0.0}))
    assert bound is not None
    table, history = tables([record(4, 8), None])
    assert bound.choose(DRAW, table, history, 0) == 0


def test_the_example_of_an_own_sampler_runs_and_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    config = CurriculumConfig(sampler="own_sampler:short_first", sampler_options={"steps": 10})
    bound = load_sampler(config)
    assert bound is not None
    table, history = tables([record(0, members) for members in (8, 1, 4)])
    assert [bound.choose(DRAW, table, history, step) for step in (0, 1)] == [0, 0]
    assert {bound.choose(Draw(epoch=0, index=i, seed=0), table, history, 10) for i in range(50)} == {0, 1, 2}
    lines = (EXAMPLES / "own_sampler.py").read_text().split('"""\n', 1)[1].strip().splitlines()
    assert len([line for line in lines if line]) <= 20


@pytest.mark.parametrize(
    ("sampler", "options", "message"),
    [
        ("band", {"tau": 1}, "sampler_options.tau: band has no such option; its options: unseen, low, high"),
        ("band", {"target": 0.5}, r"target belongs to difficulty"),
        ("band", {"low": 0.9}, "low=0.9 must be below high=0.75"),
        ("difficulty", {"temperature": 0}, "temperature=0"),
        ("domain_mix", {"targets": {"a": 0.5}}, "the shares sum to 0.5"),
        ("nothing", {}, "expected order, domain_mix"),
    ],
)
def test_wrong_options_are_refused(sampler: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CurriculumConfig(sampler=sampler, sampler_options=options)


@pytest.mark.parametrize("target", ["takes_three", "EXAMPLES", "missing"])
def test_a_function_that_cannot_be_called_is_refused_at_the_start(target: str) -> None:
    with pytest.raises(ConfigError, match=r"curriculum\.sampler"):
        load_sampler(CurriculumConfig(sampler=f"{__name__}:{target}"))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (3, "named row 3; the data has 2 rows"),
        (-1, "named row -1"),
        (None, "returned None instead of the number of a row"),
        (0.5, "returned 0.5"),
        (True, "returned True"),
        ("error", "raised KeyError: 'math'"),
    ],
)
def test_a_result_that_is_no_row_is_an_error_that_names_it(result: Any, message: str) -> None:
    table, history = tables([None, None])
    bound = load_sampler(CurriculumConfig(sampler=f"{__name__}:gives", sampler_options={"result": result}))
    assert bound is not None
    with pytest.raises(DataError, match=f"curriculum.sampler={__name__}:gives:? {message}"):
        bound.choose(DRAW, table, history, 0)
