"""A pool of worker processes that are killed when they exceed their time limit.

Each worker handles one answer at a time, so an answer that crashes or hangs its worker costs its own time and a fork of
the loaded template, and affects no other answer. pebble's pool does not fit: it unpickles data from confined processes,
kills the worker but not the worker's children, and a new worker would load its libraries again.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollmesh.errors import ConfigError, RollmeshError
from rollmesh.reward.messages import LARGEST_REPLY_BYTES, PROBE, SCORE, FrameError, WorkerSpec, frame, read_frame
from rollmesh.reward.reward_metrics import RewardMetrics
from rollmesh.reward.template_process import TemplateLost, TemplateProcess
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import Backoff, cancel_and_wait

_PROBE_SECONDS = 30.0
_TEMPLATE_ATTEMPTS = 5
_BACKOFF = Backoff(first_seconds=0.1)
_EXIT_GRACE_SECONDS = 0.5
"""Time for a worker that closed its socket to exit by itself, so that its exit status is not that of a kill."""


@dataclass(slots=True)
class _Job:
    request: bytes
    timeout_seconds: float
    queued_at: float
    result: asyncio.Future[bytes]


class WorkerPool:
    """Pool that runs requests in worker processes; use as an async context manager."""

    def __init__(
        self, spec: WorkerSpec, size: int, metrics: RewardMetrics, on_failure: Callable[[BaseException], None]
    ) -> None:
        """``on_failure`` is called if the pool cannot recover; later requests fail."""
        self._spec = spec
        self._size = size
        self._metrics = metrics
        self._on_failure = on_failure
        self._log = get_logger("pool")
        self._template: TemplateProcess | None = None
        self._starting = asyncio.Lock()
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._slots: list[asyncio.Task[None]] = []
        self._failure = ""
        """Reason that requests fail; empty while the pool works."""

    async def __aenter__(self) -> "WorkerPool":
        """Load the verifiers and start the workers.

        Raises ConfigError if a verifier cannot be loaded, or if there are more workers than uids for them.
        """
        try:
            template = await self._running_template()
        except TemplateLost as error:
            raise RollmeshError(f"reward: {error}; see its output on standard error") from error
        if template.most_workers is not None and self._size > template.most_workers:
            await template.aclose()
            raise ConfigError(
                f"reward.workers={self._size}: a service that runs as root has separate uids for at most "
                f"{template.most_workers} workers; set at most that many, and start more reward services"
            )
        self._slots = [asyncio.create_task(self._run_slot(n), name=f"slot-{n}") for n in range(self._size)]
        for task in self._slots:
            task.add_done_callback(self._slot_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(*self._slots)
        self._drop_jobs("the pool has been closed")
        if self._template is not None:
            await self._template.aclose()

    @property
    def timeout_means_wrong(self) -> Mapping[str, bool]:
        return self._template.timeout_means_wrong if self._template is not None else {}

    @property
    def waiting_count(self) -> int:
        return self._jobs.qsize()

    async def run(self, payload: bytes, timeout_seconds: float) -> bytes:
        """Run ``payload`` in a worker; the time limit starts when the worker starts on it.

        Raises WorkerTimedOut if the time limit expires, WorkerDied if the worker exits first.
        """
        return await self._submit(SCORE + payload, timeout_seconds)

    async def probe(self) -> bytes:
        """Return the report of one worker process about its confinement."""
        return await self._submit(PROBE, _PROBE_SECONDS)

    async def _submit(self, request: bytes, timeout_seconds: float) -> bytes:
        if self._failure:
            raise WorkerDied(self._failure)
        result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait(
            _Job(request=request, timeout_seconds=timeout_seconds, queued_at=time.monotonic(), result=result)
        )
        self._metrics.waiting.set(self._jobs.qsize())
        return await result

    async def _run_slot(self, slot: int) -> None:
        worker: WorkerConnection | None = None
        try:
            while True:
                # The next worker is forked before a job arrives.
                worker = await self._usable_worker(slot, worker)
                job = await self._jobs.get()
                self._metrics.waiting.set(self._jobs.qsize())
                if job.result.done():  # its caller has cancelled it
                    continue
                try:
                    worker = await self._usable_worker(slot, worker)
                except Exception:
                    self._jobs.put_nowait(job)  # it fails with the waiting jobs once this slot has ended
                    raise
                await self._serve(job, worker)
        finally:
            if worker is not None:
                await worker.end()

    async def _serve(self, job: _Job, worker: "WorkerConnection") -> None:
        self._metrics.queue_seconds.observe(time.monotonic() - job.queued_at)
        try:
            answer = await worker.request_answer(job.request, job.timeout_seconds)
        except (WorkerTimedOut, WorkerDied) as error:
            if not job.result.done():
                job.result.set_exception(error)
            reason = "timed_out" if isinstance(error, WorkerTimedOut) else "died"
            self._metrics.replaced.labels(reason=reason).inc()
        except asyncio.CancelledError:
            job.result.cancel()
            raise
        else:
            if not job.result.done():
                job.result.set_result(answer)

    async def _usable_worker(self, slot: int, worker: "WorkerConnection | None") -> "WorkerConnection":
        if worker is not None:
            if not worker.closed:
                return worker
            if worker.exit is None:
                self._metrics.replaced.labels(reason="retired").inc()
                await worker.end()
        return await self._open(slot)

    async def _open(self, slot: int) -> "WorkerConnection":
        for attempt in range(1, _TEMPLATE_ATTEMPTS + 1):
            try:
                return await WorkerConnection.open(await self._running_template(), slot)
            except TemplateLost as error:
                pause = _BACKOFF.seconds(attempt)
                self._log.warning("template_lost", message=str(error), pause_seconds=pause)
                await asyncio.sleep(pause)
        raise RollmeshError(f"reward: the template process ended {_TEMPLATE_ATTEMPTS} times in a row")

    async def _running_template(self) -> TemplateProcess:
        async with self._starting:
            if self._template is None or self._template.lost:
                if self._template is not None:
                    await self._template.aclose()
                self._template = await TemplateProcess.start(self._spec)
            return self._template

    def _slot_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._failure = self._failure or f"the pool has failed: {error}"
        self._drop_jobs(self._failure)
        self._on_failure(error)

    def _drop_jobs(self, reason: str) -> None:
        while not self._jobs.empty():
            job = self._jobs.get_nowait()
            if not job.result.done():
                job.result.set_exception(WorkerDied(reason))


class WorkerTimedOut(Exception):
    """Time-out of a worker, which was killed."""


class WorkerDied(Exception):
    """Exit of a worker before its answer."""

    def __init__(self, reason: str, *, with_template: bool = False) -> None:
        """``with_template`` is True if the template exited too, with all its workers."""
        super().__init__(reason)
        self.with_template = with_template


class WorkerConnection:
    """Connection that sends one request at a time to a worker, and kills it if the answer is late or invalid."""

    def __init__(
        self, template: TemplateProcess, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._template = template
        self._pid = pid
        self._reader = reader
        self._writer = writer
        self._answer = self._read_next()
        self._is_ending = False
        self.exit: str | None = None
        """Description of its exit, once ``end`` has completed."""

    @staticmethod
    async def open(template: TemplateProcess, slot: int) -> "WorkerConnection":
        """Fork a worker and connect to it; raises TemplateLost."""
        service_end, worker_end = socket.socketpair()
        try:
            with worker_end:
                pid = await template.spawn(slot, worker_end)
            service_end.setblocking(False)
            return WorkerConnection(template, pid, *await asyncio.open_unix_connection(sock=service_end))
        except BaseException:
            service_end.close()
            raise

    @property
    def closed(self) -> bool:
        """True once the worker has exited, or has sent an answer without a request, and must not be used any more."""
        return self._is_ending or self._answer.done()

    async def request_answer(self, request: bytes, timeout_seconds: float) -> bytes:
        """Send one request and return its answer; WorkerTimedOut and WorkerDied mean that the worker has ended."""
        if self.closed:
            raise WorkerDied(await self.end(_EXIT_GRACE_SECONDS), with_template=self._template.lost)
        self._writer.write(frame(request))
        await asyncio.wait((self._answer,), timeout=timeout_seconds)
        for _ in range(3):
            # This process may have been late itself: read data that the worker has sent in the meantime.
            if not self._answer.done():
                await asyncio.sleep(0)
        if not self._answer.done():
            await self.end(0.0)
            raise WorkerTimedOut(f"no answer within {timeout_seconds:g} s")
        try:
            answer = self._answer.result()
        except FrameError as error:
            self._writer.transport.abort()
            raise WorkerDied(f"the worker sent an invalid answer: {error}") from error
        except (EOFError, ConnectionError) as error:
            reason = await self.end(_EXIT_GRACE_SECONDS)
            raise WorkerDied(reason, with_template=self._template.lost) from error
        self._answer = self._read_next()
        await asyncio.sleep(0)  # an answer that came with this one shows before the next request
        return answer

    async def end(self, grace_seconds: float = 0.0) -> str:
        """Wait ``grace_seconds`` for the worker to exit, then kill it; returns a description of its exit."""
        self._is_ending = True
        self._answer.cancel()
        self._writer.transport.abort()
        if self.exit is None:
            status = await self._template.end(self._pid, grace_seconds)
            if status is None:
                self.exit = "its template process has ended"
            else:
                self.exit = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return self.exit

    def _read_next(self) -> asyncio.Task[bytes]:
        task = asyncio.create_task(read_frame(self._reader, LARGEST_REPLY_BYTES))
        task.add_done_callback(lambda read: read.cancelled() or read.exception())  # no warning if no request reads it
        return task
