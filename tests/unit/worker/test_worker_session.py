"""A worker that waits for Redis is alive."""

import asyncio

import pytest

from rollmesh.errors import SessionLost, StoreUnavailable
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.tasks import Backoff
from rollmesh.store.queue_types import ReRegistered
from rollmesh.worker import worker_session
from rollmesh.worker.worker_session import WorkerSession


class Outage:
    """A store that is unreachable for the first attempts of every call; each takes a minute."""

    def __init__(self, attempts: int) -> None:
        self.left = attempts
        self.now = 0.0

    def _attempt(self) -> None:
        self.now += 60.0
        if self.left:
            self.left -= 1
            raise StoreUnavailable("away")

    async def heartbeat(self, _session: str, _waiting: int = 0) -> str:
        self._attempt()
        return "server"

    async def open(self, *_worker: str) -> str:
        self._attempt()
        return "new"

    async def reregister(self, _session: str, _held: list[tuple[str, int]], *_worker: str) -> list[ReRegistered]:
        return []


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_session, "_BACKOFF", Backoff(first_seconds=0.0))


def session_with(store: Outage, heartbeat_seconds: float = 1.0) -> WorkerSession:
    metrics = RolloutMetrics(Metrics("rollout"))
    return WorkerSession(store, "rollout-0", heartbeat_seconds, metrics)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["call", "recover"])
async def test_a_loop_that_waits_out_a_long_outage_is_not_stuck(way: str) -> None:
    store = Outage(attempts=10)
    health = Health(clock=lambda: store.now)
    session = session_with(store)
    health.watch("lease", 120.0)
    stalled: list[dict[str, float]] = []

    def beat() -> None:
        stalled.append(health.stalled())
        health.beat("lease")

    if way == "call":
        assert await session.call(store.heartbeat, beat) == "server"
    else:
        await session.recover("", beat=beat)
        assert session.current == "new"
    assert store.now > 600.0
    assert len(stalled) == 10
    assert not any([*stalled, health.stalled()])


async def test_a_lost_session_is_not_an_outage() -> None:
    store = Outage(attempts=0)
    session = session_with(store)
    waits: list[None] = []

    async def once_lost(current: str) -> str:
        if not current:
            raise SessionLost("gone")
        return current

    assert await session.call(once_lost, lambda: waits.append(None)) == "new"
    assert not waits


class Restarts(Outage):
    """A store whose Redis dies before each of the next ``restarts`` heartbeats, and forgets all sessions."""

    def __init__(self) -> None:
        super().__init__(attempts=0)
        self.known: set[str] = set()
        self.opened = 0
        self.restarts = 0
        self.registered: list[str] = []

    async def open(self, *_worker: str) -> str:
        self.opened += 1
        self.known.add(f"session-{self.opened}")
        return f"session-{self.opened}"

    async def heartbeat(self, session: str, _waiting: int = 0) -> str:
        if self.restarts:
            self.restarts -= 1
            self.known.clear()
        if session not in self.known:
            raise SessionLost("unknown session")
        return "server"

    async def reregister(self, session: str, _held: list[tuple[str, int]], *_worker: str) -> list[ReRegistered]:
        if session not in self.known:
            raise SessionLost("unknown session")
        self.registered.append(session)
        return []


async def test_a_worker_registers_again_when_redis_dies_again_during_its_registration() -> None:
    store = Restarts()
    session = session_with(store)
    await session.open()
    store.restarts = 2
    assert await session.call(store.heartbeat) == "server"
    assert store.registered == ["session-2", "session-3"]
    assert session.current == "session-3"


async def test_a_save_that_waits_out_an_outage_does_not_beat_for_a_heartbeat_that_is_stuck() -> None:
    store, beats, stuck = Outage(attempts=0), list[None](), asyncio.Event()
    session = session_with(store, 0.0)
    await session.open()

    async def never(_session: str, _waiting: int = 0) -> str:
        stuck.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    save = store.heartbeat
    store.heartbeat = never  # type: ignore[method-assign]
    heartbeat = asyncio.create_task(session.keep_alive(lambda: beats.append(None)))
    await stuck.wait()
    store.left = 10
    assert await session.call(save) == "server"
    assert not beats
    heartbeat.cancel()
    await asyncio.gather(heartbeat, return_exceptions=True)


async def test_a_heartbeat_that_waits_for_the_recovery_of_a_save_is_alive() -> None:
    store, beats = Outage(attempts=10), list[None]()
    session = session_with(store, 0.0)
    save = asyncio.create_task(session.recover(""))
    heartbeat = asyncio.create_task(session.recover("", beat=lambda: beats.append(None)))
    await asyncio.gather(save, heartbeat)
    assert len(beats) == 9, "the first attempt came before it waited"
