"""Models of a simulation, fitted to the records of one run in which generators and trainer took turns (``sync``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import numpy as np

from rollmesh.errors import DataError
from rollmesh.sim.core_shares import CoreShares
from rollmesh.sim.decode_curve import EngineCosts
from rollmesh.sim.run_records import RecordedWork, RunRecords, TrainedUpdate
from rollmesh.sim.trainer_model import TrainerModel
from rollmesh.sim.update_record import UpdateRecord
from rollmesh.types import Float64Array

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
    step, token, prefill = _fitted(rows * weights, seconds * weights[:, 0])
    scale = float(seconds.sum() / (rows @ np.array([step, token, prefill])).sum())
    base = tuple(scale * (step + token * running) for running in range(slots + 1))
    return EngineCosts(base=base, slope=(0.0,) * (slots + 1), prefill_seconds_per_token=scale * prefill)


def _fitted(rows: Float64Array, seconds: Float64Array) -> tuple[float, float, float]:
    """Return the least-squares coefficients (a, b, p) with a > 0 and 0 <= p <= b.

    The best ones are inside of these bounds, or on one of them: p = 0, p = b, or b = p = 0.
    """
    best, least = (float(seconds.sum() / rows[:, 0].sum()), 0.0, 0.0), np.inf
    for bound in _BOUNDS:
        found = bound @ np.linalg.lstsq(rows @ bound, seconds, rcond=None)[0]
        error = float(np.square(rows @ found - seconds).sum())
        if found[0] > 0 and 0 <= found[2] <= found[1] and error < least:
            best, least = (float(found[0]), float(found[1]), float(found[2])), error
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
