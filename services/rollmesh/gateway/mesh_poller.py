"""The one loop that looks at the mesh; every reader is served from what it saw last."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.config import RunConfig
from rollmesh.errors import StoreError
from rollmesh.gateway.api_errors import Busy
from rollmesh.gateway.curves import Curves
from rollmesh.gateway.events import EventHub
from rollmesh.gateway.gateway_metrics import GatewayMetrics
from rollmesh.gateway.mesh_snapshot import MeshSnapshot, RateWindow, build_overview, finished_evaluations, read_snapshot
from rollmesh.gateway.models import EvaluationView, Overview, SnapshotEvent, TickEvent, Timeline, TimelineDelta
from rollmesh.gateway.step_report_feed import FileReports, ReportFeed
from rollmesh.gateway.timeline_tracker import TimelineTracker, new_ids
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.health import Health
from rollmesh.runtime.json_lines import JsonLinesTail
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.scheduling import resolve_schedule
from rollmesh.store import TrajectoryStore
from rollmesh.store.inspection import TrajectoryMark

LOOP = "sampler"
WINDOW_SECONDS = 120.0
_LOOK_SECONDS = 10.0
"""A look that takes longer is given up."""
_SLOW_SECONDS = 5.0
"""Evaluations and endpoint files change rarely and are read so often."""
_FOLDER_SECONDS = 2.0
"""A look waits so long for the run folder."""
_SCAN_COUNT = 512
"""Held trajectories looked through per session and look, in search of new ones."""

_HISTORY = {"in_flight": "leased", "ready_groups": "ready_groups", "memory_ratio": "memory_ratio"}
"""Field of the launcher's look by curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FolderNews:
    """What the run folder has that is new."""

    reports: FileReports
    history: Sequence[Mapping[str, Any]]
    running: Mapping[str, int]


class MeshPoller:
    """Looks at the mesh about every second and keeps what it saw, in bounded memory."""

    def __init__(self, store: TrajectoryStore, config: RunConfig, metrics: GatewayMetrics, health: Health) -> None:
        self._store = store
        self._config = config
        self._metrics = metrics
        self._health = health
        self._schedule = resolve_schedule(config.schedule, config.trainer.train_steps)
        self._lanes = TimelineTracker(config.gateway.timeline_rollouts, WINDOW_SECONDS)
        self._cursors: dict[str, int] = {}
        self._rates = RateWindow()
        folder = Path(config.folder)
        self.curves = Curves()
        self._reports = ReportFeed(folder, store, self.curves)
        self._history = JsonLinesTail(folder / "timeline.jsonl")
        self._history_rates = RateWindow()
        self._begun = time.time()
        self._evaluations: list[EvaluationView] = []
        self._running: Mapping[str, int] = {}
        self._slow_at = 0.0
        self._overview: Overview | None = None
        self._looked_at = 0.0
        self._reading: asyncio.Future[_FolderNews] | None = None
        self._folder_complaint = ""
        self._complaint = "the mesh has not been looked at yet"
        self._log = get_logger("gateway")
        self.hub = EventHub(self.snapshot, config.gateway.most_event_clients, metrics)

    async def run(self, shutdown: Shutdown) -> None:
        """Look until ``shutdown``; then every event stream ends."""
        self._health.watch(LOOP, 3 * _LOOK_SECONDS + self._config.gateway.sample_seconds)
        try:
            while not shutdown.is_set():
                begun = time.monotonic()
                await self.step()
                self._health.beat(LOOP)
                # Without the store, too: a page that says since when Redis is away serves people better than none.
                self._health.set_ready(True)
                left = self._config.gateway.sample_seconds - (time.monotonic() - begun)
                # A moment of rest even when looks take longer than their interval: requests need the loop, too.
                await wait_or_shutdown(shutdown, max(0.05, left))
        finally:
            self.hub.close()
            self._health.unwatch(LOOP)

    async def step(self) -> None:
        """One look, published to the event clients."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._read_folder()
                await self._reports.read_queue()
                look = await read_snapshot(self._store, self._schedule)
                await self._read_slow_facts()
                delta = await self._follow(look)
        except (StoreError, TimeoutError) as error:
            self._without_store(error)
            return
        self._metrics.look_seconds.observe(time.monotonic() - begun)
        self._metrics.last_look.set(time.time())
        self._metrics.left_out.set(delta.left_out)
        self._keep(look)
        self._complaint = ""
        self._publish(delta)

    def overview(self) -> Overview:
        """The newest look, with its age; Busy before the first one."""
        if self._overview is None:
            raise Busy(self._complaint, hint="ask again in a moment")
        # By this machine's clock: the look itself carries the time of Redis.
        age = time.monotonic() - self._looked_at
        return self._overview.model_copy(update={"age_seconds": round(age, 3)})

    def timeline(self) -> Timeline:
        """Rollouts in flight and just ended."""
        return self._lanes.timeline()

    def snapshot(self) -> SnapshotEvent | None:
        """Everything, for an event client that begins; None before the first look."""
        if self._overview is None:
            return None
        return SnapshotEvent(overview=self.overview(), timeline=self.timeline())

    def _publish(self, delta: TimelineDelta) -> None:
        self.hub.publish(TickEvent(overview=self.overview(), timeline=delta))

    def _keep(self, look: MeshSnapshot) -> None:
        now = look.view.now
        self._looked_at = time.monotonic()
        rates = self._rates.update(now, look.counts.totals)
        self.curves.add_look(
            now,
            {
                "tokens_per_second": rates.saved_tokens_per_second,
                "finished_per_second": rates.finished_per_second,
                "in_flight": look.view.leased,
                "ready_groups": look.view.ready_groups,
                "memory_ratio": look.view.memory_ratio,
            },
        )
        self._overview = build_overview(
            look,
            run=self._config.name,
            schedule=self._schedule,
            rates=rates,
            curves=self.curves,
            evaluations=self._evaluations,
            running=self._running,
        )

    def _without_store(self, error: Exception) -> None:
        complaint = str(error) or f"the store did not answer a look within {_LOOK_SECONDS:.0f} s"
        if complaint != self._complaint:
            self._log.warning("look_failed", message=complaint)
        self._complaint = complaint
        self._metrics.look_failures.inc()
        if self._overview is None:
            return
        self._overview = self._overview.model_copy(update={"state": "unreachable", "waiting_for": complaint})
        timeline = self.timeline()
        self._publish(
            TimelineDelta(
                time=timeline.time, in_flight=timeline.in_flight, left_out=timeline.left_out, changed=[], removed=[]
            )
        )

    async def _follow(self, look: MeshSnapshot) -> TimelineDelta:
        """Marks of the followed rollouts, and new ones for the room that is left."""
        ids = self._lanes.followed
        if self._lanes.room:
            self._cursors = {session: self._cursors.get(session, 0) for session in look.workers}
            found, self._cursors = await self._store.scan_held(self._cursors, _SCAN_COUNT)
            ids += new_ids(found, self._lanes)
        marks: dict[str, TrajectoryMark | None] = dict(zip(ids, await self._store.marks(ids), strict=True))
        return self._lanes.look(look.view.now, marks, look.workers, look.view.leased)

    async def _read_slow_facts(self) -> None:
        if time.monotonic() < self._slow_at:
            return
        self._slow_at = time.monotonic() + _SLOW_SECONDS
        self._evaluations = finished_evaluations(await self._store.evaluations())
        self.curves.set_evaluations(self._evaluations)

    async def _read_folder(self) -> None:
        """What is new in the run folder; a disk that does not answer is not waited for, and asked once."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._read_files))
        done, _ = await asyncio.wait([self._reading], timeout=_FOLDER_SECONDS)
        if not done:
            self._complain_of_folder(f"{self._config.folder} does not answer")
            return
        reading, self._reading = self._reading, None
        try:
            news = reading.result()
        except OSError as error:
            # The run folder may be on another machine's disk; what Redis tells does not depend on it.
            self._complain_of_folder(str(error))
            self._reports.lose_file()
            return
        self._reports.take_file(news.reports)
        for record in news.history:
            self._add_history(record)
        self._running = news.running

    def _complain_of_folder(self, complaint: str) -> None:
        if complaint != self._folder_complaint:
            self._log.warning("run_folder_unreadable", message=complaint)
        self._folder_complaint = complaint

    def _read_files(self) -> _FolderNews:
        """New step reports, what a launcher wrote before this gateway was there, and endpoint files."""
        return _FolderNews(
            reports=self._reports.read_file(),
            history=self._history.read(),
            running=Counter(endpoint.service for endpoint in read_endpoints(Path(self._config.folder))),
        )

    def _add_history(self, record: Mapping[str, Any]) -> None:
        view = record.get("view")
        seconds, saved = record.get("t"), record.get("saved_token_total")
        if not isinstance(view, dict) or not isinstance(seconds, float) or not isinstance(saved, int):
            return
        if seconds >= self._begun:
            return
        rates = self._history_rates.update(seconds, {"saved_tokens_total": saved})
        values = {"tokens_per_second": rates.saved_tokens_per_second}
        for curve, field in (
            ("in_flight", "leased"),
            ("ready_groups", "ready_groups"),
            ("memory_ratio", "memory_ratio"),
        ):
            if isinstance(view.get(field), int | float):
                values[curve] = float(view[field])
        self.curves.add_look(seconds, values)
