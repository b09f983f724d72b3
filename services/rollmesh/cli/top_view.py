"""Screen of ``rollmesh top``, rendered from the gateway's responses."""

from __future__ import annotations

from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollmesh.gateway.models.live import Overview, RolloutSpan, Series, StalenessBin, Timeline
from rollmesh.report.formats import plus_minus

SHOWN_SERIES = ("reward_mean", "response_length_mean", "staleness_mean", "tokens_per_second")
_STATES = {"running": "green", "complete": "green", "starting": "cyan", "paused": "yellow", "recovering": "yellow"}
_VERSION_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_COLUMNS = 40
_ROLLOUT_COLUMNS = 60
_BAR_COLUMNS = 24


def screen(
    overview: Overview, timeline: Timeline, series: Sequence[Series], *, rollouts: int, note: str = ""
) -> RenderableType:
    """Render the screen with at most ``rollouts`` rollouts of the timeline, and ``note`` as the last line."""
    rows: list[RenderableType] = [_head(overview)]
    rows.append(Columns([_queue(overview), _staleness(overview)], padding=(0, 4)))
    if overview.generators:
        rows.append(_generators(overview, 12))
    curves = _curves(series)
    if curves is not None:
        rows.append(curves)
    if rollouts > 0 and any(span.end is None for span in timeline.rollouts):
        rows.append(_timeline(timeline, rollouts))
    if note:
        rows.append(_plain(note, style="dim"))
    return Group(*rows)


def _head(overview: Overview) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    state = Text(overview.state, style=f"bold {_STATES.get(overview.state, 'red')}")
    if overview.age_seconds > 5:
        state.append(f", as of {overview.age_seconds:.0f} s ago", style="yellow")
    grid.add_row("state", state)
    if overview.waiting_for:
        grid.add_row("waits for", _plain(overview.waiting_for))
    bar = ProgressBar(total=max(1, overview.train_steps), completed=max(0, overview.train_step), width=_BAR_COLUMNS)
    grid.add_row("train step", Columns([Text(f"{overview.train_step} of {overview.train_steps}"), bar]))
    version = f"{overview.newest_version}"
    if overview.pinned_version is not None:
        version += f", pinned to {overview.pinned_version}"
    if overview.rollback_to is not None:
        version += f", rolling back to {overview.rollback_to}"
    grid.add_row("policy version", version)
    rates = overview.rates
    grid.add_row("throughput", f"{rates.saved_tokens_per_second:,.0f} tokens/s, {rates.finished_per_second:.1f} done/s")
    memory = f"{overview.memory.used_bytes / 1e6:,.0f} MB"
    grid.add_row(
        "queue memory", f"{memory}, {overview.memory.ratio:.1%} of its limit" if overview.memory.max_bytes else memory
    )
    if overview.evaluations:
        point = overview.evaluations[-1]
        error = plus_minus(point.standard_error)
        grid.add_row("evaluation", f"{point.mean:.3f} {error} (version {point.policy_version})")
    return Panel(grid, title=_plain(f"rollmesh {overview.run}"), title_align="left")


def _queue(overview: Overview) -> RenderableType:
    table = Table("queue", "", box=None, title_justify="left")
    for state, count in overview.trajectories.items():
        total = f"{count} of {overview.pool_size}" if state == "leased" else f"{count}"
        table.add_row(f"{state} trajectories", total)
    for state, count in overview.groups.items():
        table.add_row(f"{state} groups", str(count))
    for drop in overview.drops:
        table.add_row(_plain(f"dropped: {drop.reason.replace('_', ' ')}"), str(drop.groups), style="yellow")
    if overview.dead_letters:
        table.add_row("dead letters", str(overview.dead_letters), style="red")
    return table


def _staleness(overview: Overview) -> RenderableType:
    table = Table("staleness", "groups waiting", "", "trained last", "", box=None)
    waiting, trained = overview.staleness.queue, overview.staleness.trained
    counts = {"waiting": _by_steps(waiting), "trained": _by_steps(trained)}
    for steps in range(max([overview.staleness.bound, *counts["waiting"], *counts["trained"]]) + 1):
        cells = [str(steps)]
        for bins in counts.values():
            count = bins.get(steps, 0)
            largest = max(bins.values(), default=0)
            cells += [str(count), "█" * round(16 * count / largest) if largest else ""]
        table.add_row(*cells, style="yellow" if steps > overview.staleness.bound else None)
    return table


def _by_steps(bins: Sequence[StalenessBin]) -> dict[int, int]:
    return {each.staleness: each.count for each in bins}


def _generators(overview: Overview, most: int) -> RenderableType:
    table = Table("generator", "version", "behind", "running", "waiting", "cache", "preempted", "state", box=None)
    for generator in overview.generators[:most]:
        load = f"{generator.running} of {generator.slots}"
        state = "serving" if generator.serving else generator.reason or "not serving"
        colour = _colour(generator.policy_version) if generator.policy_version >= 0 else "dim"
        version = Text(str(generator.policy_version), style=colour)
        cache = f"{generator.kv_tokens_used / max(1, generator.kv_token_capacity):.0%}"
        counts = (str(generator.versions_behind), load, str(generator.waiting), cache, str(generator.preemptions))
        table.add_row(_plain(generator.address), version, *counts, _plain(state))
    hidden = overview.generator_count - min(most, len(overview.generators))
    if hidden:
        table.add_row(Text(f"and {hidden} more", style="dim"))
    return table


def _curves(series: Sequence[Series]) -> RenderableType | None:
    table = Table("curve", "newest", "", box=None)
    for each in series:
        if each.mean:
            table.add_row(each.name.replace("_", " "), f"{each.mean[-1]:,.3g} {each.unit}", sparkline(each.mean))
    return table if table.row_count else None


def sparkline(values: Sequence[float]) -> str:
    """Draw a curve on one line, with the newest values on the right."""
    shown = values[-_SPARK_COLUMNS:]
    low, high = min(shown), max(shown)
    span = high - low
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] if span else _BARS[0] for value in shown)


def _timeline(timeline: Timeline, most: int) -> RenderableType:
    """Draw the oldest rollouts in flight as lines coloured by policy version."""
    begin = timeline.time - timeline.window_seconds
    in_flight = [span for span in timeline.rollouts if span.end is None]
    table = Table("rollout", "tokens", f"last {timeline.window_seconds:.0f} s, a colour per version", box=None)
    for span in sorted(in_flight, key=lambda span: span.start)[:most]:
        table.add_row(_plain(span.id), str(span.tokens), rollout_line(span, begin, timeline.time))
    hidden = timeline.in_flight - min(most, len(in_flight))
    if hidden > 0:
        table.add_row(Text(f"and {hidden} more", style="dim"))
    return table


def rollout_line(span: RolloutSpan, begin: float, end: float) -> Text:
    """Draw one rollout between two times."""
    width = _ROLLOUT_COLUMNS
    cells = [(" ", "")] * width

    def fill(first: float, last: float, mark: str, style: str) -> None:
        start = max(0, int((first - begin) / (end - begin) * width))
        stop = min(width, max(start + 1, int((last - begin) / (end - begin) * width)))
        for at in range(start, stop):
            cells[at] = (mark, style)

    if end > begin:
        fill(span.start, end if span.end is None else span.end, "─", "dim")
        for interval in span.intervals:
            if interval.end >= begin:
                fill(interval.start, interval.end, "━", _colour(interval.policy_version))
    return Text.assemble(*cells)


def _plain(text: str, style: str = "") -> Text:
    """Return untrusted text without markup, and with control characters replaced."""
    return Text("".join(c if c.isprintable() else "\ufffd" for c in text), style=style)


def _colour(version: int) -> str:
    return _VERSION_COLOURS[version % len(_VERSION_COLOURS)]
