"""Drafts of simulated engines: lengths, budgets, and what a token costs by running calls."""

import math
import random

import pytest

from rollmesh.errors import ConfigError
from rollmesh.sim.arms import arms_of, simulate_at_cost
from rollmesh.sim.decode_curve import EngineCosts
from rollmesh.sim.simulated_drafts import DraftRule, SimulatedDrafts, accepted, das_budget

LENGTHS = (3000.0, 1000.0, 300.0)


def costs(base: list[float], slope: float = 0.0, prefill: float = 0.0) -> EngineCosts:
    return EngineCosts(base=tuple(base), slope=(slope,) * len(base), prefill_seconds_per_token=prefill)


def drafts(text: str) -> SimulatedDrafts:
    return SimulatedDrafts.parse(text)


def test_acceptance_is_geometric_by_position():
    assert accepted(0.5, 3) == 0.5 + 0.25 + 0.125
    assert accepted(0.9, 1) == pytest.approx(0.9) and accepted(0.0, 8) == 0.0


@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.9])
def test_rhyme_s_lengths_bring_what_a_loop_that_doubles_and_halves_them_brings(acceptance):
    numbers, length, steps, drafted, kept = random.Random(3), 2, 200_000, 0, 0
    for _ in range(steps):
        good = next((i for i in range(length) if numbers.random() >= acceptance), length)
        drafted, kept = drafted + length, kept + good
        length = min(16, 2 * length) if good == length else max(2, length // 2)
    flat = costs([1.0] * 101)  # a step of 1 s whatever it computes
    found = drafts(f"rhyme:acceptance={acceptance}").costs(flat, 4, LENGTHS)
    assert 1 / found.base[4] == pytest.approx(1 + kept / steps, rel=0.02)
    dear = costs([float(tokens) for tokens in range(101)])  # a second a token
    found = drafts(f"rhyme:acceptance={acceptance}").costs(dear, 4, LENGTHS)
    assert found.base[4] * (1 + kept / steps) == pytest.approx(4 * (1 + drafted / steps), rel=0.02)


def test_das_s_budget_has_the_least_makespan_of_all_numbers_of_passes():
    lengths, chances, pass_seconds, token_seconds = (900.0, 400.0, 100.0), (0.8, 0.7, 0.6), 1.0, 0.2

    def least_budget(length: float, chance: float, passes: float) -> float:
        """Find by bisection how many draft tokens end a response with this pass."""
        low, high = 0.0, 50 * length
        for _ in range(200):
            middle = (low + high) / 2
            ends = length - chance * length * (1 - math.exp(-middle / length)) <= passes
            low, high = (low, middle) if ends else (middle, high)
        return high

    def makespan(passes: float) -> float:
        pairs = list(zip(lengths, chances, strict=True))
        own = sum(min(passes, length) + least_budget(length, chance, passes) for length, chance in pairs)
        return pass_seconds * passes + token_seconds * own

    passes, budgets = das_budget(lengths, chances, pass_seconds=pass_seconds, token_seconds=token_seconds)
    best = min((makespan(each), each) for each in (181 + 0.5 * i for i in range(1440)))
    assert makespan(passes) == pytest.approx(best[0], rel=1e-4) and passes == pytest.approx(best[1], abs=2)
    expected = [least_budget(length, chance, passes) for length, chance in zip(lengths, chances, strict=True)]
    assert budgets == pytest.approx(expected, abs=1e-3)
    assert budgets[2] == 0.0, "a response that is shorter than the passes needs no draft"


def test_verified_tokens_that_cost_too_much_leave_a_budget_of_nearly_nothing():
    passes, budgets = das_budget((100.0,), (0.5,), pass_seconds=1.0, token_seconds=1.0)
    # T' at N = l is 1 + 1 - 1 / a = 0: beyond this price a pass saves less than its draft tokens cost.
    assert passes == pytest.approx(100, abs=0.1) and budgets[0] == pytest.approx(0, abs=0.2)


def test_running_calls_are_the_longest_so_each_class_has_its_part_of_them():
    plain = costs([1.0] * 200)
    found = drafts("rhyme:long=0.9,medium=0.5,short=0").tokens_per_step(plain, 9, LENGTHS)
    alone = drafts("rhyme:acceptance=0.9").tokens_per_step(plain, 9, LENGTHS)
    halves = drafts("rhyme:acceptance=0.5").tokens_per_step(plain, 9, LENGTHS)
    assert list(found) == [1, 2, 4, 8, 9]
    assert found[1] == found[2] == alone[1]
    assert found[4] == pytest.approx((3 * alone[4] + halves[4]) / 4)
    assert found[9] == pytest.approx((3 * alone[9] + 3 * halves[9] + 3) / 9)


def test_history_drafts_nothing_for_short_calls_and_where_a_wide_step_costs_more_than_it_brings():
    # One second up to 8 tokens, then an eighth a token: a step of 6 calls is full.
    plain = costs([1.0] * 9, slope=0.01, prefill=0.125)
    rule = drafts("history:acceptance=0.6")
    gains = rule.tokens_per_step(plain, 8, LENGTHS)
    assert gains[1] == gains[2] > 1.8 and gains[8] == 1.0
    found = rule.costs(plain, 8, LENGTHS)
    assert found.base[8] == plain.base[8] and found.slope[8] == 0.01
    assert found.base[1] == pytest.approx(1 / gains[1]) and found.slope[1] == pytest.approx(0.01 / gains[1])
    always = drafts("rhyme:acceptance=0.6").costs(plain, 8, LENGTHS)
    assert always.base[8] > plain.base[8]


def test_a_wide_step_is_one_of_so_many_calls_and_beyond_the_table_one_of_prefilled_tokens():
    table = costs([0.0, 2.0, 4.0, 5.0], prefill=0.25)
    assert [table.wide(tokens) for tokens in (1, 1.5, 3, 7)] == [2.0, 3.0, 5.0, 6.0]


@pytest.mark.parametrize("text", ["rhyme", "other:acceptance=0.5", "das:acceptance=1", "das:long=0.5", "rhyme:a=0.5"])
def test_what_are_no_drafts_is_refused(text):
    with pytest.raises(ConfigError, match=f"drafts={text}"):
        SimulatedDrafts.parse(text)


def test_a_mesh_with_drafts_trains_on_the_same_tokens_in_less_time_where_steps_are_bound_by_memory():
    fields = ["schedule.preset=sync", "trainer.train_steps=3", "schedule.groups_per_batch=8", "generator.slots=32"]

    def simulated(*more: str, settings: tuple[str, ...] = ()):
        (arm,) = arms_of(None, [*fields, *more], settings, [])
        return arm, simulate_at_cost(arm)[0]

    _, plain = simulated()
    arm, drafted = simulated("generator.speculation=history")
    _, same = simulated(settings=("drafts=history:acceptance=0.7",))
    assert arm.settings.fleet.drafts == SimulatedDrafts(rule=DraftRule.HISTORY, acceptance=(0.7, 0.7, 0.7))
    assert drafted == same
    assert "2.49 at 1" in str(arm.assumed["tokens_of_a_call_per_step"])
    trained = [f.trained_tokens_per_second / f.updates_per_second for f in (plain, drafted)]
    assert trained[0] == pytest.approx(trained[1])
    assert 1.5 < drafted.updates_per_second / plain.updates_per_second < 2.49
