"""Demonstrations speak the grammar, never lie, and have the lengths that the recipe needs."""

from __future__ import annotations

import random

import numpy as np

from rollmesh.recipes.countdown.demonstrations import Demonstration, SearcherMix, draw_demonstration
from rollmesh.recipes.countdown.tokenizer import VOCABULARY
from rollmesh.tasks.countdown import CountdownVerifier


def drawn(count: int, mix: SearcherMix | None = None) -> list[Demonstration]:
    rng = random.Random(5)
    return [draw_demonstration(rng, mix or SearcherMix()) for _ in range(count)]


def verified(shown: Demonstration) -> bool:
    puzzle = {"numbers": list(shown.puzzle.numbers), "target": shown.puzzle.target}
    return CountdownVerifier().verify(shown.response, puzzle).value == 1.0


def test_the_verifier_agrees_with_every_demonstration() -> None:
    shown = drawn(500)
    assert [verified(s) for s in shown] == [s.solved for s in shown]
    assert any(s.solved for s in shown)
    assert not all(s.solved for s in shown)


def test_every_trial_is_honest() -> None:
    for shown in drawn(300):
        trials = shown.response.rstrip("!? ").split(" , ")
        for trial in trials:
            first, sign, second, _, result, _, target, _, difference = trial.split()
            expected = int(first) + int(second) if sign == "+" else int(first) - int(second)
            assert int(result) == expected >= 0
            assert int(target) == shown.puzzle.target
            assert int(difference) == abs(expected - shown.puzzle.target)
            assert first != second
            assert {int(first), int(second)} <= set(shown.puzzle.numbers)


def test_demonstrations_never_show_a_held_out_puzzle() -> None:
    assert not any(shown.puzzle.held_out for shown in drawn(500))


def test_every_word_has_a_token() -> None:
    assert {word for shown in drawn(300) for word in shown.response.split()} <= set(VOCABULARY)


def test_lengths_have_a_short_median_and_a_long_tail() -> None:
    lengths = [len(shown.response.split()) for shown in drawn(3000)]
    median, p90, p99 = np.percentile(lengths, [50, 90, 99])
    assert 20 <= median <= 40
    assert 110 <= p90 <= 200
    assert 400 <= p99 <= 512
    assert max(lengths) <= 512
