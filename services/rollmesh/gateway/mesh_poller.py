"""Poll loop of the mesh; every request is answered from its newest result."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.config import RunConfig
from rollmesh.errors import StoreError
from rollmesh.gateway.curves import Curves, TimelineFile
from rollmesh.gateway.events import EventHub, GatewayMetrics
from rollmesh.gateway.mesh_snapshot import MeshSnapshot, build_overview, finished_evaluations, read_snapshot
from rollmesh.gateway.models.live import (
    EvaluationView,
    Overview,
    Rates,
    SnapshotEvent,
    TickEvent,
    Timeline,
    TimelineDelta,
)
from rollmesh.gateway.models.overview import EndEvent
from rollmesh.gateway.timeline_tracker import TimelineTracker
from rollmesh.runtime.endpoints import ServiceStates, read_endpoints
from rollmesh.runtime.growing_files import JsonLinesTail
from rollmesh.runtime.health import Health, waits_text
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.request_guard import Busy
from rollmesh.scheduling import Schedule
from rollmesh.step_metrics import RateWindow
from rollmesh.store import TrajectoryStore
from rollmesh.store.inspection import TrajectoryMark

LOOP = "sampler"
WINDOW_SECONDS = 120.0
_POLL_SECONDS = 10.0
"""Time limit of one poll."""
_SLOW_SECONDS = 5.0
"""Seconds between two reads of evaluations and endpoint files, which change rarely."""
_FOLDER_SECONDS = 2.0
"""Time that one poll waits for the run folder."""
_SCAN_COUNT = 512
"""Leased trajectories scanned per session and poll, to find new ones."""
_REPORTS_PER_LOOK = 500
"""Maximum number of reports read from the queue per poll; later polls read the rest."""
_RATES = {
    "saved_tokens_per_second": "saved_tokens_total",
    "finished_per_second": "finished_total",
    "trained_groups_per_second": "consumed_total",
}
Records = Sequence[Mapping[str, Any]]


class MeshPoller:
    """Poller of the mesh; reads about once per second and keeps the result in bounded memory."""

    def __init__(
        self,
        store: TrajectoryStore,
        config: RunConfig,
        metrics: GatewayMetrics,
        health: Health,
        states: ServiceStates,
    ) -> None:
        self._store = store
        self._config = config
        self._metrics = metrics
        self._health = health
        self._states = states
        self._trainer_waits = ""
        self._schedule = Schedule.from_config(config)
        self._timeline = TimelineTracker(config.gateway.timeline_rollouts, WINDOW_SECONDS)
        self._cursors: dict[str, int] = {}
        self._rates = RateWindow()
        folder = Path(config.folder)
        self.curves = Curves()
        self._reports = ReportFeed(folder, store, self.curves)
        self._history = JsonLinesTail(folder / "timeline.jsonl")
        self._timeline_file = TimelineFile()
        self._start_time = time.time()
        self._evaluations: list[EvaluationView] = []
        self._running: Mapping[str, int] = {}
        self._slow_at = 0.0
        self._overview: Overview | None = None
        self._polled_at = 0.0
        self._reading: asyncio.Future[tuple[Records, Records, Mapping[str, int]]] | None = None
        self._folder_error = ""
        self._error = "the mesh has not been polled yet"
        self._log = get_logger("gateway")
        self.hub = EventHub(self.snapshot, config.gateway.most_event_clients, metrics)

    async def run(self, shutdown: Shutdown, *, launched: bool = False) -> None:
        """Poll until ``shutdown``, then once more, and end every event stream.

        ``launched`` is true if the run's launcher has started this process: its shutdown is then the end of the run.
        """
        self._health.watch(LOOP, 3 * _POLL_SECONDS + self._config.gateway.sample_seconds)
        try:
            while not shutdown.is_set():
                start_time = time.monotonic()
                await self.step()
                self._health.beat(LOOP)
                # Ready even without the store: the page then shows that Redis is unreachable and since when.
                self._health.set_ready(True)
                left = self._config.gateway.sample_seconds - (time.monotonic() - start_time)
                # Yield even when a poll takes longer than the interval: requests share this event loop.
                await wait_or_shutdown(shutdown, max(0.05, left))
            if not self._error:  # a page that stays open keeps the last state of the run
                await self.step()
        finally:
            self.hub.close(EndEvent(time=time.time(), by="launcher" if launched else "signal"))
            self._health.unwatch(LOOP)

    async def step(self) -> None:
        """Poll once and publish the result to the event clients."""
        start_time = time.monotonic()
        try:
            async with asyncio.timeout(_POLL_SECONDS):
                await self._states.read()
                await self._read_folder()
                await self._reports.read_queue()
                snapshot = await read_snapshot(self._store)
                if start_time >= self._slow_at:
                    self._slow_at = start_time + _SLOW_SECONDS
                    self._evaluations = finished_evaluations(await self._store.evaluations.all())
                    self.curves.set_evaluations(self._evaluations)
                delta = await self._follow(snapshot)
                # Services that share no run folder with this process tell it through the queue.
                shared = self._config.network.shared_folder
                self._trainer_waits = "" if shared else await self._store.training.waits()
        except (StoreError, TimeoutError) as error:
            self._without_store(error)
            return
        self._metrics.look_seconds.observe(time.monotonic() - start_time)
        self._metrics.last_look.set(time.time())
        self._metrics.left_out.set(delta.left_out)
        self._apply(snapshot)
        self._error = ""
        self._publish(delta)

    def overview(self) -> Overview:
        """Return the newest overview with its age; Busy before the first poll."""
        if self._overview is None:
            raise Busy(self._error, hint="retry in a moment")
        # Use the clock of this machine: the snapshot carries the time of Redis.
        age = time.monotonic() - self._polled_at
        return self._overview.model_copy(update={"age_seconds": round(age, 3)})

    def timeline(self) -> Timeline:
        """Return the rollouts in progress and recently ended."""
        return self._timeline.timeline()

    def snapshot(self) -> SnapshotEvent | None:
        """Return the complete state for a new event client; None before the first poll."""
        if self._overview is None:
            return None
        return SnapshotEvent(overview=self.overview(), timeline=self.timeline())

    def _publish(self, delta: TimelineDelta) -> None:
        self.hub.publish(TickEvent(overview=self.overview(), timeline=delta))

    def _apply(self, snapshot: MeshSnapshot) -> None:
        now = snapshot.view.now
        self._polled_at = time.monotonic()
        totals = (snapshot.counts.totals.get(name, 0) for name in _RATES.values())
        rates = Rates(**dict(zip(_RATES, self._rates.update(now, *totals), strict=True)))
        self.curves.add_poll(
            now,
            {
                "tokens_per_second": rates.saved_tokens_per_second,
                "finished_per_second": rates.finished_per_second,
                "in_flight": snapshot.view.leased,
                "ready_groups": snapshot.view.ready_groups,
                "memory_ratio": snapshot.view.memory_ratio,
            },
        )
        self._overview = build_overview(
            snapshot,
            run=self._config.name,
            schedule=self._schedule,
            rates=rates,
            curves=self.curves,
            evaluations=self._evaluations,
            running=self._running,
            begin_time=self._timeline_file.begin_time,
            waits=waits_text({**self._states.waits, **({"trainer": w} if (w := self._trainer_waits) else {})}),
        )

    def _without_store(self, error: Exception) -> None:
        message = str(error) or f"the store did not answer a poll within {_POLL_SECONDS:.0f} s"
        if message != self._error:
            self._log.warning("look_failed", message=message)
        self._error = message
        self._metrics.look_failures.inc()
        if self._overview is None:
            return
        self._overview = self._overview.model_copy(update={"state": "unreachable", "waiting_for": message})
        timeline = self.timeline()
        self._publish(TimelineDelta(time=timeline.time, in_flight=timeline.in_flight, left_out=timeline.left_out))

    async def _follow(self, snapshot: MeshSnapshot) -> TimelineDelta:
        """Return the changes of the followed rollouts, and new rollouts if there is room."""
        ids = self._timeline.followed
        if self._timeline.room:
            self._cursors = {session: self._cursors.get(session, 0) for session in snapshot.workers}
            found, self._cursors = await self._store.inspection.scan_held(self._cursors, _SCAN_COUNT)
            ids += self._timeline.new_ids(found)
        marks: dict[str, TrajectoryMark | None] = dict(zip(ids, await self._store.inspection.marks(ids), strict=True))
        return self._timeline.update(snapshot.view.now, marks, snapshot.workers, snapshot.view.leased)

    async def _read_folder(self) -> None:
        """Read new content of the run folder; a slow disk delays the poll by at most _FOLDER_SECONDS."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._read_files))
        done, _ = await asyncio.wait([self._reading], timeout=_FOLDER_SECONDS)
        if not done:
            self._log_folder_error(f"{self._config.folder} does not answer")
            return
        reading, self._reading = self._reading, None
        try:
            reports, history, self._running = reading.result()
        except OSError as error:
            # The run folder may be on a remote disk; the data from Redis does not depend on it.
            self._log_folder_error(str(error))
            self._reports.file_lost()
            return
        self._reports.apply_file(reports)
        for record in history:
            self._timeline_file.add(record, self.curves, before=self._start_time)

    def _log_folder_error(self, message: str) -> None:
        if message != self._folder_error:
            self._log.warning("run_folder_unreadable", message=message)
        self._folder_error = message

    def _read_files(self) -> tuple[Records, Records, Mapping[str, int]]:
        """Read new step reports, the launcher's history from before this gateway started, and endpoint files."""
        running = Counter(endpoint.service for endpoint in read_endpoints(Path(self._config.folder)))
        return self._reports.read_file(), self._history.read(), running


class ReportFeed:
    """Feed of step reports into the curves, each step once: from the run folder, which has all, or from the queue."""

    def __init__(self, folder: Path, store: TrajectoryStore, curves: Curves) -> None:
        self._tail = JsonLinesTail(folder / "metrics.jsonl")
        self._store = store
        self._curves = curves
        self._file_is_read = False
        self._newest: tuple[Any, Any] | None = None
        """Step and time of the newest report, to distinguish it from a repeated training of the same step."""

    def read_file(self) -> list[dict[str, Any]]:
        """Return the new reports of the file; blocks, and changes no curve."""
        return self._tail.read()

    def apply_file(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Add the result of the last ``read_file`` to the curves."""
        if not self._tail.exists:
            self.file_lost()
            return
        self._file_is_read = True
        if self._tail.from_start:
            self._remove(0)
        self._show(found)

    def file_lost(self) -> None:
        """Switch to the queue, from the newest shown report on; the file is missing or unreadable."""
        self._file_is_read = False
        # A file that returns is read from its beginning: it has every step, and the queue only the newest.
        self._tail.rewind()

    async def read_queue(self) -> None:
        """Add new reports of the queue to the curves, unless the file provides them.

        After a rollback the trainer replaces all reports after the step it continues from. If the newest shown report
        is still in the queue, no earlier report has changed. Otherwise all reports in the queue are read again.
        """
        if self._file_is_read:
            return
        if self._newest is not None:
            found = await self._store.step_reports.read(self._newest[0], _REPORTS_PER_LOOK + 1)
            if found and _identity(found[0]) == self._newest:
                self._show(found[1:])
                return
        found = await self._store.step_reports.read(0, _REPORTS_PER_LOOK)
        self._remove(found[0]["train_step"] if found else 0)
        self._show(found)

    def _remove(self, from_step: int) -> None:
        self._curves.remove_reports(from_step)
        self._newest = None

    def _show(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            if self._curves.add_report(record):
                self._newest = _identity(record)


def _identity(record: Mapping[str, Any]) -> tuple[Any, Any]:
    return record["train_step"], record.get("time")
