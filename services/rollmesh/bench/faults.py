"""Faults of the chaos bench: what a machine, a network or an operator does to a running mesh."""

from __future__ import annotations

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
import psutil
import redis

from rollmesh.launcher.sampler import GENERATED_TOKENS, metric_sums, process_key
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.store.embedded import EmbeddedServer
from rollmesh.store.keys import Keys

_HELD = {"rollout": "rollmesh_rollout_in_flight_trajectories", "generator": "rollmesh_generator_running_calls"}
"""Gauge of the rollouts that a process holds, by service."""

_PATIENCE_SECONDS = 5.0
"""How long a leader may be without rollouts of its own: all of the pool may lie with the other replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
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
        _send(pid, number)

    def strike_holder(self, victim: Victim, number: signal.Signals) -> None:
        """Strike a process and note how many rollouts it held.

        A worker is stopped first and its leases are counted in Redis: by its own metrics they are a moment old, and it
        takes dozens at once.
        """
        if victim.endpoint.service == "rollout":
            _send(victim.endpoint.pid, signal.SIGSTOP)
            self.in_flight.append(self.leases(f"rollout-{victim.endpoint.index}"))
        else:
            self.in_flight.append(victim.rollouts)
        self.strike(victim.endpoint.pid, number)

    def leases(self, worker: str) -> int:
        """Unfinished rollouts that the sessions of a worker hold in Redis."""
        keys = Keys(self.run)
        with redis.Redis(unix_socket_path=str(self.redis.socket_path), decode_responses=True) as client:
            sessions = [
                name
                for name in client.zrange(keys.single("sessions"), 0, -1)
                if client.hget(keys.of("session", name), "worker") == worker
            ]
            held = [name for session in sessions for name in client.smembers(keys.of("held", session))]
            states = [client.hget(keys.of("trajectory", name), "state") for name in held]
        return states.count("leased")


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A process and what it holds."""

    endpoint: Endpoint
    rollouts: int
    """Rollouts in flight there, by its own metrics an instant ago; 0 for a service that holds none."""


class Cost(Enum):
    """Sampled tokens that a fault may waste on each rollout of its victim."""

    NOTHING = "nothing"
    UNSAVED = "partial_save_tokens"
    """What had not been saved yet."""
    UNBOUNDED = "unbounded"
    """Redis itself loses work, or refuses to take it."""


class Fault(Protocol):
    """One thing that goes wrong."""

    @property
    def name(self) -> str:
        """What the table shows."""

    @property
    def cost(self) -> Cost:
        """What it may waste."""

    def inject(self, scene: Scene) -> None:
        """Do it, blocking; when the run is over before it can be done, nothing is struck."""


@dataclass(frozen=True, slots=True)
class KillService:
    """kill -9 of one process of a service."""

    service: str
    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return f"kill -9 {self.service}"

    def inject(self, scene: Scene) -> None:
        victim = _busy_one_of(scene, self.service)
        if victim is not None:
            if self.service == "generator":
                scene.counted[process_key(victim.endpoint)] = _metrics(victim.endpoint).get(GENERATED_TOKENS, 0.0)
            scene.strike_holder(victim, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class KillLeader:
    """kill -9 of the rollout replica that leads: another one takes over."""

    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return "kill -9 leader"

    def inject(self, scene: Scene) -> None:
        busy_until = time.monotonic() + _PATIENCE_SECONDS
        while scene.waits():
            for replica in read_endpoints(scene.folder, "rollout"):
                metrics = _metrics(replica)
                held = int(metrics.get(_HELD["rollout"], 0.0))
                if metrics.get("rollmesh_rollout_leader") and (held or time.monotonic() > busy_until):
                    scene.strike_holder(Victim(endpoint=replica, rollouts=held), signal.SIGKILL)
                    return
            time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class StallService:
    """SIGSTOP of one process of a service, SIGCONT after some seconds: it wakes up a zombie of its own session."""

    service: str
    seconds: float
    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return f"stall {self.service} {self.seconds:g} s"

    def inject(self, scene: Scene) -> None:
        victim = _busy_one_of(scene, self.service)
        if victim is not None:
            scene.strike_holder(victim, signal.SIGSTOP)
            _sleep(scene, self.seconds)
            _send(victim.endpoint.pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class KillTrainerAfter:
    """kill -9 of the trainer at the moment a new path of a kind appears: between two of its durable writes."""

    when: str
    pattern: str
    """Glob below the run folder: what has just been written."""
    cost: Cost = Cost.NOTHING

    @property
    def name(self) -> str:
        return f"kill -9 trainer {self.when}"

    def inject(self, scene: Scene) -> None:
        trainer = _one_of(scene, "trainer")
        before = set(scene.folder.glob(self.pattern))
        while trainer is not None and scene.waits():
            if set(scene.folder.glob(self.pattern)) - before:
                scene.strike(trainer.pid, signal.SIGKILL)
                return
            time.sleep(0.001)


@dataclass(frozen=True, slots=True)
class KillRedis:
    """kill -9 of Redis; optionally the end of its append-only file is lost, as in a power cut."""

    lost_bytes: int = 0
    cost: Cost = Cost.UNBOUNDED

    @property
    def name(self) -> str:
        return f"kill -9 redis, cut {self.lost_bytes >> 10} KiB of its AOF" if self.lost_bytes else "kill -9 redis"

    def inject(self, scene: Scene) -> None:
        pid = scene.redis.pid
        if pid is None:
            return
        # Stopped first: the launcher starts a dead server again at once, and must not find the file half cut.
        scene.strike(pid, signal.SIGSTOP)
        if self.lost_bytes:
            _cut_tail(scene.redis.folder, self.lost_bytes)
        _send(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class StallRedis:
    """Redis does not answer for a while."""

    seconds: float
    cost: Cost = Cost.UNBOUNDED

    @property
    def name(self) -> str:
        return f"redis outage {self.seconds:g} s"

    def inject(self, scene: Scene) -> None:
        pid = scene.redis.pid
        if pid is not None:
            scene.strike(pid, signal.SIGSTOP)
            _sleep(scene, self.seconds)
            _send(pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class FillRedis:
    """maxmemory is reached for a while: what needs memory is refused."""

    seconds: float
    cost: Cost = Cost.UNBOUNDED

    @property
    def name(self) -> str:
        return f"redis maxmemory reached {self.seconds:g} s"

    def inject(self, scene: Scene) -> None:
        with redis.Redis(unix_socket_path=str(scene.redis.socket_path)) as client:
            limit = client.config_get("maxmemory")["maxmemory"]
            # Half of what is used: freeing some of it must not end the fault early.
            client.config_set("maxmemory", int(client.info("memory")["used_memory"]) // 2)
            try:
                client.set("chaos-probe", 1, ex=1)
            except redis.exceptions.OutOfMemoryError:
                scene.struck_at.append(scene.train_step())
            try:
                _sleep(scene, self.seconds)
            finally:
                client.config_set("maxmemory", limit)


def _one_of(scene: Scene, service: str) -> Endpoint | None:
    while scene.waits():
        endpoints = read_endpoints(scene.folder, service)
        if endpoints:
            return scene.rng.choice(endpoints)
        time.sleep(0.05)
    return None


def _busy_one_of(scene: Scene, service: str) -> Victim | None:
    """One of the service's processes, at a moment when it holds rollouts that a fault can hurt."""
    held = _HELD.get(service)
    while scene.waits():
        one = _one_of(scene, service)
        rollouts = 0 if one is None or held is None else int(_metrics(one).get(held, 0.0))
        if one is not None and (held is None or rollouts):
            return Victim(endpoint=one, rollouts=rollouts)
        time.sleep(0.02)
    return None


def _metrics(endpoint: Endpoint) -> dict[str, float]:
    """Sums over the labels of what a process exports; empty while it does not answer."""
    try:
        return metric_sums(httpx.get(f"http://{endpoint.admin}/metrics", timeout=10.0).text)
    except httpx.HTTPError:
        return {}


def _send(pid: int, number: signal.Signals) -> None:
    if psutil.pid_exists(pid):
        os.kill(pid, number)


def _sleep(scene: Scene, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not scene.ended():
        time.sleep(0.05)


def _cut_tail(folder: Path, lost_bytes: int) -> None:
    files = sorted(folder.glob("appendonlydir/*.incr.aof"), key=lambda f: f.stat().st_mtime)
    if files:
        size = files[-1].stat().st_size
        os.truncate(files[-1], max(0, size - lost_bytes))
