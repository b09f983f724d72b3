"""Settings of a simulation whose times and lengths come from the records of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollmesh.config import RunConfig
from rollmesh.sim.core_shares import Samples
from rollmesh.sim.reward_model import RewardModel
from rollmesh.sim.run_calibration import core_shares, engine_costs, trainer_model, unexplained_seconds
from rollmesh.sim.run_records import RunRecords
from rollmesh.sim.simulated_mesh import MeshSettings, SimulatedMesh
from rollmesh.sim.simulation_setup import SimulationSetup, mesh_settings

_UNBOUNDED = 4096
"""Reward workers: the measured seconds have the wait for a worker in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """Machine of a simulated mesh."""

    cores: int
    is_shared: bool
    """True if generators and trainer share the cores; otherwise each side has half of them."""


def calibrated_settings(
    config: RunConfig, records: RunRecords, machine: SimulatedMachine, strangers: Samples
) -> MeshSettings:
    """Return the settings of a run file's simulation with all times and lengths from the records of another run.

    ``strangers`` are the processes outside of the mesh in the run that is simulated.
    """
    settings = mesh_settings(config, SimulationSetup(lengths=str(records.folder), seed=config.seed))
    shares = core_shares(
        records, cores=machine.cores, is_shared=machine.is_shared, is_paced=config.generator.pace is not None
    )
    return replace(
        settings,
        fleet=replace(
            settings.fleet,
            cache_tokens=config.generator.kv_tokens,
            costs=engine_costs(records.work, config.generator.slots),
            fetch_seconds=records.fetch_seconds,
            swap_seconds=records.swap_seconds,
        ),
        trainer=trainer_model(records.updates[1:], evidence_passes=settings.trainer.evidence_passes),
        rewards=RewardModel(median_seconds=records.reward_seconds, worker_count=_UNBOUNDED),
        cores=replace(shares, strangers=strangers),
    )


def with_latencies(config: RunConfig, records: RunRecords, machine: SimulatedMachine) -> RunRecords:
    """Add what the simulation of the recorded run itself lacks between a policy and the next cut to the reward's time.

    ``config`` is the run file of that run, whose generators and trainer take turns.
    """
    settings = calibrated_settings(config, records, machine, records.strangers)
    updates = SimulatedMesh(settings).run().updates[:-1]
    lacking = unexplained_seconds(records.updates, updates, settings.trainer.publish_seconds())
    return replace(records, reward_seconds=records.reward_seconds + lacking)


def updates_per_second(settings: MeshSettings) -> float:
    """Simulate; return the rate from the end of the first train step to the end of the last but one."""
    updates = SimulatedMesh(settings).run().updates[:-1]
    return (len(updates) - 1) / (updates[-1].trained_at - updates[0].trained_at)
