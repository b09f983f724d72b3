"""``rollmesh top``: terminal view of a run, with the data of its page."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollmesh.cli.common import JsonOption, run_async, run_of, shutdown_event
from rollmesh.cli.gateway_client import GatewayClient, GatewayError
from rollmesh.cli.top_view import SHOWN_SERIES, screen
from rollmesh.gateway.models.items import Done
from rollmesh.gateway.models.live import Overview, SeriesAnswer, Timeline
from rollmesh.launcher.run_folder import has_launcher
from rollmesh.report.console import output_console
from rollmesh.report.run_ending import ending
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.lifecycle import wait_or_shutdown
from rollmesh.runtime.tasks import BackgroundTasks

_HEAD_LINES = 34
"""Approximate number of screen lines outside the timeline."""

RunOption = Annotated[Path | None, typer.Argument(help="Run folder (or a run file).", metavar="[RUN_FOLDER]")]
UrlOption = Annotated[str | None, typer.Option(help="Address of the gateway, instead of a run folder.")]
OnceOption = Annotated[bool, typer.Option("--once", help="Print one screen and exit.")]
IntervalOption = Annotated[float, typer.Option(help="Seconds between two updates.", min=0.2, max=60.0)]


def top(
    run: RunOption = None,
    url: UrlOption = None,
    once: OnceOption = False,
    as_json: JsonOption = False,
    interval: IntervalOption = 1.0,
) -> None:
    """Watch a run in the terminal: queue, staleness, generators, curves, the oldest rollouts in flight.

    For a run that is not in progress, show its result.

    q quits, p pauses and resumes the run (with the token of the run folder, or ROLLMESH_GATEWAY__TOKEN).
    """

    async def main() -> None:
        if run is not None and url is None and not as_json and (ended := _ended(run)):
            output_console().print(ended)
            return
        async with GatewayClient.of(run, url) as client:
            if as_json:
                typer.echo((await client.request("overview")).decode())
            elif once or not sys.stdout.isatty():
                output_console().print(await _screen(client, rollouts=8))
            else:
                await _watch(client, interval)

    run_async(main)


def _ended(run: Path) -> RenderableType | None:
    """Return the result of a run that is not in progress on this machine; None for any other run."""
    config, folder = run_of(run)
    if not config.network.shared_folder or has_launcher(folder.path) or read_endpoints(folder.path, "gateway"):
        return None
    table = Table(title=f"run {config.name}", title_justify="left", show_header=False, box=None)
    for name, value in ending(folder.path):
        table.add_row(Text(name, style="dim"), Text(value))
    return table


async def _screen(client: GatewayClient, *, rollouts: int, note: str = "") -> RenderableType:
    overview = await client.read("overview", Overview)
    timeline = await client.read("timeline", Timeline)
    names = ",".join(SHOWN_SERIES)
    series = (await client.read(f"series?names={names}&points=40", SeriesAnswer)).series
    return screen(overview, timeline, series, rollouts=rollouts, note=note)


async def _watch(client: GatewayClient, interval: float) -> None:
    """Redraw until q or Ctrl-C; show and retry while the gateway is unreachable."""
    console, stop = output_console(), shutdown_event()
    keys = _Keys(client, stop)
    with _pressed_keys(keys), Live(console=console, screen=True, auto_refresh=False) as live:
        while not stop.is_set():
            try:
                rollouts = max(0, console.height - _HEAD_LINES)
                shown = await _screen(client, rollouts=rollouts, note=keys.note or "q quits, p pauses and resumes")
            except GatewayError as error:
                shown = Text(f"{error}\nretrying every {interval:g} s; q quits", style="red")
            live.update(shown, refresh=True)
            await wait_or_shutdown(stop, interval)


@dataclass(slots=True)
class _Keys:
    """Actions of keys, with the result of the last one."""

    client: GatewayClient
    stop: asyncio.Event
    note: str = ""
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks)

    def press(self, key: str) -> None:
        """Perform the action of one key; ignore unknown keys."""
        if key == "q":
            self.stop.set()
        elif key == "p" and not self._tasks:
            self._tasks.start(self._toggle())

    async def _toggle(self) -> None:
        try:
            overview = await self.client.read("overview", Overview)
            path = "resume" if overview.paused_by_person else "pause"
            self.note = (await self.client.read(path, Done, "POST")).done
        except GatewayError as error:
            self.note = str(error)


@contextlib.contextmanager
def _pressed_keys(keys: _Keys) -> Iterator[None]:
    """Read single keys without Enter if standard input is a terminal."""
    if not sys.stdin.isatty() or sys.platform == "win32":
        yield
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()
    tty.setcbreak(descriptor)

    def read_keys() -> None:
        for key in os.read(descriptor, 64).decode(errors="ignore"):
            keys.press(key)

    loop.add_reader(descriptor, read_keys)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
