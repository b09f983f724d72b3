"""Settings of a simulation whose times and lengths come from the records of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from rollmesh.config import RunConfig
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.runtime.capacity import this_machine
from rollmesh.sim.core_shares import Samples
from rollmesh.sim.recorded_times import recorded_times
from rollmesh.sim.reward_model import RewardModel
from rollmesh.sim.run_calibration import core_shares, engine_costs, trainer_model, unexplained_seconds
from rollmesh.sim.run_records import RunRecords
from rollmesh.sim.simulated_mesh import MeshSettings, SimulatedMesh
from rollmesh.sim.simulation_setup import SimulationSetup, mesh_settings

_GPU_DRIVER = Path("/proc/driver/nvidia")
_UNBOUNDED = 4096
"""Reward workers: the measured seconds have the wait for a worker in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """Machine of a simulated mesh."""

    cores: int
    is_shared: bool
    """True if generators and trainer share the cores; otherwise each side has half of them."""


def calibrated_settings(
    config: RunConfig, records: RunRecords, machine: SimulatedMachine | None, strangers: Samples
) -> MeshSettings:
    """Return the settings of a run file's simulation with all times and lengths from the records of another run.

    ``strangers`` are the processes outside of the mesh in the run that is simulated. Without a ``machine`` generators
    and trainer never slow each other.
    """
    settings = mesh_settings(config, SimulationSetup(lengths=str(records.folder), seed=config.seed))
    return with_measured_times(settings, config, records, machine, strangers)


def with_measured_times(
    settings: MeshSettings,
    config: RunConfig,
    records: RunRecords,
    machine: SimulatedMachine | None,
    strangers: Samples = (),
) -> MeshSettings:
    """Return the settings of a run file's simulation with all times from the records of a run."""
    cores = None
    if machine is not None:
        is_paced = config.generator.pace is not None
        shares = core_shares(records, cores=machine.cores, is_shared=machine.is_shared, is_paced=is_paced)
        cores = replace(shares, strangers=strangers)
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
        cores=cores,
    )


def with_latencies(config: RunConfig, records: RunRecords, machine: SimulatedMachine | None) -> RunRecords:
    """Add what the simulation of the recorded run itself lacks between a policy and the next cut to the reward's time.

    ``config`` is the run file of that run, whose generators and trainer take turns.
    """
    settings = calibrated_settings(config, records, machine, records.strangers)
    updates = SimulatedMesh(settings).run().updates[:-1]
    lacking = unexplained_seconds(records.updates, updates, settings.trainer.publish_seconds())
    return replace(records, reward_seconds=records.reward_seconds + lacking)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Times of a run folder, for simulations of its own run file and of others."""

    records: RunRecords
    machine: SimulatedMachine | None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a run folder. Raises DataError for one with too few train steps or without the times.

        Only where generators and trainer took turns are the times free of each other: then they slow each other in a
        simulation on CPUs, and the latencies between processes are known.
        """
        run = RecordedRun(folder)
        records = recorded_times(run)
        config, schedule = run.config, run.schedule
        assert config is not None and schedule is not None  # recorded_times has read them.
        if not schedule.rests_while_training:
            return cls(records=records, machine=None)
        on_cpu = config.trainer.device == "cpu" or (config.trainer.device == "auto" and not _GPU_DRIVER.exists())
        machine = SimulatedMachine(cores=this_machine().cores, is_shared=True) if on_cpu else None
        trainer = config.trainer.model_copy(update={"train_steps": len(records.updates)})
        own = config.model_copy(update={"trainer": trainer})
        return cls(records=with_latencies(own, records, machine), machine=machine)

    def settings(self, settings: MeshSettings, config: RunConfig) -> MeshSettings:
        """Return the settings with the times of the run; parts ahead of a cut are not simulated on shared cores."""
        machine = None if settings.schedule.part_groups else self.machine
        return with_measured_times(settings, config, self.records, machine)


def updates_per_second(settings: MeshSettings) -> float:
    """Simulate; return the rate from the end of the first train step to the end of the last but one."""
    updates = SimulatedMesh(settings).run().updates[:-1]
    return (len(updates) - 1) / (updates[-1].trained_at - updates[0].trained_at)
