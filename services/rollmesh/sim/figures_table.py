"""Tables of simulated arms, none wider than the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from rollmesh.mesh import DropReason
from rollmesh.sim.figures import Figures

_MOST_AGES = 10
"""Numbers of train steps that the histogram of staleness tells apart."""
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
    names = Column("arm", [name for name, _ in results])
    columns = [Column(title, [show(found) for _, found in results]) for title, show in _COLUMNS.items()]
    blocks: list[list[Column]] = [[]]
    used = names.width
    for column in columns:
        if blocks[-1] and used + column.width >= width:
            blocks.append([])
            used = names.width
        blocks[-1].append(column)
        used += column.width
    tables = [_table(names, block) for block in blocks]
    tables[0].title = "simulated, in virtual time"
    return tables


class Column(NamedTuple):
    """Title and cells of a column, one cell per arm."""

    title: str
    cells: Sequence[str]

    @property
    def width(self) -> int:
        """Characters of the widest cell, with one line and two spaces."""
        return max(len(text) for text in (self.title, *self.cells)) + 3


def _table(names: Column, columns: Sequence[Column]) -> Table:
    table = Table()
    # A name that is wider than the terminal is folded, never cut.
    table.add_column(names.title, overflow="fold")
    for column in columns:
        table.add_column(column.title, no_wrap=True)
    for name, *cells in zip(names.cells, *(column.cells for column in columns), strict=True):
        table.add_row(escape(name), *cells)
    return table


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
