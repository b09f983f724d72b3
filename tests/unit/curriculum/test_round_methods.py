"""Rounds: planners, group shapers and budgets against the numbers of their sources, and checks of their results."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.config.round_methods import PLANNERS, largest_z_score, planned_members
from rollmesh.curriculum.budgets import Budget, load_budget
from rollmesh.curriculum.planners import RolloutPlanner, Round, RoundRules, load_planner, more_members
from rollmesh.curriculum.shapers import load_shaper, longest_kept, overlong_penalty, unshaped
from rollmesh.errors import DataError
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord

from ...kit.run_files import run_config
from .inputs import group_of


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


DAP = {"longest_tokens": 16384, "buffer_tokens": 2048}


def test_dap_penalises_long_answers_to_hard_prompts_less() -> None:
    group = group_of([1, 0, 0, 0], [15360, 15360, 16384, 100], truncated=[False, False, True, False])
    assert load_shaper("dap", DAP)(group, {}).shaped_rewards == (1 - 0.125, -0.5, -1.0, 0.0)


def test_without_a_shaper_rewards_stay_as_they_are() -> None:
    closing = load_shaper("none", {})(group_of([1.0, 0.0], shaping=-0.25), {})
    assert (closing.shaped_rewards, closing.kept_tokens) == ((0.75, -0.25), None)


def test_dap_counts_a_right_answer_cut_off_at_the_longest_length_in_full() -> None:
    group = group_of([1, 0, 0, 0], [16384, 10, 10, 10], truncated=[True, False, False, False])
    assert load_shaper("dap", DAP)(group, {}).shaped_rewards[0] == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_dap_equals_the_formula_of_its_source(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, longest, buffer = int(rng.integers(1, 17)), 500, int(rng.integers(1, 500))
    gamma, failure = float(rng.uniform(0, 3)), float(rng.uniform(0, 2))
    outcomes, lengths = rng.integers(0, 2, count).astype(float).tolist(), rng.integers(1, 501, count).tolist()
    cut = [length == longest and bool(rng.integers(0, 2)) for length in lengths]
    options = {"longest_tokens": longest, "buffer_tokens": buffer, "gamma": gamma, "failure_scale": failure}
    shaped = load_shaper("dap", options)(group_of(outcomes, lengths, truncated=cut, shaping=0.25), {}).shaped_rewards
    rate = sum(outcomes) / count
    for got, outcome, length, is_cut in zip(shaped, outcomes, lengths, cut, strict=True):
        penalty = ((longest - buffer) - length) / buffer if length > longest - buffer else 0.0
        scale = 1.0 if is_cut else rate**gamma if outcome else failure
        assert got == pytest.approx(outcome + 0.25 + scale * penalty, abs=1e-12)


def test_dot_truncates_the_outlier_of_a_group_that_is_all_right() -> None:
    lengths = [1000] * 31 + [9000]
    assert longest_kept(lengths, 3.0) == 5492
    closing = load_shaper("dot", {})(group_of([1.0] * 32, lengths, shaping=0.5), {})
    assert closing.kept_tokens == (*[1000] * 31, 5492)
    assert closing.shaped_rewards == (*[1.5] * 31, 0.5)


def test_the_largest_z_score_of_a_group_is_that_of_one_outlier() -> None:
    known = {4: 1.5, 8: 2.475, 10: 2.846, 11: 3.015, 16: 3.75, 32: 5.48}
    assert {count: round(largest_z_score(count), 3) for count in known} == known
    for count in known:
        lengths = [0] * (count - 1) + [10**6]
        mean, spread = float(np.mean(lengths)), float(np.std(lengths, ddof=1))
        assert (10**6 - mean) / spread == pytest.approx(largest_z_score(count))


@pytest.mark.parametrize(
    ("outcomes", "lengths"),
    [
        ([1.0] * 31 + [0.0], [1000] * 31 + [9000]),
        ([1.0] * 32, [1000] * 32),
        ([1.0] * 32, [10] * 31 + [60]),
        ([1.0], [9000]),
        ([], []),
    ],
    ids=["one wrong", "equal lengths", "little excess", "one member", "no member"],
)
def test_dot_leaves_other_groups_as_they_are(outcomes: list[float], lengths: list[int]) -> None:
    closing = load_shaper("dot", {})(group_of(outcomes, lengths), {})
    assert (closing.shaped_rewards, closing.kept_tokens) == (tuple(outcomes), None)


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=2, max_size=40),
    alpha=st.floats(0.1, 4),
    least=st.integers(1, 100),
    right=st.booleans(),
)
def test_dot_keeps_every_answer_up_to_the_limit(lengths: list[int], alpha: float, least: int, right: bool) -> None:
    outcomes = [1.0] * (len(lengths) - 1) + [float(right)]
    options = {"alpha": alpha, "least_excess": least, "truncated_reward": -0.5}
    closing = load_shaper("dot", options)(group_of(outcomes, lengths), {})
    limit = math.floor(np.mean(lengths) + alpha * np.std(lengths, ddof=1) + 1e-7)
    if closing.kept_tokens is None:
        assert closing.shaped_rewards == tuple(outcomes)
        assert not right or max(lengths) - limit <= least
        return
    assert right
    for length, kept, reward in zip(lengths, closing.kept_tokens, closing.shaped_rewards, strict=True):
        assert 1 <= kept <= length
        assert reward == (1.0 if kept == length else -0.5)
        assert kept == length or (length - kept >= least and abs(kept - limit) <= 1)


SIRI = {"shortest": 8192, "longest": 16384}


def budget(name: str, options: dict[str, Any], most: int = 10**6) -> Budget:
    return load_budget("token_budget", name, options, most=most, train_steps=1000)


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


def test_overlong_penalty_falls_linearly_inside_the_buffer_only() -> None:
    # Budget 16384, buffer 2048: a wrong answer of 15360 tokens, and one at the cap.
    assert [overlong_penalty(n, 16384, 2048) for n in (15360, 16384)] == [-0.5, -1.0]
    values = [overlong_penalty(n, 100, 20) for n in (0, 80, 81, 90, 100, 150)]
    assert values == pytest.approx([0, 0, -0.05, -0.5, -1, -1])
    assert overlong_penalty(10**6, 100, 0) == 0.0


@pytest.mark.parametrize(("budget", "buffer"), [(0, 0), (10, -1), (10, 11)])
def test_overlong_penalty_refuses_impossible_buffers(budget: int, buffer: int) -> None:
    with pytest.raises(ValueError, match="overlong_penalty"):
        overlong_penalty(5, budget, buffer)


@dataclass
class Planner:
    begins: Callable[[], Any]
    continues: Callable[[GroupOutcome], Any]

    def first(self, seen: PromptRecord | None, group_size: int) -> Round:
        return self.begins()

    def next(self, group: GroupOutcome) -> Round | None:
        return self.continues(group)


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
