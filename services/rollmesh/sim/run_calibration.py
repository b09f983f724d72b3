"""Models of a simulation, fitted to the records of one run in which generators and trainer took turns (``sync``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import fmean

import numpy as np

from rollmesh.errors import DataError
from rollmesh.sim.core_shares import CoreShares
from rollmesh.sim.decode_curve import EngineCosts
from rollmesh.sim.run_records import RecordedWork, RunRecords, TrainedUpdate
from rollmesh.sim.trainer_model import TrainerModel
from rollmesh.sim.update_record import UpdateRecord
from rollmesh.types import Float64Array

_FORWARD_SHARE = 1 / 3
"""Share of a pass that only computes log-probabilities in one with gradients: of forward and backward, the latter takes
two thirds of the operations."""


def engine_costs(work: Sequence[RecordedWork], slots: int) -> EngineCosts:
    """Fit seconds = a * steps + b * tokens + p * prefill tokens, none of them below 0, and the sum as measured.

    A step of r calls then takes a + b * r; the cost of the context is part of b. Raises DataError without a step.
    """
    rows = np.array([(each.steps, each.tokens, each.prefill_tokens) for each in work if each.steps], dtype=float)
    seconds = np.array([each.busy_seconds for each in work if each.steps], dtype=float)
    if not len(rows):
        raise DataError("no decode step in the records of the run: record more train steps")
    # The error of an interval grows with the root of its steps.
    weights = 1 / np.sqrt(rows[:, :1])
    step, token, prefill = _fitted(rows * weights, seconds * weights[:, 0])
    scale = float(seconds.sum() / (rows @ np.array([step, token, prefill])).sum())
    base = tuple(scale * (step + token * running) for running in range(slots + 1))
    return EngineCosts(base=base, slope=(0.0,) * (slots + 1), prefill_seconds_per_token=scale * prefill)


def _fitted(rows: Float64Array, seconds: Float64Array) -> tuple[float, float, float]:
    """Return the least-squares coefficients that are not negative; those of steps are always above 0."""
    best, least = (float(seconds.sum() / rows[:, 0].sum()), 0.0, 0.0), np.inf
    for more in (others for size in range(3) for others in combinations((1, 2), size)):
        columns = [0, *more]
        found = np.linalg.lstsq(rows[:, columns], seconds, rcond=None)[0]
        error = float(np.square(rows[:, columns] @ found - seconds).sum())
        if found[0] > 0 and found.min() >= 0 and error < least:
            values = dict(zip(columns, found.tolist(), strict=True))
            best, least = (values[0], values.get(1, 0.0), values.get(2, 0.0)), error
    return best


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
    updates, use = records.updates, records.use
    training = sum(update.announced_at - update.cut_at for update in updates[1:])
    decoding = updates[-1].announced_at - updates[0].announced_at - training
    busy = sum(each.busy_seconds for each in records.work)
    return CoreShares(
        cores=cores,
        is_shared=is_shared,
        generators=records.generators,
        generator_demand=min(1.0, use.generators / busy) if is_paced else 1.0,
        service_demand=use.services / decoding,
        strangers_before=records.strangers,
        strangers=records.strangers,
    )
