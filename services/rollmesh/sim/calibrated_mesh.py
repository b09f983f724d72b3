"""Settings of a simulation whose times and lengths come from the records of a run."""

from __future__ import annotations

from dataclasses import replace

from rollmesh.config import RunConfig
from rollmesh.sim.core_shares import Strangers
from rollmesh.sim.reward_model import RewardModel
from rollmesh.sim.run_calibration import core_shares, engine_costs, trainer_model
from rollmesh.sim.run_records import RunRecords
from rollmesh.sim.simulated_mesh import MeshSettings, SimulatedMesh
from rollmesh.sim.simulation_setup import SimulationSetup, mesh_settings

_UNBOUNDED = 4096
"""Reward workers: the measured seconds have the wait for a worker in them."""


def calibrated_settings(
    config: RunConfig, records: RunRecords, *, cores: int, is_shared: bool, strangers: tuple[Strangers, ...]
) -> MeshSettings:
    """Return the settings of a run file's simulation with all times and lengths from the records of another run.

    ``strangers`` are the processes outside of the mesh in the run that is simulated.
    """
    settings = mesh_settings(config, SimulationSetup(lengths=str(records.folder), seed=config.seed))
    shares = core_shares(records, cores=cores, is_shared=is_shared, is_paced=config.generator.pace is not None)
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


def updates_per_second(settings: MeshSettings) -> float:
    """Simulate; return the rate from the end of the first train step to the end of the last but one."""
    updates = SimulatedMesh(settings).run().updates[:-1]
    return (len(updates) - 1) / (updates[-1].trained_at - updates[0].trained_at)
