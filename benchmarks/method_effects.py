"""Traces of a method in a short run: how its row in ``make methods`` shows that it acted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.config.recipes import resolve_model
from rollmesh.errors import CheckpointError, DataError
from rollmesh.report.audit import open_checkpoints
from rollmesh.report.console import percent
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.series import newest_per_step
from rollmesh.report.summary import RunSummary, summarise
from rollmesh.step_metrics import number
from rollmesh.tasks.sources.source_protocol import build_prompt_source
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, Group

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


def read_traces(folder: Path) -> Traces:
    """Read the traces of a run. Raises DataError for a missing folder."""
    run = RecordedRun(folder)
    groups: list[Group] = []
    try:
        store = open_checkpoints(run)
        for step in store.batch_steps():
            groups += store.stored_batch(step).batch.groups
    except (CheckpointError, DataError):
        pass  # the audit of the run names what is missing
    records = tuple(newest_per_step(run.metrics.records))
    return Traces(run=run, summary=summarise(run), records=records, groups=tuple(groups))


def effect_of(traces: Traces, method: str) -> str:
    """Return the traces of a method, as ``masks/m2po``; ``no effect`` without one, empty for a run without a step."""
    if not traces.records:
        return ""
    point = method.partition("/")[0]
    found = _in_summary(traces.summary, point) if point in _IN_SUMMARY else _in_groups(traces, point)
    return ", ".join((*found, *_in_step_reports(traces, point))) or NO_EFFECT


_IN_SUMMARY = ("masks", "update_scale", "replay", "advantage", "loss", "old_logprobs")


def _in_summary(summary: RunSummary, point: str) -> Iterator[str]:
    if point == "masks":
        # The mask "stale" is a rule of the schedule, not a method.
        yield from (f"{mask} masked {n:,} tokens" for mask, n in summary.masked_tokens.items() if mask != "stale")
    elif point == "update_scale" and summary.mean_rate_factor is not None:
        yield f"rate times {summary.mean_rate_factor:.3f}"
    elif point == "replay" and summary.replayed_share is not None:
        yield f"{percent(summary.replayed_share)} of the trajectories replayed"
    elif point == "advantage" and summary.skipped_trajectories:
        yield f"{summary.skipped_trajectories} trajectories skipped"


def _in_step_reports(traces: Traces, point: str) -> Iterator[str]:
    """Yield the mean of the step reports' figure that a method of this point changes."""

    def mean(name: str) -> float:
        values = [value for record in traces.records if math.isfinite(value := number(record, name))]
        return float(np.mean(values)) if values else 0.0

    if point == "advantage" and (size := mean("batch.advantage_abs_mean")) > 0:
        yield f"mean size {size:.3f}"
    elif point == "loss" and (norm := mean("grad_norm")) > 0:
        yield f"mean gradient norm {norm:.3g}"
    elif point == "old_logprobs":
        yield f"mean deviation of the ratio {mean('policy.ratio.std'):.2g}"


def _in_groups(traces: Traces, point: str) -> Iterator[str]:
    config, summary = traces.run.config, traces.summary
    trajectories = [trajectory for group in traces.groups for trajectory in group.trajectories]
    match point:
        case "sampler":
            completed = {name: totals["completed"] for name, totals in summary.domains.items()}
            if total := sum(completed.values()):
                yield "completed " + " ".join(f"{name} {percent(count / total)}" for name, count in completed.items())
            if moved := _groups_out_of_order(traces):
                yield f"{moved} of {len(traces.groups)} groups have another prompt than in order"
        case "planner":
            yield from _of_planner(traces)
        case "group_shaper":
            verdicts = [
                (t.outcome.verdict, t.shaped_reward)
                for t in trajectories
                if t.outcome is not None and t.outcome.verdict is not None
            ]
            if changed := sum(verdict != reward for verdict, reward in verdicts):
                yield f"{changed} of {len(verdicts)} rewards differ from the outcome"
            if shortened := sum(t.cut_token_count for t in trajectories):
                yield f"{shortened:,} tokens left out"
        case "token_budget":
            limit = 0 if config is None else config.rollout.max_new_tokens
            ends = [t.response_token_count for t in trajectories if t.finish_reason is FinishReason.LENGTH]
            if below := Counter(tokens for tokens in ends if tokens < limit):
                budgets = " ".join(f"{tokens}" for tokens in sorted(below))
                yield f"{below.total()} of {len(trajectories)} answers ended at {budgets} tokens"


def _of_planner(traces: Traces) -> Iterator[str]:
    config, summary = traces.run.config, traces.summary
    sizes = summary.rollouts_per_group
    if config is not None and set(sizes) - {config.schedule.group_size}:
        yield " to ".join(f"{size}" for size in sorted({min(sizes), max(sizes)})) + " rollouts a group"
    if summary.rounds_per_group is not None and summary.rounds_per_group > 1:
        yield f"{summary.rounds_per_group:.2f} rounds a group"
    if summary.surplus_tokens:
        yield f"{summary.surplus_tokens:,} surplus tokens"


def _groups_out_of_order(traces: Traces) -> int:
    """Return the number of trained groups whose prompt is not that of their position."""
    config, moved = traces.run.config, 0
    if config is None:
        return 0
    source = build_prompt_source(config.data, Tokenizer(resolve_model(config.model.path)), config.seed)
    for group in traces.groups:
        epoch, _, index = group.group_id.removeprefix("e").partition("-")
        if index.isdigit():  # a replayed dead letter has no position of its own
            expected = source.prompt(int(epoch), int(index)).prompt_id
            moved += expected != group.trajectories[0].prompt.prompt_id
    return moved
