from __future__ import annotations

import pytest

from rollmesh.errors import ConfigError
from rollmesh.sim.simulated_trainer import PartsAhead, TrainerModel

MODEL = TrainerModel(
    fixed_seconds=2.0,
    seconds_per_token=0.01,
    evidence_passes=2,
    evidence_seconds_per_token=0.001,
    publication_seconds=3.0,
)


def test_a_step_pays_for_gradient_and_evidence_of_every_token() -> None:
    """2 + 1000 * (0.01 + 2 * 0.001) = 14 s."""
    assert MODEL.train_seconds(tokens=1000) == pytest.approx(14.0)
    assert MODEL.publish_seconds() == 3.0


def test_a_colocated_trainer_switches_the_devices_twice() -> None:
    model = TrainerModel(fixed_seconds=1.0, seconds_per_token=0.0, colocated=True, switch_seconds=5.0)
    assert (model.train_seconds(tokens=10), model.publish_seconds()) == (6.0, 5.0)


def test_parts_ahead_shorten_the_step_by_their_tokens() -> None:
    """500 tokens take 6 s: ready at 0 they are done at 6, and the rest is 2 + 6 s from the cut at 10 on."""
    parts = PartsAhead(MODEL, now=0.0)
    assert parts.add(0.0, 500) == pytest.approx(6.0)
    assert parts.cut(10.0, tokens=1000) == pytest.approx(18.0)


def test_a_cut_waits_for_the_part_in_progress_and_computes_the_others_itself() -> None:
    parts = PartsAhead(MODEL, now=0.0)
    parts.add(0.0, 500)  # 0 to 6
    parts.add(1.0, 250)  # would begin at 6
    assert parts.cut(4.0, tokens=1000) == pytest.approx(6.0 + 2.0 + 6.0)


def test_the_next_batch_begins_without_parts() -> None:
    parts = PartsAhead(MODEL, now=0.0)
    parts.add(0.0, 500)
    trained = parts.cut(10.0, tokens=1000)
    assert parts.add(trained, 500) == pytest.approx(trained + 6.0)
    assert parts.cut(100.0, tokens=500) == pytest.approx(102.0)


def test_parts_need_devices_of_their_own() -> None:
    with pytest.raises(ConfigError, match="colocated"):
        PartsAhead(TrainerModel(fixed_seconds=1.0, seconds_per_token=0.0, colocated=True), now=0.0)
