"""Service processes of a run on this machine, and waits on them with progress, deadlines and cancellation."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

from rich.console import Console

from rollmesh.config import RunConfig
from rollmesh.config.replica_bounds import configured_replicas
from rollmesh.errors import PoliciesRefused, RollmeshError, StoreUnavailable
from rollmesh.launcher.console_notes import AddressNotes, ServiceWatch
from rollmesh.launcher.evaluation_journal import EvaluationJournal
from rollmesh.launcher.inline_services import Serve, inline_start
from rollmesh.launcher.progress_panel import RunProgress
from rollmesh.launcher.redis import RunningStore, running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.service_specs import (
    WORKERS,
    ReplicaScaler,
    child_environment,
    service_specs,
    stop_order,
    thread_variables,
    with_mesh_token,
)
from rollmesh.launcher.supervisor import ServiceFailed, StartService, Supervisor, start_process
from rollmesh.launcher.timeline_recorder import TimelineRecorder
from rollmesh.launcher.trainer_cores import trainer_way
from rollmesh.mesh import WaitReason
from rollmesh.runtime.capacity import this_machine
from rollmesh.runtime.endpoints import AdminClient, ServiceStates, read_endpoints
from rollmesh.runtime.lifecycle import wait_or_shutdown
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.scheduling import Schedule, run_limits
from rollmesh.store.trajectory_store import begin_run
from rollmesh.worker.routing import refused_by_all

T = TypeVar("T")

_SAMPLE_SECONDS = 1.0
_RELEASE_SECONDS = 5.0
_OUTAGE = "outage"
OFTEN_SECONDS = 0.2
"""Poll interval of steps that run in sequence; a longer interval would leave the mesh idle after each step."""


class Interrupted(RollmeshError):
    """Early stop by Ctrl-C or SIGTERM; the next start continues the run."""


class LocalMesh:
    """Running store, supervised service processes, and the progress of both."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        running: RunningStore,
        shutdown: asyncio.Event,
        progress: RunProgress,
        timeline: TimelineRecorder,
        watch: ServiceWatch,
        inline: StartService | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.store = running.store
        self._redis_url = running.url
        self.progress = progress
        self.evaluations = EvaluationJournal(running.store, folder, progress.note)
        self.supervisor = Supervisor(config.launcher.restart_limit, progress.note, start=inline or start_process)
        self._is_inline = inline is not None
        self._watch = watch
        watch.supervisor = self.supervisor
        scaling = running.store.scaling if inline is None else None
        self._scaler = ReplicaScaler(config, folder, scaling, self.supervisor, progress.note)
        self._addresses = AddressNotes(config, folder.path, self.supervisor, progress.note)
        self._shutdown = shutdown
        self._timeline = timeline
        self._pauses = False
        self._noted_refusal = -1

    @contextlib.asynccontextmanager
    async def services(self, names: Sequence[str] | None = None) -> AsyncIterator[None]:
        """Run these services, by default all, and stop them in order on exit, also after an error."""
        order = stop_order(self.config)
        names = order if names is None else names
        environment = child_environment(self.config, self._redis_url)
        try:
            await self._start_fixed(names, environment)
            await self.answer(lambda: self._scaler.begin(names, environment), "the store")
            self.progress.note(f"services started, logs in {self.folder.logs}")
            yield
        finally:
            try:
                await self._scaler.end()
                self.progress.note("draining services; Ctrl-C again kills them")
                # Workers stop first, together: they save all remaining tokens while the generators still export their
                # counters. The last line of the timeline is recorded at that moment.
                await asyncio.gather(*(self.supervisor.stop([name]) for name in WORKERS))
                with contextlib.suppress(StoreUnavailable, OSError):
                    await self._timeline.sample()
                await self.supervisor.stop([name for name in order if name not in WORKERS])
            finally:
                await self.supervisor.kill_all()

    async def _start_fixed(self, names: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the services among ``names`` that are not scaled; the trainer with its own processes and threads."""
        config, of_trainer = self.config, environment
        if "trainer" in names and not self._is_inline:
            choice = trainer_way(config, self.folder, self.progress.note, this_machine().cores)
            way = await _unless_stopped(self._shutdown, choice, "the choice of the trainer's processes")
            launcher = config.launcher.model_copy(update={"trainer_processes": way.processes})
            config = config.model_copy(update={"launcher": launcher})
            of_trainer = {**environment, **thread_variables(way.threads)}
        for spec in service_specs(config, self.folder, environment):
            if spec.service in names and spec.service not in configured_replicas(config):
                own = of_trainer if spec.service == "trainer" else environment
                self.supervisor.start(replace(spec, environment=own))

    async def until(
        self,
        done: Callable[[], Awaitable[bool]],
        waiting_for: str,
        deadline_seconds: float | None = None,
        *,
        poll_seconds: float = _SAMPLE_SECONDS,
    ) -> None:
        """Show progress until ``done``, polled every ``poll_seconds``; retry while Redis is unreachable.

        Raises Interrupted on shutdown, ServiceFailed when a service or the run has failed or the deadline has passed.
        """

        async def is_done() -> bool:
            try:
                return await done()
            except (StoreUnavailable, OSError) as error:
                self._show_outage(error)
                return False

        loop = asyncio.get_running_loop()
        start = next_update = loop.time()
        while not await _unless_stopped(self._shutdown, is_done(), waiting_for):
            if self.supervisor.failed.done():
                raise ServiceFailed(self.supervisor.failed.result())
            if deadline_seconds is not None and loop.time() - start > deadline_seconds:
                waits = f": {text}" if (text := self._watch.text()) else ""
                raise ServiceFailed(f"waited {deadline_seconds:.0f} s for {waiting_for}{waits}; see {self.folder.logs}")
            if loop.time() >= next_update:
                await _unless_stopped(self._shutdown, self._update(waiting_for), waiting_for)
                next_update = loop.time() + _SAMPLE_SECONDS
            if await wait_or_shutdown(self._shutdown, poll_seconds):
                raise Interrupted(f"stopped while waiting for {waiting_for}")

    async def answer(self, call: Callable[[], Awaitable[T]], waiting_for: str) -> T:
        """Return the result of a store call; retries and errors as in ``until``."""
        answers: list[T] = []

        async def answered() -> bool:
            answers.append(await call())
            return True

        await self.until(answered, waiting_for)
        return answers[-1]

    async def pause(self, paused: bool) -> None:
        """Pause or resume the run for the launcher; a pause by an operator is independent of it."""
        self._pauses = self._pauses or paused  # even if the answer is interrupted
        await self.answer(lambda: self.store.settings.set_launcher_paused(paused), "the store")
        self._pauses = paused

    async def end_pause(self) -> None:
        """End the pause of this launcher before it exits: services that need no launcher would wait for ever."""
        if not self._pauses:
            return
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self.store.settings.set_launcher_paused(False)
        except (StoreUnavailable, TimeoutError):
            self.progress.note("Redis does not answer: the run stays paused until the next rollmesh up or eval")

    async def _update(self, waiting_for: str) -> None:
        try:
            failure = await self.store.leadership.failure()
            if failure:
                raise ServiceFailed(failure)
            await self.evaluations.update()
            await self._scaler.reconcile()
            self._addresses.update()
            sample = await self._timeline.sample()
            for generator in sample.generators:  # each version that one refuses is noted once, with the reason
                version = generator.refused_version
                if version is not None and version > self._noted_refusal:
                    self._noted_refusal = version
                    reason = " ".join(generator.refused_reason.split())
                    self.progress.note(f"generator {generator.address} refuses policy version {version}: {reason}")
            agents = read_endpoints(self.folder.path, "agents") if self.config.rollout.program == "agent" else []
            self.progress.update(sample, waiting_for, agents[0].url if agents else None, self._watch.text())
            self._watch.own.end(_OUTAGE)
        except (StoreUnavailable, OSError) as error:
            self._show_outage(error)

    async def newest_served(self) -> bool:
        """Tell whether a generator serves the newest policy; also True without generators or with a pinned version.

        Raises PoliciesRefused when every generator has tried the newest policy and refuses it.
        """
        newest, generators = await self.latest_version(), await self.store.generators.live()
        refusal = refused_by_all(newest, generators)
        if refusal is not None and refusal.refused_count:
            raise PoliciesRefused(
                f"every generator refuses the newest policy version, {newest}: {refusal.refused_reason}"
            )
        if any(g.serving and g.policy_version == newest for g in generators):
            return True
        return not self.supervisor.indexes("generator")[0] or await self.store.policies.pinned() is not None

    async def until_newest_served(self) -> None:
        """Wait until ``newest_served``; raises PoliciesRefused when every generator refuses the newest policy."""
        deadline = self.config.launcher.start_timeout_seconds
        await self.until(
            self.newest_served, "a generator that serves the newest policy", deadline, poll_seconds=OFTEN_SECONDS
        )

    def _show_outage(self, error: Exception) -> None:
        """Show the cause of an outage, an unreachable Redis or a full disk, among the waits of the launcher."""
        outage = "Redis" if isinstance(error, StoreUnavailable) else "the run folder, which cannot be written"
        self._watch.own.begin(_OUTAGE, f"{outage}: {error}")

    async def until_serving(self) -> None:
        """Wait for the initial policy and, unless an operator wants no generators, for one that serves it."""
        deadline = self.config.launcher.start_timeout_seconds

        async def announced() -> bool:
            return await self.latest_version() >= 0

        async def served() -> bool:
            return not self.supervisor.indexes("generator")[0] or await self._any_serves()

        await self.until(announced, WaitReason.INITIAL_POLICY, deadline, poll_seconds=OFTEN_SECONDS)
        await self.until(served, WaitReason.GENERATOR, deadline, poll_seconds=OFTEN_SECONDS)

    async def until_any_serves(self) -> None:
        """Wait for a generator, also where all of them are started outside (``generator.replicas: 0``).

        A run that an operator scaled to none waits without a deadline: they may scale it up at any time.
        """
        deadline = self.config.launcher.start_timeout_seconds if self.config.generator.replicas == 0 else None
        await self.until(self._any_serves, WaitReason.GENERATOR, deadline, poll_seconds=OFTEN_SECONDS)

    async def until_idle(self) -> None:
        """Pause the run and wait until no rollout is in progress."""

        async def idle() -> bool:
            return (await self.store.mesh.view(groups=False)).leased == 0

        await self.pause(True)
        await self.until(idle, "rollouts in progress to stop", poll_seconds=OFTEN_SECONDS)

    async def latest_version(self) -> int:
        """Return the newest announced policy version; -1 before the first."""
        policy = await self.store.policies.latest()
        return -1 if policy is None else policy.policy_version

    async def _any_serves(self) -> bool:
        """Tell whether a generator serves. Raises PoliciesRefused once all have tried and refused what is there."""
        generators = await self.store.generators.live()
        if any(g.serving for g in generators):
            return True
        newest = await self.latest_version()
        refusal = refused_by_all(newest, generators)
        present, leaving = self.supervisor.indexes("generator")
        if refusal is not None and refusal.refused_count and len(generators) >= len(present) - len(leaving):
            initial = f"; it is the initial model: check the weights of model.path={self.config.model.path}"
            raise PoliciesRefused(
                f"every generator refuses policy version {newest}, and none serves an older one: "
                f"{refusal.refused_reason}{'' if newest else initial}"
            )
        return False


async def _unless_stopped(shutdown: asyncio.Event, work: Coroutine[Any, Any, T], waiting_for: str) -> T:
    """Return the result of ``work``; raise Interrupted immediately on shutdown, also during store retries."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(shutdown.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Interrupted(f"stopped while waiting for {waiting_for}")
        return task.result()
    finally:
        await cancel_and_wait(task, stopped)


@contextlib.asynccontextmanager
async def local_mesh(
    config: RunConfig,
    folder: RunFolder,
    shutdown: asyncio.Event,
    console: Console,
    serve: Mapping[str, Serve] | None = None,
) -> AsyncIterator[LocalMesh]:
    """Open the mesh of a run folder whose lock the caller holds; services are not started yet.

    With ``serve`` the services are these functions, run in this process. Waits for the store as a service does at its
    start; raises Interrupted on shutdown meanwhile.
    """
    schedule = Schedule.from_config(config)
    progress = RunProgress(
        console, train_steps=schedule.train_steps, metrics=folder.metrics, samples=folder.samples, live=serve is None
    )
    config = with_mesh_token(config, folder)
    security = PortSecurity.from_config(config.security)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AdminClient(security))
        watch = ServiceWatch(ServiceStates(folder.path, client), progress.note)
        await stack.enter_async_context(watch.running())
        store = running_store(config, folder, owner=True, note=progress.note, waits=watch.own)
        running = await _unless_stopped(shutdown, stack.enter_async_context(store), "the store")
        timeline = TimelineRecorder(running.store, folder, client)
        await _unless_stopped(shutdown, begin_run(running.store, run_limits(config)), "the store")
        inline = None if serve is None else inline_start(folder.config_file, serve)
        mesh = LocalMesh(config, folder, running, shutdown, progress, timeline, watch, inline)
        with progress:
            try:
                yield mesh
            finally:
                await mesh.end_pause()
