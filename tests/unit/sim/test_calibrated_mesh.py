"""A simulation on the records of a run, and the cores that its generators and trainer share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollmesh.errors import ConfigError
from rollmesh.sim.calibration import updates_per_second
from rollmesh.sim.cores import CoreShares, Strangers
from rollmesh.sim.simulated_mesh import MeshSettings, SimulatedMesh

from .meshes import mesh_settings

SHARED = CoreShares(cores=4, is_shared=True, generators=4, generator_demand=1.0, service_demand=0.0)
"""Four generators have a core each, until the trainer takes one more."""


def on(cores: CoreShares | None, preset: str) -> MeshSettings:
    return replace(mesh_settings(preset), cores=cores)


def seconds(settings: MeshSettings) -> float:
    return SimulatedMesh(settings).run().seconds


def test_a_schedule_that_takes_turns_is_as_fast_on_shared_cores() -> None:
    assert seconds(on(SHARED, "sync")) == pytest.approx(seconds(on(None, "sync")), rel=1e-9)


def test_work_that_overlaps_is_slower_on_shared_cores_and_never_slower_than_turns() -> None:
    free, shared, turns = (
        updates_per_second(on(cores, preset))
        for cores, preset in ((None, "one_step_off"), (SHARED, "one_step_off"), (None, "sync"))
    )
    assert turns < shared < free


def test_twice_the_processes_on_every_core_take_twice_as_long() -> None:
    """Generators and trainer get half of what they had while the times were measured, when they take turns."""
    crowded = CoreShares(
        cores=1,
        is_shared=True,
        generators=4,
        generator_demand=1.0,
        service_demand=0.0,
        strangers_before=((Strangers(number=1.0),),),
        strangers=((Strangers(number=3.0),),),
    )
    assert crowded.trainer_slowing(decoding=0) == 2.0
    assert seconds(on(crowded, "sync")) > 1.3 * seconds(on(None, "sync"))


def test_parts_on_shared_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="part_groups"):
        SimulatedMesh(on(SHARED, "streamrl"))


@pytest.mark.parametrize("preset", ["copris", "pipeline", "areal", "rollpacker"])
def test_every_promise_of_the_scheduler_holds_on_shared_cores(preset: str) -> None:
    assert len(SimulatedMesh(on(SHARED, preset), check=True).run().updates) == 6
