"""A worker that waits for Redis is alive."""

from __future__ import annotations

import pytest

from rollmesh.errors import SessionLost, StoreUnavailable
from rollmesh.holding import sessions
from rollmesh.holding.sessions import WorkerSession
from rollmesh.rollout.metrics import RolloutMetrics
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.store.types import ReRegistered


class Outage:
    """A store that is away for the first attempts of everything; each takes a minute."""

    def __init__(self, attempts: int) -> None:
        self.left = attempts
        self.now = 0.0

    def _attempt(self) -> None:
        self.now += 60.0
        if self.left:
            self.left -= 1
            raise StoreUnavailable("away")

    async def heartbeat(self, _session: str) -> str:
        self._attempt()
        return "server"

    async def open_session(self, _worker: str) -> str:
        self._attempt()
        return "new"

    async def reregister(self, _session: str, _held: list[tuple[str, int]], _worker: str) -> list[ReRegistered]:
        return []


@pytest.mark.parametrize("way", ["call", "recover"])
async def test_a_loop_that_waits_out_a_long_outage_is_not_stuck(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(sessions, "_FIRST_PAUSE_SECONDS", 0.0)
    store = Outage(attempts=10)
    health = Health(clock=lambda: store.now)
    session = WorkerSession(store, "rollout-0", 1.0, RolloutMetrics(Metrics("rollout")))  # type: ignore[arg-type]
    health.watch("lease", 120.0)
    stalled: list[dict[str, float]] = []

    def beat() -> None:
        stalled.append(health.stalled())
        health.beat("lease")

    session.while_unreachable = beat
    if way == "call":
        assert await session.call(store.heartbeat) == "server"
    else:
        await session.recover("")
        assert session.current == "new"
    assert store.now > 600.0
    assert len(stalled) == 10
    assert not any([*stalled, health.stalled()])


async def test_a_lost_session_is_not_an_outage() -> None:
    store = Outage(attempts=0)
    session = WorkerSession(store, "rollout-0", 1.0, RolloutMetrics(Metrics("rollout")))  # type: ignore[arg-type]
    waits: list[None] = []
    session.while_unreachable = lambda: waits.append(None)

    async def once_lost(current: str) -> str:
        if not current:
            raise SessionLost("gone")
        return current

    assert await session.call(once_lost) == "new"
    assert not waits
