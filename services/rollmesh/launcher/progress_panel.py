"""Console progress of a run: a live panel on a terminal, one line every few seconds or per train step elsewhere."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollmesh.launcher.console_notes import RewardNotes
from rollmesh.launcher.timeline_recorder import MeshSample
from rollmesh.mesh import MeshView
from rollmesh.report.console import duration
from rollmesh.runtime.growing_files import JsonLinesTail
from rollmesh.step_metrics import Pace, RateWindow

TRAINING = "the last train step"
"""Event that the launcher waits for during training."""
_LINE_SECONDS = 5.0
_BAR_COLUMNS = 40
_PANEL_COLUMNS = 4
"""Columns of the panel's border and padding."""
_NOTHING = "-"


class RunProgress:
    """Console progress of one run, used as a context manager."""

    def __init__(self, console: Console, *, train_steps: int, metrics: Path, samples: Path, live: bool = True) -> None:
        """Without ``live`` each train step is one line, so that a debugger can use the terminal."""
        self._console = console
        self._steps = train_steps
        self._metrics = JsonLinesTail(metrics)
        self._samples = JsonLinesTail(samples)
        self._rates = RateWindow()
        self._pace = Pace()
        self._reward_notes = RewardNotes(train_steps)
        self._start = time.monotonic()
        self._report: Mapping[str, Any] = {}
        self._sample: Mapping[str, Any] = {}
        self._last_line = 0.0
        self._per_step = not live
        panel = live and console.is_terminal
        self._live = Live(console=console, refresh_per_second=4, transient=True) if panel else None

    def __enter__(self) -> "RunProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Print one line above the live panel."""
        # Do not wrap: a pipe has no width, and the assumed 80 columns would split the line for grep.
        line = Text.assemble((time.strftime("%H:%M:%S"), "dim"), " ", text)
        # A closed pipe or terminal must not stop the run.
        with contextlib.suppress(OSError):
            self._console.print(line, highlight=False, soft_wrap=True)

    def update(self, sample: MeshSample, waiting_for: str = "", agents_url: str | None = None, waits: str = "") -> None:
        """Show the newest sample of the mesh and the newest step report.

        ``agents_url`` is the address where the agents of the run connect; None for a run that makes its own rollouts.
        ``waits`` is what the services wait for, with the last error.
        """
        reports = self._metrics.read()
        for report in reports:
            self._report = report
            for text in self._reward_notes.read(report):
                self.note(text)
            if "train_step" in report and "time" in report:
                self._pace.add(report["train_step"], report["time"])
        for text in self._reward_notes.equal(sample.view.filtered_in_a_row):
            self.note(text)
        for record in self._samples.read():
            self._sample = record
        (rate,) = self._rates.update(sample.t, sample.generated_token_total)
        hold = _hold_reason(sample, agents_url) or _NOTHING
        facts = {
            **_facts(sample, self._report, rate, self._steps, hold),
            "waiting": waits or _NOTHING,
            "time": self._time(sample.view, waits),
        }
        serving = any(g.serving for g in sample.generators)
        waited = time.monotonic() - self._last_line >= _LINE_SECONDS
        due = bool(reports) if self._per_step and serving else waited
        phase = f"waiting for {waiting_for}" if waiting_for else ""
        if waiting_for == TRAINING:
            phase = "training" if serving else "waiting for a generator that serves a policy"
        if self._live is not None:
            self._live.update(self._panel(sample, facts, phase))
        elif due:
            self._last_line = time.monotonic()
            if serving:
                self.note(" | ".join(f"{name} {value}" for name, value in facts.items() if value != _NOTHING))
            else:
                self.note(f"{phase}; {waits}" if waits else phase)

    def _time(self, view: MeshView, waits: str) -> str:
        # A service that waits makes the pace of the steps no forecast.
        left = None if waits else duration(self._pace.remaining(view.trained_step, self._steps, view.now))
        return f"{duration(time.monotonic() - self._start)}{f', about {left} left' if left else ''}"

    def _panel(self, sample: MeshSample, facts: Mapping[str, str], phase: str) -> Panel:
        bar = ProgressBar(total=self._steps, completed=max(sample.view.trained_step, 0), width=_BAR_COLUMNS)
        table = Table.grid(padding=(0, 2))
        for at, (name, value) in enumerate(facts.items()):
            row = Columns([Text(value), bar]) if at == 0 else Text(value)
            table.add_row(Text(name, style="dim"), row)
        rows: list[Any] = [table]
        if self._sample:
            rows.append(_completion(self._sample, self._console.width - _PANEL_COLUMNS))
        if phase:
            rows.append(Text(phase, style="dim italic"))
        return Panel(Group(*rows), title="rollmesh", title_align="left")


def _completion(sample: Mapping[str, Any], columns: int) -> Text:
    """Format the newest sample completion on one line, truncated at the panel's width to keep the height constant."""
    reward = _number(sample, "reward", ".2f")
    text = " ".join(f"{sample.get('prompt', '')} => {sample.get('completion', '')}".split())
    line = Text.assemble((f"sample, reward {reward}  ", "dim"), text)
    line.truncate(max(20, columns), overflow="ellipsis")
    return line


def _facts(sample: MeshSample, report: Mapping[str, Any], rate: float, steps: int, hold: str) -> dict[str, str]:
    view = sample.view
    served = sorted({g.policy_version for g in sample.generators if g.serving})
    drops = [f"{reason.replace('_', ' ')} {count}" for reason, count in sorted(sample.dropped.items()) if count]
    return {
        "step": f"{view.trained_step}/{steps}",
        "queue": hold,
        "reward": _number(report, "reward_mean", ".3f"),
        "length": _number(report, "response_length_mean", ".0f"),
        "tokens/s": f"{rate:,.0f}",
        "version": f"{view.policy_version}, served {', '.join(map(str, served)) or 'by no generator'}",
        "in flight": f"{view.leased} of {view.leasable}",
        "ready": f"{view.ready_groups} groups",
        "staleness": _number(report, "staleness_mean", ".2f"),
        "off-policy": _number(report, "off_policy_token_share", ".0%"),
        "dropped": ", ".join(drops) or _NOTHING,
    }


def _hold_reason(sample: MeshSample, agents_url: str | None) -> str:
    """Return the reason why no new rollouts start; empty while they do."""
    view, pinned = sample.view, sample.pinned_version
    if view.recovering:
        return "recovering: Redis was restarted, workers and trainer report their state"
    if view.user_paused:
        return "paused by an operator"
    if view.launcher_paused:
        return "paused by the launcher, for an evaluation"
    if pinned is not None and view.desired.start_at_version > pinned:
        return f"pinned to version {pinned}, too old for new rollouts; rollmesh pin RUN --release serves the newest"
    if agents_url is not None and not view.leased:
        return f"waiting for agents, which open sessions at {agents_url}/sessions"
    return ""


def _number(report: Mapping[str, Any], key: str, spec: str) -> str:
    value = report.get(key)
    return format(value, spec) if isinstance(value, int | float) else _NOTHING
