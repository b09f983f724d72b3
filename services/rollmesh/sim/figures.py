"""Figures of a simulated run, for the table and for JSON."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles

from rich.markup import escape
from rich.table import Table

from rollmesh.mesh import DropReason
from rollmesh.sim.fleet import FleetWork
from rollmesh.sim.simulated_mesh import SimulatedRun

_WARM_UP_SHARE = 0.1
_MOST_AGES = 10
"""Numbers of train steps that the histogram of staleness tells apart."""


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


def figures(run: SimulatedRun, devices: int) -> Figures:
    """Measure a run; ``devices`` are those of the whole mesh."""
    first = max(1, int(_WARM_UP_SHARE * len(run.updates))) if len(run.updates) > 1 else 0
    updates, work = run.updates[first:], run.work[-1].since(run.work[first - 1]) if first else run.work[-1]
    began = run.updates[first - 1].trained_at if first else 0.0
    seconds = max(updates[-1].trained_at - began, 1e-9)
    tokens: Counter[int] = Counter()
    oldest: Counter[int] = Counter()
    for update in updates:
        tokens.update(update.tokens_by_staleness)
        oldest.update(update.trajectories_by_staleness)
    trained, trajectories = tokens.total(), sum(update.trajectories for update in updates)
    each = [later - earlier for earlier, later in pairwise([began, *(update.trained_at for update in updates)])]
    tenths = quantiles(each, n=10, method="inclusive") if len(each) > 1 else each * 9
    waits = sum(update.trainer_wait_seconds for update in updates) / seconds
    return Figures(
        updates=len(updates),
        updates_per_second=len(updates) / seconds,
        updates_per_hour=3600 * len(updates) / seconds,
        update_seconds=tuple(each),
        update_seconds_p50=tenths[4],
        update_seconds_p90=tenths[8],
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


_COLUMNS: Mapping[str, Callable[[Figures], str]] = {
    "updates/h": lambda f: f"{f.updates_per_hour:,.1f}",
    "s/update p50": lambda f: f"{f.update_seconds_p50:,.0f}",
    "p90": lambda f: f"{f.update_seconds_p90:,.0f}",
    "trained tok/s": lambda f: f"{f.trained_tokens_per_second:,.0f}",
    "bubble": lambda f: f"{f.bubble_ratio:.0%}",
    "of rollout": lambda f: f"{f.rollout_bubble_ratio:.1%}",
    "off-policy": lambda f: f"{f.off_policy_token_share:.0%}",
    "staleness, % at 0, 1, ..": lambda f: f"{f.mean_staleness:.2f}: {_histogram(f.staleness)}",
    "version span": lambda f: f"{f.version_span:.2f}",
    "preempted": lambda f: f"{f.preemptions:,}",
    "re-prefill": lambda f: f"{f.reprefill_share:.0%}",
    "wasted": lambda f: _wasted(f),
    "trainer waits": lambda f: f"{f.trainer_wait_share:.0%}",
    "device h/update": lambda f: f"{f.device_hours_per_update:,.2f}",
}


def figures_tables(results: Sequence[tuple[str, Figures]], width: int) -> list[Table]:
    """Return tables with one row per arm; columns that exceed ``width`` characters go to the next table."""
    columns = [(title, [show(found) for _, found in results]) for title, show in _COLUMNS.items()]
    # A column has one line and two spaces beside its widest text.
    first, *widths = (
        max(map(len, (title, *cells))) + 3 for title, cells in [("arm", [name for name, _ in results]), *columns]
    )
    blocks: list[list[tuple[str, list[str]]]] = [[]]
    used = first
    for column, column_width in zip(columns, widths, strict=True):
        if blocks[-1] and used + column_width >= width:
            blocks.append([])
            used = first
        blocks[-1].append(column)
        used += column_width
    tables: list[Table] = []
    for block in blocks:
        table = Table(title=None if tables else "simulated, in virtual time")
        # A name that is wider than the terminal is folded, never cut.
        table.add_column("arm", overflow="fold")
        for title, _ in block:
            table.add_column(title, no_wrap=True)
        for (name, _), *row in zip(results, *(cells for _, cells in block), strict=True):
            table.add_row(escape(name), *row)
        tables.append(table)
    return tables


def _histogram(staleness: Mapping[int, int]) -> str:
    """Return the percentages of the trajectories by staleness from 0 on; large ones share the last number."""
    total = sum(staleness.values())
    shares = [staleness.get(age, 0) for age in range(min(max(staleness, default=0), _MOST_AGES - 1) + 1)]
    rest = total - sum(shares)
    texts = [f"{count / max(1, total):.0%}".rstrip("%") for count in shares]
    return " ".join([*texts, f"{_MOST_AGES}+: {rest / total:.0%}".rstrip("%")] if rest else texts)


def _wasted(found: Figures) -> str:
    """Return the largest reasons; what remains at the end of the run is no waste of the schedule."""
    reasons = {reason: count for reason, count in found.wasted_tokens.items() if reason != DropReason.RUN_COMPLETE}
    largest = sorted(reasons.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{reason} {count / 1e6:.2f}M" for reason, count in largest) or "0"
