"""What a fault of the chaos bench sees of the run that it attacks, and how it strikes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

import httpx
from redis import Redis

from rollmesh.launcher.timeline_recorder import metric_sums
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.store.embedded import EmbeddedServer
from rollmesh.store.keys import Keys

HELD = {"rollout": "rollmesh_rollout_in_flight_trajectories", "generator": "rollmesh_generator_running_calls"}
"""Gauge of the rollouts that a process holds, by service."""

PATIENCE_SECONDS = 5.0
"""How long a leader may be without rollouts of its own, all of the pool may lie with the other replica; and how long
the mesh may be without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackedRun:
    """The run under attack."""

    folder: Path
    run: str
    """Name of the run: its keys in Redis carry it."""
    redis: EmbeddedServer
    rng: random.Random
    ended: Callable[[], bool]
    """Whether the run is over: a fault that waits gives up then."""
    deadline: float
    """Monotonic second at which a fault that still waits for its moment gives up."""
    struck_at: list[int] = field(default_factory=list)
    """Train steps done when a fault struck."""
    over_at: list[float] = field(default_factory=list)
    """Unix seconds at which a fault was over: the process killed, the stalled one running again."""
    in_flight: list[int] = field(default_factory=list)
    """Rollouts that each victim held when it was struck."""
    killed_generators: list[str] = field(default_factory=list)
    """gRPC addresses of the generators that were killed; who had a call there, the workers say afterwards."""
    counted: dict[str, float] = field(default_factory=dict)
    """Tokens that a generator had sampled when it was killed, by process."""

    def train_step(self) -> int:
        """Train steps done: lines of the run's metrics."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def waits(self) -> bool:
        """Whether it is not too late for a fault to strike."""
        return not self.ended() and time.monotonic() < self.deadline

    def strike(self, pid: int, number: signal.Signals) -> None:
        """Send the signal that is the fault."""
        self.struck_at.append(self.train_step())
        send(pid, number)

    def strike_holder(self, victim: Victim, number: signal.Signals) -> None:
        """Strike a process and note how many rollouts it held.

        A worker is stopped first and its leases are counted in Redis: by its own metrics they are a moment old, and it
        takes dozens at once. Of a killed generator only the workers know which calls had not ended: its own count
        leaves out those whose last tokens were sampled and not read yet, and these tokens are lost with it.
        """
        if victim.endpoint.service == "rollout":
            send(victim.endpoint.pid, signal.SIGSTOP)
            self.in_flight.append(self.leases(f"rollout-{victim.endpoint.index}"))
        elif victim.endpoint.service == "generator" and number is signal.SIGKILL:
            self.killed_generators.append(victim.endpoint.grpc)
        else:
            self.in_flight.append(victim.rollouts)
        self.strike(victim.endpoint.pid, number)

    def leases(self, worker: str) -> int:
        """Unfinished rollouts that the sessions of a worker hold in Redis."""
        keys = Keys(self.run)
        with self._client() as client:
            sessions = [
                name
                for name in client.zrange(keys.single("sessions"), 0, -1)
                if client.hget(keys.of("session", name), "worker") == worker
            ]
            held = [name for session in sessions for name in client.smembers(keys.of("held", session))]
            states = [client.hget(keys.of("trajectory", name), "state") for name in held]
        return states.count("leased")

    def note_all_leased(self) -> None:
        """Note how many unfinished rollouts the whole mesh holds: each may have tokens that are not saved."""
        with self._client() as client:
            client.ping()  # when it is answered, what was sent before it has been done
            self.in_flight.append(self._leased(client))

    def await_leases(self) -> None:
        """Wait, not long, for a moment when some rollout is held: a fault of Redis without one costs nothing."""
        until = time.monotonic() + PATIENCE_SECONDS
        with self._client() as client:
            while not self._leased(client) and self.waits() and time.monotonic() < until:
                time.sleep(0.02)

    def _leased(self, client: Redis) -> int:
        return int(client.hget(Keys(self.run).single("counts"), "leased") or 0)

    def _client(self) -> Redis:
        return Redis(unix_socket_path=str(self.redis.socket_path), decode_responses=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A process and what it holds."""

    endpoint: Endpoint
    rollouts: int
    """Rollouts in flight there, by its own metrics an instant ago; 0 for a service that holds none."""


class Cost(Enum):
    """Sampled tokens that a fault may waste on each rollout of its victim; all of the mesh are Redis's."""

    NOTHING = "nothing"
    UNSAVED = "partial_save_tokens"
    """What had not been saved yet."""
    UNBOUNDED = "unbounded"
    """Redis loses what it had taken: whole rollouts that nobody holds any more may have to be sampled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run must end that has met a fault."""

    exit_statuses: tuple[int, ...] = (0,)
    """Of ``rollmesh up``; then, where the run is not to be green, of a ``rollmesh audit``."""
    green: bool = True
    """Whether the audit has to be green, and the outside judge to find no problem."""
    says: str = ""
    """Part of the console's output."""


class Fault(Protocol):
    """One thing that goes wrong."""

    @property
    def name(self) -> str:
        """What the table shows."""

    @property
    def cost(self) -> Cost:
        """What it may waste."""

    @property
    def ending(self) -> Ending:
        """How the run must end."""
        return Ending()

    def inject(self, scene: AttackedRun) -> None:
        """Do it, blocking; when the run is over before it can be done, nothing is struck."""


def one_of(scene: AttackedRun, service: str) -> Endpoint | None:
    """A process of the service by chance; None when the run is over before there is one."""
    while scene.waits():
        endpoints = read_endpoints(scene.folder, service)
        if endpoints:
            return scene.rng.choice(endpoints)
        time.sleep(0.05)
    return None


def busy_one_of(scene: AttackedRun, service: str) -> Victim | None:
    """One of the service's processes, at a moment when it holds rollouts that a fault can hurt."""
    held = HELD.get(service)
    while scene.waits():
        one = one_of(scene, service)
        rollouts = 0 if one is None or held is None else int(metrics_of(one).get(held, 0.0))
        if one is not None and (held is None or rollouts):
            return Victim(endpoint=one, rollouts=rollouts)
        time.sleep(0.02)
    return None


def metrics_of(endpoint: Endpoint) -> dict[str, float]:
    """Sums over the labels of what a process exports; empty while it does not answer."""
    try:
        return metric_sums(httpx.get(f"http://{endpoint.admin}/metrics", timeout=10.0).text)
    except httpx.HTTPError:
        return {}


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def sleep_unless_over(scene: AttackedRun, seconds: float) -> None:
    """Let a fault last, but not beyond the end of the run."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not scene.ended():
        time.sleep(0.05)
