"""Samplers: known answers, shares of the draws, and properties over random histories."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.config.sampler_methods import SAMPLERS
from rollmesh.curriculum.prompt_tables import Draw, History, PromptTable
from rollmesh.curriculum.samplers import domain_weights, frontier_weights, target_weights
from rollmesh.errors import DataError
from rollmesh.prompt_history import PromptRecord

from .inputs import record, tables

RATES = np.array([0.1, 0.4, 0.5, 0.6, 0.9])
APRIEL = {"math": 0.35, "code": 0.25, "logic": 0.15, "if": 0.15, "fn": 0.10}


def sampler(name: str, **options: object) -> Callable[..., int]:
    return SAMPLERS.bind(name, options)


def draws(choose: Callable[..., int], table: PromptTable, history: History, count: int = 2000) -> Counter[int]:
    return Counter(choose(Draw(epoch=0, index=i, seed=3), table, history, 0) for i in range(count))


def test_domain_mix_has_the_probabilities_of_the_known_answer() -> None:
    weights = domain_weights(APRIEL, dict.fromkeys(APRIEL, 200), 50)
    rounded = {name: round(weight, 4) for name, weight in weights.items()}
    assert rounded == {"math": 0.5104, "code": 0.2604, "logic": 0.0937, "if": 0.0937, "fn": 0.0417}


@pytest.mark.parametrize(
    ("temperature", "known"),
    [(1e-3, [0.0, 0.0, 1.0, 0.0, 0.0]), (0.1, [0.0103, 0.2076, 0.5642, 0.2076, 0.0103])],
)
def test_difficulty_has_the_probabilities_of_the_known_answers(temperature: float, known: list[float]) -> None:
    assert np.round(target_weights(RATES, 0.5, temperature), 4).tolist() == known


def test_a_domain_without_completed_trajectories_gets_ten_times_its_share() -> None:
    weights = domain_weights({"a": 0.5, "b": 0.5}, {"a": 100, "b": 0}, 50)
    assert weights["b"] / weights["a"] == pytest.approx(10 / 0.5)
    assert domain_weights({"a": 0.2, "b": 0.8}, {"a": 49, "b": 0}, 50) == {"a": 0.2, "b": 0.8}


def test_domain_mix_draws_the_prompts_of_a_domain_in_turn() -> None:
    choose = sampler("domain_mix", targets={"a": 0.25, "b": 0.75})
    table, history = tables([record(groups=2), None, None, record()], domains=["a", "a", "b", "b"], in_progress=[2])
    drawn = draws(choose, table, history)
    assert drawn[0] == 0, "row 1 was drawn less often"
    assert drawn[1] == pytest.approx(500, abs=80) and drawn[2] == pytest.approx(drawn[3], abs=120)


def test_the_weights_of_a_mixture_are_the_targets_unless_the_run_file_names_others() -> None:
    table, history = tables([None, None], domains=["a", "b"], weights={"a": 0.9, "b": 0.1})
    assert draws(sampler("domain_mix"), table, history)[0] == pytest.approx(1800, abs=80)
    assert draws(sampler("domain_mix", targets={"a": 0.1, "b": 0.9}), table, history)[0] == pytest.approx(200, abs=80)


@pytest.mark.parametrize(
    ("domains", "targets", "message"),
    [
        (["", ""], {}, "needs domains"),
        (["a", "b"], {}, "name a share for every domain"),
        (["a", "b"], {"a": 0.5, "c": 0.5}, r"targets\.c: no row has this domain; the data has a, b"),
    ],
)
def test_targets_that_the_data_does_not_have_are_refused(domains: list[str], targets: Any, message: str) -> None:
    table, history = tables([None, None], domains=domains)
    with pytest.raises(DataError, match=message):
        sampler("domain_mix", targets=targets)(Draw(epoch=0, index=0, seed=0), table, history, 0)


def test_difficulty_draws_by_its_weights_among_seen_prompts() -> None:
    table, history = tables([record(round(10 * rate), 10) for rate in RATES])
    drawn = draws(sampler("difficulty"), table, history, 4000)
    assert [drawn[row] / 4000 for row in range(5)] == pytest.approx([0.0103, 0.2076, 0.5642, 0.2076, 0.0103], abs=0.025)


def test_unsolved_prompts_come_in_proportion_to_their_failures() -> None:
    table, history = tables([record(0, 4), record(2, 4), record(4, 4)])
    drawn = draws(sampler("unsolved"), table, history)
    assert drawn[0] / drawn[1] == pytest.approx(2, abs=0.3) and drawn[2] == 0


def test_band_draws_between_the_quartiles_of_the_mean_rewards() -> None:
    table, history = tables([record(0, 8, rewards=float(reward)) for reward in range(9)])
    assert set(draws(sampler("band"), table, history)) == {2, 3, 4, 5, 6}


def test_frontier_draws_next_to_the_boundary_of_the_harder_half() -> None:
    table, history = tables([record(0, 8, rewards=float(reward)) for reward in range(10)])
    assert set(draws(sampler("frontier", candidates=4), table, history)) == {3, 4, 5, 6}


def test_frontier_leaves_out_what_was_used_while_enough_others_remain() -> None:
    means, groups = np.arange(6.0), np.array([1, 1, 2, 2, 1, 1])
    assert np.flatnonzero(frontier_weights(means, groups, 0.5, 2)).tolist() == [1, 4]
    assert np.flatnonzero(frontier_weights(means, groups, 0.5, 5)).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["difficulty", "band", "unsolved", "frontier"])
def test_unseen_prompts_get_their_share_while_there_are_any(name: str) -> None:
    table, history = tables([record(2, 4), None, record(2, 4), None])
    drawn = draws(sampler(name, unseen=0.3), table, history)
    assert drawn[1] + drawn[3] == pytest.approx(600, abs=90)
    assert set(draws(sampler(name, unseen=1.0), table, history)) == {1, 3}
    assert set(draws(sampler(name, unseen=0.0), table, history)) == {0, 2}


@pytest.mark.parametrize("name", ["difficulty", "band", "unsolved", "frontier"])
def test_a_prompt_without_a_score_waits_for_the_others(name: str) -> None:
    scored: list[PromptRecord | None] = [record(2, 4)] * 4
    table, history = tables([*scored, record(groups=5)])
    assert set(draws(sampler(name, unseen=1.0), table, history)) == {0, 1, 2, 3}
    table, history = tables([*scored, record(groups=5), None])
    assert set(draws(sampler(name, unseen=1.0), table, history)) == {5}, "row 5 was never drawn"
    table, history = tables([*([record(2, 4, groups=5)] * 4), record(groups=5)])
    assert set(draws(sampler(name, unseen=1.0), table, history)) == {4}, "the others were drawn as often"


def test_a_solved_prompt_holds_back_no_prompt_without_a_score() -> None:
    table, history = tables([record(4, 4), record(2, 4, groups=5), record(groups=3)])
    assert set(draws(sampler("unsolved", unseen=1.0), table, history)) == {2}


@st.composite
def histories(draw: st.DrawFn) -> tuple[PromptTable, History]:
    rows = draw(st.integers(1, 12))
    records = [
        draw(st.none() | st.builds(lambda s, m: record(min(s, m), m), st.integers(0, 8), st.integers(0, 8)))
        for _ in range(rows)
    ]
    busy = draw(st.lists(st.integers(0, rows - 1), max_size=2 * rows))
    endless = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    domains = draw(st.lists(st.sampled_from(["a", "b"]), min_size=rows, max_size=rows))
    return tables(records, in_progress=busy, endless=endless, domains=domains)


@given(histories(), st.sampled_from(["difficulty", "band", "unsolved", "frontier", "domain_mix"]), st.integers(0, 99))
def test_a_sampler_names_a_row_and_repeats_itself_and_changes_nothing(
    found: tuple[PromptTable, History], name: str, index: int
) -> None:
    table, history = found
    share = 1 / len(table.domains)
    options = {"targets": dict.fromkeys(table.domains, share)} if name == "domain_mix" else {}
    before = [column.copy() for column in (history.groups, history.members, history.in_progress)]
    choose, draw = sampler(name, **options), Draw(epoch=1, index=index, seed=5)
    row = choose(draw, table, history, 3)
    assert 0 <= row < table.row_count
    assert row == choose(draw, table, history, 3)
    after = (history.groups, history.members, history.in_progress)
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    free = table.endless | (history.in_progress == 0)
    if name != "domain_mix" and free.any():
        assert free[row], "a prompt has one unfinished group at a time while others have none"
