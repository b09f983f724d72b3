"""A run that learns nothing says so while it trains, not only at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.launcher.console_notes import RewardNotes


def notes(reports: Sequence[dict[str, Any]], train_steps: int = 40) -> list[str]:
    reader = RewardNotes(train_steps)
    return [note for report in reports for note in reader.read(report)]


def report(reward: float, truncated: float) -> dict[str, Any]:
    return {"reward_mean": reward, "batch": {"truncated_share": truncated}}


def test_a_reward_that_stays_zero_is_noted_once_after_five_steps() -> None:
    assert notes([report(0.0, 0.2)] * 4) == []
    (note,) = notes([report(0.0, 0.2)] * 12)
    assert "the reward was 0 in each of the first 5 train steps" in note and "verifier" in note


def test_a_short_run_is_noted_at_its_last_step() -> None:
    (note,) = notes([report(0.0, 0.2)] * 2, train_steps=2)
    assert "first 2 train steps" in note


def test_a_reward_that_has_ever_left_zero_is_not_noted() -> None:
    assert notes([report(0.0, 0.2), report(0.1, 0.2), *[report(0.0, 0.2)] * 8]) == []
    assert notes([report(-1.0, 0.2)] * 9) == [], "a penalty is a reward"


def test_answers_that_are_all_cut_off_are_noted() -> None:
    (note,) = notes([report(0.5, 1.0)] * 9)
    assert "every answer of the first 5 train steps was cut off at rollout.max_new_tokens" in note
    assert notes([report(0.5, 1.0)] * 4 + [report(0.5, 0.99)] * 5) == []


def test_groups_with_equal_rewards_are_noted_once_long_before_they_end_the_run() -> None:
    reader = RewardNotes(40)
    found = [note for count in (5, 19, 20, 40, 3, 25) for note in reader.equal(count)]
    assert len(found) == 1 and "20 groups in a row had equal rewards" in found[0]
