"""Settings of a simulation whose times and lengths come from the records of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Self

import numpy as np

from rollmesh.config import RunConfig
from rollmesh.errors import DataError
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.runtime.capacity import has_gpu, this_machine
from rollmesh.sim.cores import CoreShares
from rollmesh.sim.decode_curve import EngineCosts
from rollmesh.sim.reward_model import RewardModel
from rollmesh.sim.run_records import RecordedWork, RunRecords, TrainedUpdate, recorded_times
from rollmesh.sim.simulated_mesh import MeshSettings, SimulatedMesh
from rollmesh.sim.simulated_trainer import TrainerModel, UpdateRecord
from rollmesh.sim.simulation_setup import SimulationSetup, mesh_settings

_BOUNDS = tuple(
    np.array(columns, dtype=float).T
    for columns in (
        [(1, 0, 0), (0, 1, 0), (0, 0, 1)],
        [(1, 0, 0), (0, 1, 0)],
        [(1, 0, 0), (0, 1, 1)],
        [(1, 0, 0)],
    )
)
"""Coefficients (a, b, p) of a fit as combinations of free ones: all free, p = 0, p = b, b = p = 0."""
_FORWARD_SHARE = 1 / 3
"""Share of a pass that only computes log-probabilities in one with gradients: of forward and backward, the latter takes
two thirds of the operations."""
_UNBOUNDED = 4096
"""Reward workers: the measured seconds have the wait for a worker in them."""


def engine_costs(work: Sequence[RecordedWork], slots: int) -> EngineCosts:
    """Fit seconds = a * steps + b * tokens + p * prefill tokens with 0 <= p <= b, a > 0, and the sum as measured.

    A step of r calls then takes a + b * r; the cost of the context is part of b. A prefilled token passes through the
    same weights as a sampled one, so it costs no more. In ``sync`` prefills come with the steps of most calls, and
    without this bound the fit may charge the prefills for these steps. Raises DataError without a step.
    """
    rows = np.array([(each.steps, each.tokens, each.prefill_tokens) for each in work if each.steps], dtype=float)
    seconds = np.array([each.busy_seconds for each in work if each.steps], dtype=float)
    if not len(rows):
        raise DataError("no decode step in the records of the run: record more train steps")
    # The error of an interval grows with the root of its steps.
    weights = 1 / np.sqrt(rows[:, :1])
    weighted, wanted = rows * weights, seconds * weights[:, 0]
    # The best coefficients are inside of the bounds, or on one of them.
    (step, token, prefill), least = (float(wanted.sum() / weighted[:, 0].sum()), 0.0, 0.0), np.inf
    for bound in _BOUNDS:
        found = bound @ np.linalg.lstsq(weighted @ bound, wanted, rcond=None)[0]
        error = float(np.square(weighted @ found - wanted).sum())
        if found[0] > 0 and 0 <= found[2] <= found[1] and error < least:
            (step, token, prefill), least = found.tolist(), error
    scale = float(seconds.sum() / (rows @ np.array([step, token, prefill])).sum())
    base = tuple(scale * (step + token * running) for running in range(slots + 1))
    return EngineCosts(base=base, slope=(0.0,) * (slots + 1), prefill_seconds_per_token=scale * prefill)


def trainer_model(updates: Sequence[TrainedUpdate], *, evidence_passes: int) -> TrainerModel:
    """Return mean times of these updates: the gradient by tokens, everything else from the cut on as fixed seconds.

    The gradient of the prompts is fixed: batches of all schedules have as many trajectories. Raises DataError for
    batches without tokens.
    """
    tokens = sum(update.forward_tokens for update in updates)
    if not tokens:
        raise DataError("no train step with tokens in the records of the run: record more train steps")
    per_token = sum(update.gradient_seconds for update in updates) / tokens
    prompt_tokens = fmean(update.forward_tokens - update.tokens for update in updates)
    rest = fmean(max(0.0, update.trained_at - update.cut_at - update.gradient_seconds) for update in updates)
    publication = fmean(max(0.0, update.announced_at - update.trained_at) for update in updates)
    background = fmean(max(0.0, update.announced_at - update.copied_at) for update in updates)
    return TrainerModel(
        fixed_seconds=rest + per_token * prompt_tokens,
        seconds_per_token=per_token,
        evidence_passes=evidence_passes,
        evidence_seconds_per_token=_FORWARD_SHARE * per_token,
        publication_seconds=publication,
        background_seconds=min(publication, background),
    )


def unexplained_seconds(
    measured: Sequence[TrainedUpdate], simulated: Sequence[UpdateRecord], publication_seconds: float
) -> float:
    """Return by how much the measured mean time from a policy to the next cut exceeds the simulated one, at least 0.

    These are the latencies between processes that no model has: leases, calls, looks of the leader.
    """
    real = fmean(later.cut_at - earlier.announced_at for earlier, later in pairwise(measured))
    model = fmean(later.cut_at - earlier.trained_at for earlier, later in pairwise(simulated)) - publication_seconds
    return max(0.0, real - model)


def core_shares(records: RunRecords, *, cores: int, is_shared: bool, is_paced: bool) -> CoreShares:
    """Return the demands on the cores. A generator without a pace takes a whole core."""
    updates = records.updates
    training = sum(update.announced_at - update.cut_at for update in updates[1:])
    decoding = updates[-1].announced_at - updates[0].announced_at - training
    busy = sum(each.busy_seconds for each in records.work)
    return CoreShares(
        cores=cores,
        is_shared=is_shared,
        generators=records.generators,
        generator_demand=min(1.0, records.generator_cpu_seconds / busy) if is_paced else 1.0,
        service_demand=records.service_cpu_seconds / decoding,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Times of a run, for simulations of its own run file and of others."""

    records: RunRecords
    cores: int = 0
    """Cores of the machine on which generators and trainer slow each other; 0 if they never do."""
    is_shared: bool = True
    """True if they share the cores; otherwise each side has half of them."""

    @classmethod
    def on_cores(cls, config: RunConfig, records: RunRecords, *, cores: int, is_shared: bool = True) -> Self:
        """Take the records of a run whose generators and trainer take turns, with its run file.

        What its own simulation lacks between a policy and the next cut is added to the time of a reward.
        """
        found = cls(records=records, cores=cores, is_shared=is_shared)
        settings = found.own_settings(config)
        updates = SimulatedMesh(settings).run().updates[:-1]
        lacking = unexplained_seconds(records.updates, updates, settings.trainer.publish_seconds())
        return replace(found, records=replace(records, reward_seconds=records.reward_seconds + lacking))

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
            return cls(records=records)
        on_cpu = config.trainer.device == "cpu" or (config.trainer.device == "auto" and not has_gpu())
        trainer = config.trainer.model_copy(update={"train_steps": len(records.updates)})
        own = config.model_copy(update={"trainer": trainer})
        return cls.on_cores(own, records, cores=this_machine().cores if on_cpu else 0)

    def own_settings(self, config: RunConfig) -> MeshSettings:
        """Return the settings of a run file's simulation with all times and lengths from the records."""
        setup = SimulationSetup(lengths=str(self.records.folder), seed=config.seed)
        return self.settings(mesh_settings(config, setup), config)

    def settings(self, settings: MeshSettings, config: RunConfig) -> MeshSettings:
        """Return the settings of a run file's simulation with all times from the records.

        Parts ahead of a cut are not simulated on shared cores.
        """
        records, cores = self.records, None
        if self.cores and not settings.schedule.part_groups:
            is_paced = config.generator.pace is not None
            cores = core_shares(records, cores=self.cores, is_shared=self.is_shared, is_paced=is_paced)
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


def updates_per_second(settings: MeshSettings) -> float:
    """Simulate; return the rate from the end of the first train step to the end of the last but one."""
    updates = SimulatedMesh(settings).run().updates[:-1]
    return (len(updates) - 1) / (updates[-1].trained_at - updates[0].trained_at)
