"""Table of simulated arms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from rollmesh.sim.figures import Figures

_COLUMNS: Mapping[str, Callable[[Figures], str]] = {
    "updates/h": lambda f: f"{f.updates_per_hour:,.1f}",
    "s/update p50": lambda f: f"{f.update_seconds_p50:,.0f}",
    "p90": lambda f: f"{f.update_seconds_p90:,.0f}",
    "trained tok/s": lambda f: f"{f.trained_tokens_per_second:,.0f}",
    "bubble": lambda f: f"{f.bubble_ratio:.0%}",
    "off-policy": lambda f: f"{f.off_policy_token_share:.0%}",
    "staleness": lambda f: f"{f.mean_staleness:.2f}, max {max(f.staleness)}",
    "version span": lambda f: f"{f.version_span:.2f}",
    "preempted": lambda f: f"{f.preemptions:,}",
    "re-prefill": lambda f: f"{f.reprefill_share:.0%}",
    "wasted": lambda f: _wasted(f),
    "trainer waits": lambda f: f"{f.trainer_wait_share:.0%}",
    "device h/update": lambda f: f"{f.device_hours_per_update:,.2f}",
}


def figures_table(results: Sequence[tuple[str, Figures]]) -> Table:
    """Return a table with one row per arm."""
    table = Table("arm", *_COLUMNS, title="simulated, in virtual time")
    for name, found in results:
        table.add_row(name, *(show(found) for show in _COLUMNS.values()))
    return table


def _wasted(found: Figures) -> str:
    """Return the largest reasons; what remains at the end of the run is no waste of the schedule."""
    reasons = {reason: count for reason, count in found.wasted_tokens.items() if reason != "run_complete"}
    largest = sorted(reasons.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{reason} {count / 1e6:.2f}M" for reason, count in largest) or "0"
