"""Figures of a simulated run, for the table and for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import quantiles
from typing import Any

from rollmesh.sim.fleet import FleetWork
from rollmesh.sim.simulated_mesh import SimulatedRun

_WARM_UP_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Means over the updates after the warm-up; tokens of the updates, seconds between them, both virtual."""

    updates: int
    """Updates after the warm-up: the first tenth of the updates, at least one if there are others."""
    updates_per_second: float
    updates_per_hour: float
    update_seconds: tuple[float, ...]
    """Time of each update."""
    update_seconds_p50: float
    update_seconds_p90: float
    trained_tokens_per_second: float
    generated_tokens_per_second: float
    bubble_ratio: float
    """1 - integral of running calls / (slots * time), pauses of loads included."""
    rollout_bubble_ratio: float
    """The same over the time of rollout: without the time of the trainer, if the schedule samples nothing meanwhile."""
    off_policy_token_share: float
    mean_staleness: float
    """Of the oldest token of a trajectory in the loss, in train steps."""
    staleness: Mapping[int, int]
    """Trajectories by the staleness of their oldest token in the loss."""
    version_span: float
    """Mean newest minus oldest policy version within a trajectory."""
    preemptions: int
    reprefill_share: float
    """Prefilled tokens that were prefilled or sampled before, over all prefilled tokens."""
    wasted_tokens: Mapping[str, int]
    """Of the whole run, by reason; ``masked`` tokens are too old for the loss, those of ``run_complete`` remain when
    the last batch is cut."""
    trainer_wait_share: float
    """Share of the time for which the trainer had no batch."""
    device_hours_per_update: float

    def document(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)


def figures(run: SimulatedRun, devices: int) -> Figures:
    """Measure a run; ``devices`` are those of the whole mesh."""
    first = max(1, int(_WARM_UP_SHARE * len(run.updates))) if len(run.updates) > 1 else 0
    updates, work = run.updates[first:], _work(run, first)
    began = run.updates[first - 1].trained_at if first else 0.0
    seconds = max(updates[-1].trained_at - began, 1e-9)
    tokens: Counter[int] = Counter()
    oldest: Counter[int] = Counter()
    for update in updates:
        tokens.update(update.tokens_by_staleness)
        oldest.update(update.trajectories_by_staleness)
    trained, trajectories = tokens.total(), sum(update.trajectories for update in updates)
    each = [later - earlier for earlier, later in pairwise([began, *(update.trained_at for update in updates)])]
    p50, p90 = _percentiles(each)
    waits = sum(update.trainer_wait_seconds for update in updates) / seconds
    return Figures(
        updates=len(updates),
        updates_per_second=len(updates) / seconds,
        updates_per_hour=3600 * len(updates) / seconds,
        update_seconds=tuple(each),
        update_seconds_p50=p50,
        update_seconds_p90=p90,
        trained_tokens_per_second=trained / seconds,
        generated_tokens_per_second=work.decoded_tokens / seconds,
        bubble_ratio=_idle(work, 1.0),
        rollout_bubble_ratio=_idle(work, waits if run.rests_while_training else 1.0),
        off_policy_token_share=1 - tokens[0] / trained if trained else 0.0,
        mean_staleness=sum(age * count for age, count in oldest.items()) / max(1, oldest.total()),
        staleness=dict(sorted(oldest.items())),
        version_span=sum(update.version_spans for update in updates) / trajectories,
        preemptions=work.preemptions,
        reprefill_share=work.reprefilled_tokens / work.prefilled_tokens if work.prefilled_tokens else 0.0,
        wasted_tokens=run.wasted_tokens,
        trainer_wait_share=waits,
        device_hours_per_update=devices * seconds / 3600 / len(updates),
    )


def _idle(work: FleetWork, share: float) -> float:
    """Return the idle share of the slots in this share of the time, in which all calls ran."""
    slot_seconds = share * work.slot_seconds
    return max(0.0, 1 - work.running_slot_seconds / slot_seconds) if slot_seconds else 0.0


def _work(run: SimulatedRun, first: int) -> FleetWork:
    return run.work[-1].since(run.work[first - 1]) if first else run.work[-1]


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return median and ninth decile."""
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    tenths = quantiles(seconds, n=10, method="inclusive")
    return tenths[4], tenths[8]
