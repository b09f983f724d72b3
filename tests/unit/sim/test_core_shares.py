"""Shares of a core and the slowing that follows from them, with numbers worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rollmesh.sim.cores import CoreShares, Strangers, fair_level

TOGETHER = CoreShares(cores=2, is_shared=True, generators=2, generator_demand=1.0, service_demand=0.0)
APART = replace(TOGETHER, is_shared=False)


@pytest.mark.parametrize(
    ("cores", "demands", "level"),
    [
        (2.0, [(3, 1.0)], 2 / 3),
        (2.0, [(2, 1.0)], math.inf),  # exactly full: every process gets what it wants
        (2.0, [(1, 0.5), (2, 1.0)], 0.75),  # 0.5 of the cores are gone, 1.5 remain for two
        (1.0, [(2, 0.8), (1, 0.1)], 0.45),
        (1.0, [], math.inf),
    ],
)
def test_what_small_demands_leave_is_divided_evenly(
    cores: float, demands: list[tuple[float, float]], level: float
) -> None:
    assert fair_level(cores, demands) == pytest.approx(level)


def test_three_busy_processes_on_two_cores_take_one_and_a_half_times_as_long() -> None:
    assert TOGETHER.generator_slowing(decoding=2, is_training=True) == pytest.approx(1.5)
    assert TOGETHER.trainer_slowing(decoding=2) == pytest.approx(1.5)


def test_taking_turns_slows_nothing() -> None:
    assert TOGETHER.generator_slowing(decoding=2, is_training=False) == 1.0
    assert TOGETHER.trainer_slowing(decoding=0) == 1.0


def test_one_generator_and_a_trainer_have_a_core_each() -> None:
    assert TOGETHER.generator_slowing(decoding=1, is_training=True) == 1.0
    assert TOGETHER.trainer_slowing(decoding=1) == 1.0


def test_a_generator_that_sleeps_most_of_the_time_keeps_its_pace_and_the_trainer_gets_the_rest() -> None:
    """Two generators take 0.8, and the services 0.6: 0.6 of the two cores are left for the trainer."""
    paced = replace(TOGETHER, generator_demand=0.4, service_demand=0.6)
    assert paced.generator_slowing(decoding=2, is_training=True) == 1.0
    assert paced.trainer_slowing(decoding=2) == pytest.approx(1 / 0.6)


def test_with_cores_of_their_own_only_the_services_slow_the_trainer() -> None:
    """Two generators share their core with each other, training or not; services of 0.25 leave 0.75 of the other."""
    apart = replace(APART, service_demand=0.25)
    assert apart.generator_slowing(decoding=2, is_training=True) == 1.0
    assert apart.generator_slowing(decoding=1, is_training=True) == pytest.approx(0.5)
    assert apart.trainer_slowing(decoding=2) == pytest.approx(1 / 0.75)


def test_strangers_that_come_after_the_measurement_slow_both_sides() -> None:
    """Two generators had a core each and get 2 / (2 + 2); the trainer had one and gets 2 / (1 + 2)."""
    crowded = replace(TOGETHER, strangers=((Strangers(number=2.0),),))
    assert crowded.generator_slowing(decoding=2, is_training=False) == pytest.approx(2.0)
    assert crowded.trainer_slowing(decoding=0) == pytest.approx(1.5)
    assert replace(crowded, strangers_before=crowded.strangers).trainer_slowing(decoding=0) == 1.0
