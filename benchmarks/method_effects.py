"""Traces of a method in a run: how a short run shows that the method acted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rollmesh.config.recipes import resolve_model
from rollmesh.errors import CheckpointError, DataError
from rollmesh.report.audit import open_checkpoints
from rollmesh.report.formats import percent
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.series import newest_per_step
from rollmesh.report.summary import RunSummary, summarise
from rollmesh.step_metrics import number
from rollmesh.tasks.sources.source_protocol import build_prompt_source
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, Group, Trajectory

NO_EFFECT = "no effect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Records of one run in which methods leave traces."""

    run: RecordedRun
    summary: RunSummary
    records: tuple[Mapping[str, Any], ...]
    """One step report per train step."""
    groups: tuple[Group, ...]
    """Trained groups, in the order of their batches."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Trained trajectories."""
        return tuple(trajectory for group in self.groups for trajectory in group.trajectories)


def read_traces(folder: Path) -> Traces:
    """Read the traces of a run. Raises DataError for a missing folder."""
    run = RecordedRun(folder)
    records = tuple(newest_per_step(run.metrics.records))
    return Traces(run=run, summary=summarise(run), records=records, groups=tuple(_trained_groups(run)))


def effect_of(traces: Traces, method: str) -> str:
    """Return the traces of a method, as ``masks/m2po``; ``no effect`` without one, empty for a run without a step."""
    if not traces.records:
        return ""
    return ", ".join(_TRACES[method.partition("/")[0]](traces)) or NO_EFFECT


def _trained_groups(run: RecordedRun) -> Iterator[Group]:
    try:
        store = open_checkpoints(run)
        for step in store.batch_steps():
            yield from store.stored_batch(step).batch.groups
    except (CheckpointError, DataError):
        return  # the audit of the run names what is missing


def _of_sampler(traces: Traces) -> Iterator[str]:
    completed = {name: totals["completed"] for name, totals in traces.summary.domains.items()}
    if total := sum(completed.values()):
        yield "completed " + " ".join(f"{name} {percent(count / total)}" for name, count in completed.items())
    if moved := _groups_out_of_order(traces):
        yield f"{moved} of {len(traces.groups)} groups have another prompt than in order"


def _groups_out_of_order(traces: Traces) -> int:
    """Return the number of trained groups whose prompt is not that of their position."""
    config = traces.run.config
    if config is None:
        return 0
    source = build_prompt_source(config.data, Tokenizer(resolve_model(config.model.path)), config.seed)
    positions = {g.group_id: g.group_id.removeprefix("e").split("-") for g in traces.groups}
    return sum(
        source.prompt(int(epoch), int(index)).prompt_id != group.trajectories[0].prompt.prompt_id
        for group in traces.groups
        for epoch, index in [positions[group.group_id]]
        if index.isdigit()  # a replayed dead letter has no position of its own
    )


def _of_planner(traces: Traces) -> Iterator[str]:
    config, sizes = traces.run.config, traces.summary.rollouts_per_group
    if config is not None and set(sizes) - {config.schedule.group_size}:
        yield " to ".join(f"{size}" for size in sorted({min(sizes), max(sizes)})) + " rollouts a group"
    if (rounds := traces.summary.rounds_per_group) is not None and rounds > 1:
        yield f"{rounds:.2f} rounds a group"
    if traces.summary.surplus_tokens:
        yield f"{traces.summary.surplus_tokens:,} surplus tokens"


def _of_shaper(traces: Traces) -> Iterator[str]:
    scored = [t for t in traces.trajectories if t.outcome is not None and t.outcome.verdict is not None]
    if changed := sum(t.outcome is not None and t.outcome.verdict != t.shaped_reward for t in scored):
        yield f"{changed} of {len(scored)} rewards differ from the outcome"
    if shortened := sum(t.cut_token_count for t in scored):
        yield f"{shortened:,} tokens left out"


def _of_budget(traces: Traces) -> Iterator[str]:
    config = traces.run.config
    limit = 0 if config is None else config.rollout.max_new_tokens
    ended = [t.response_token_count for t in traces.trajectories if t.finish_reason is FinishReason.LENGTH]
    if below := Counter(tokens for tokens in ended if tokens < limit):
        budgets = " ".join(f"{tokens}" for tokens in sorted(below))
        yield f"{sum(below.values())} of {len(traces.trajectories)} answers ended at {budgets} tokens"


def _of_masks(traces: Traces) -> Iterator[str]:
    for mask, tokens in traces.summary.masked_tokens.items():
        if mask != "stale":  # a rule of the schedule, not a method
            yield f"{mask} masked {tokens:,} tokens"


def _of_update_scale(traces: Traces) -> Iterator[str]:
    if (factor := traces.summary.mean_rate_factor) is not None:
        yield f"rate times {factor:.3f}"


def _of_replay(traces: Traces) -> Iterator[str]:
    if (share := traces.summary.replayed_share) is not None:
        yield f"{percent(share)} of the trajectories replayed"


def _of_advantage(traces: Traces) -> Iterator[str]:
    if (size := _mean(traces, "batch.advantage_abs_mean")) > 0:
        yield f"mean size {size:.3f}"
    if traces.summary.skipped_trajectories:
        yield f"{traces.summary.skipped_trajectories} trajectories skipped"


def _of_loss(traces: Traces) -> Iterator[str]:
    if (norm := _mean(traces, "grad_norm")) > 0:
        yield f"mean gradient norm {norm:.3g}"


def _of_old_logprobs(traces: Traces) -> Iterator[str]:
    if traces.records:
        yield f"mean deviation of the ratio {_mean(traces, 'policy.ratio.std'):.2g}"


def _mean(traces: Traces, name: str) -> float:
    values = [value for record in traces.records if math.isfinite(value := number(record, name))]
    return float(np.mean(values)) if values else 0.0


_TRACES: Mapping[str, Callable[[Traces], Iterator[str]]] = MappingProxyType(
    {
        "sampler": _of_sampler,
        "planner": _of_planner,
        "group_shaper": _of_shaper,
        "token_budget": _of_budget,
        "advantage": _of_advantage,
        "loss": _of_loss,
        "masks": _of_masks,
        "old_logprobs": _of_old_logprobs,
        "update_scale": _of_update_scale,
        "replay": _of_replay,
    }
)
"""Traces by point, as ``rollmesh demo-methods`` names it."""
