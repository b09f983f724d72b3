"""Length control of drafts: how many tokens the next draft has, and when speculation pauses and resumes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollmesh.generator.engines.torch import speculation
from rollmesh.generator.engines.torch.slots import SlotTable
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
    assert Proposal(4, {1: [5, 6, 7]}).kept(np.array([[1, 1, 1, 1], sampled])).tolist() == [1, kept]


def ended(engine: Speculation, name: int, length: int) -> None:
    """A response of ``length`` tokens to the prompt ``name``."""
    call: Any = running(name)
    engine.begin(call)
    context = np.append(call.request.context_ids, np.zeros(length, np.int32))
    engine.end(SimpleNamespace(slot=0, request=call.request, context_ids=lambda: context), finished=True)  # type: ignore[arg-type]


def running(name: int) -> Any:
    return SimpleNamespace(slot=0, request=make_call(f"t{name}", np.full(6, name, np.int32)))


def test_prompts_with_responses_below_a_quarter_of_the_mean_draft_nothing():
    engine = Speculation(1, 32)
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


class Trial:
    """Steps of one call whose drafts are looked for; ``seconds`` each, a plain step has 1 s."""

    def __init__(self) -> None:
        self.engine = Speculation(1, 32)
        self.engine.begin(running(0))
        self.table: Any = SimpleNamespace(recent=lambda slot: bytes(128), calls=[None])
        for _ in range(8):
            self.step(1.0)

    def step(self, seconds: float, tokens: int = 1) -> bool:
        """Tell whether the step looked for drafts."""
        table: SlotTable = self.table
        assert self.engine.propose(np.zeros(1, np.int64), lambda: np.zeros(1, np.int64), table, lambda: 99) is None
        self.engine.measure(1, tokens, seconds if self.engine.looked else 1.0)
        return self.engine.looked


def looked_after_trials(trial: Trial, seconds: float, tokens: int, steps: int) -> list[int]:
    """Lengths of the pauses in which no step looks for drafts, in order; the plain steps between do not count."""
    pauses, quiet = [], 0
    for _ in range(steps):
        if trial.step(seconds, tokens):
            if quiet > speculation._REFRESHED:
                pauses.append(quiet)
            quiet = 0
        else:
            quiet += 1
    return pauses


def test_trials_that_do_not_pay_are_followed_by_longer_pauses_and_the_next_trial():
    # The step after the last one of a trial is the first of a pause, so that the pause has a step less.
    assert looked_after_trials(Trial(), seconds=1.2, tokens=1, steps=24_000) == [1023, 4095, 8191, 8191]


def test_trials_that_pay_do_not_pause():
    assert looked_after_trials(Trial(), seconds=1.5, tokens=2, steps=4000) == []


def test_useless_drafts_cost_less_than_two_percent_of_the_steps():
    trial = Trial()
    looks = sum(trial.step(1.5) for _ in range(8000))
    assert 0 < looks < 0.02 * 8000
