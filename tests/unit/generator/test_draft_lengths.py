"""Length control of drafts: how many tokens the next draft has, and when speculation pauses and resumes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollmesh.generator.engines.torch.speculation import Proposal, Speculation, next_length

from ...kit.generation import make_call


def test_a_draft_doubles_up_to_16_while_it_is_accepted_and_halves_on_a_miss():
    lengths = [2]
    for accepted in (2, 4, 8, 16, 16, 3, 8, 0, 2, 1, 0):
        lengths.append(next_length(lengths[-1], 16, accepted))
    assert lengths == [2, 4, 8, 16, 16, 16, 8, 16, 8, 4, 2, 2]


def test_a_draft_that_was_cut_is_whole_if_all_that_was_left_is_accepted():
    assert next_length(8, 3, 3) == 16
    assert next_length(8, 3, 2) == 4
    assert next_length(4, 7, 4) == 8  # more than its length, in a wider step
    assert next_length(4, 7, 3) == 2


@pytest.mark.parametrize(
    ("sampled", "kept"),
    [([5, 6, 7, 8], 4), ([5, 6, 9, 8], 3), ([9, 6, 7, 8], 1)],
    ids=["all, and one more", "until the third differs", "the first only"],
)
def test_tokens_are_kept_until_one_is_not_the_drafts(sampled, kept):
    proposal = Proposal([[], [5, 6, 7]])
    assert proposal.width == 4
    assert proposal.kept([1, *sampled]) == [1, kept]


def ended(engine: Speculation, name: int, length: int) -> None:
    """A response of ``length`` tokens to the prompt ``name``."""
    engine.remember(running(name).request.context_ids, np.zeros(length, np.int32))


def running(name: int) -> Any:
    return SimpleNamespace(slot=0, request=make_call(f"t{name}", np.full(6, name, np.int32)))


def test_prompts_with_responses_below_a_quarter_of_the_mean_draft_nothing():
    engine = Speculation(32)
    for name, length in enumerate((10, 30, 80)):  # mean 40
        ended(engine, name, length)
    shorts = []
    for name in (0, 1, 2, 3):
        engine.begin(running(name))
        shorts.append(engine._courses[0].is_short)
    assert shorts == [False] * 4  # 10 is a quarter of 40, the fourth prompt is new
    ended(engine, 1, 46)  # 30 + (46 - 30) / 4 = 34; mean (10 + 34 + 80) / 3 = 41.3
    engine.begin(running(0))
    assert engine._courses[0].is_short


def steps_of(engine: Speculation, rows: int, seconds: float, tokens: int, steps: int) -> str:
    """Return ``d`` for every step with drafts, which takes ``seconds``, and ``.`` for every other, which takes 1 s."""
    found = ""
    for _ in range(steps):
        drafting = not engine.rests(rows) and engine.gates[(rows - 1).bit_length()].drafting
        if engine._step >= engine.gates[(rows - 1).bit_length()].rests_until:
            engine.measure(rows, rows * tokens if drafting else rows, seconds if drafting else 1.0)
        found += "d" if drafting else "."
    return found


def test_trials_that_do_not_pay_are_followed_by_longer_rests_and_the_next_trial():
    found = steps_of(Speculation(32), rows=1, seconds=1.2, tokens=1, steps=24_000)
    rests = [len(rest) for rest in found.split("d") if len(rest) > 17]
    # 17 plain steps are measured before a trial.
    assert rests[:4] == [1023 + 17, 4095 + 17, 4095 + 17, 4095 + 17]
    assert max(map(len, found.split("."))) == 32


def test_trials_that_pay_do_not_rest():
    found = steps_of(Speculation(32), rows=1, seconds=1.5, tokens=2, steps=4000)
    assert max(map(len, found.split("d"))) == 17


def test_useless_drafts_cost_less_than_two_percent_of_the_steps():
    assert 0 < steps_of(Speculation(32), rows=1, seconds=1.5, tokens=1, steps=8000).count("d") < 0.02 * 8000


def test_drafts_that_do_not_pay_rest_with_more_calls_and_not_with_fewer():
    engine = Speculation(32)
    steps_of(engine, rows=4, seconds=3.0, tokens=2, steps=30)
    assert "d" not in steps_of(engine, rows=8, seconds=1.0, tokens=2, steps=200)
    assert "d" in steps_of(engine, rows=2, seconds=1.0, tokens=2, steps=200)
