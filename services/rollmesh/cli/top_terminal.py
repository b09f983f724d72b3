"""Terminal view of a run, with the data of its page."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from rollmesh.cli.common import shutdown_event
from rollmesh.cli.gateway_client import GatewayClient, GatewayError
from rollmesh.cli.top_view import SHOWN_SERIES, screen
from rollmesh.gateway.models.items import Done
from rollmesh.gateway.models.live import Overview, SeriesAnswer, Timeline
from rollmesh.report.console import output_console
from rollmesh.runtime.lifecycle import wait_or_shutdown
from rollmesh.runtime.tasks import BackgroundTasks

_HEAD_LINES = 34
"""Approximate number of screen lines outside the timeline."""


async def show(run: Path | None, url: str | None, *, once: bool, as_json: bool, interval: float) -> None:
    """Print the overview or one screen, or draw until a key or Ctrl-C ends it."""
    async with GatewayClient.of(run, url) as client:
        if as_json:
            typer.echo((await client.request("overview")).decode())
        elif once or not sys.stdout.isatty():
            output_console().print(await _screen(client, rollouts=8))
        else:
            await _watch(client, interval)


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
