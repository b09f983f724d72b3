"""Faults of the chaos bench: what a machine, a network or an operator does to a running mesh."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import redis

from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.store.embedded import EmbeddedServer

_DEADLINE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The run under attack."""

    folder: Path
    redis: EmbeddedServer
    rng: random.Random
    ended: Callable[[], bool]
    """Whether the run is over: a fault that waits gives up then."""


class Fault(Protocol):
    """One thing that goes wrong."""

    @property
    def name(self) -> str:
        """What the table shows."""

    @property
    def kills(self) -> int:
        """Processes whose unsaved tokens may be lost."""

    def inject(self, scene: Scene) -> bool:
        """Do it, blocking; False when the run was over before it could be done."""


@dataclass(frozen=True, slots=True)
class KillService:
    """kill -9 of one process of a service."""

    service: str
    kills: int = 1

    @property
    def name(self) -> str:
        return f"kill -9 {self.service}"

    def inject(self, scene: Scene) -> bool:
        return _signal_one(scene, self.service, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class StallService:
    """SIGSTOP of one process of a service, SIGCONT after some seconds: it wakes up a zombie of its own session."""

    service: str
    seconds: float
    kills: int = 1

    @property
    def name(self) -> str:
        return f"stall {self.service} {self.seconds:g} s"

    def inject(self, scene: Scene) -> bool:
        pid = _pid_of_one(scene, self.service)
        if pid is None:
            return False
        _send(pid, signal.SIGSTOP)
        _sleep(scene, self.seconds)
        _send(pid, signal.SIGCONT)
        return True


@dataclass(frozen=True, slots=True)
class KillTrainerAfter:
    """kill -9 of the trainer at the moment a new path of a kind appears: between two of its durable writes."""

    what: str
    pattern: str
    """Glob below the run folder."""
    kills: int = 0

    @property
    def name(self) -> str:
        return f"kill -9 trainer after {self.what}"

    def inject(self, scene: Scene) -> bool:
        before = set(scene.folder.glob(self.pattern))
        while not scene.ended():
            if set(scene.folder.glob(self.pattern)) - before:
                return _signal_one(scene, "trainer", signal.SIGKILL)
            time.sleep(0.002)
        return False


@dataclass(frozen=True, slots=True)
class KillRedis:
    """kill -9 of Redis; optionally the end of its append-only file is lost, as in a power cut."""

    lost_bytes: int = 0
    kills: int = 0

    @property
    def name(self) -> str:
        return f"kill -9 redis, lose {self.lost_bytes} B of its AOF" if self.lost_bytes else "kill -9 redis"

    def inject(self, scene: Scene) -> bool:
        pid = scene.redis.pid
        if pid is None:
            return False
        _send(pid, signal.SIGKILL)
        if self.lost_bytes:
            _cut_tail(scene.redis.folder, self.lost_bytes)
        return True


@dataclass(frozen=True, slots=True)
class StallRedis:
    """Redis does not answer for a while."""

    seconds: float
    kills: int = 0

    @property
    def name(self) -> str:
        return f"redis outage {self.seconds:g} s"

    def inject(self, scene: Scene) -> bool:
        pid = scene.redis.pid
        if pid is None:
            return False
        _send(pid, signal.SIGSTOP)
        _sleep(scene, self.seconds)
        _send(pid, signal.SIGCONT)
        return True


@dataclass(frozen=True, slots=True)
class FillRedis:
    """maxmemory is reached for a while: writes are refused with OOM."""

    seconds: float
    kills: int = 0

    @property
    def name(self) -> str:
        return f"redis maxmemory reached {self.seconds:g} s"

    def inject(self, scene: Scene) -> bool:
        with redis.Redis(unix_socket_path=str(scene.redis.socket_path)) as client:
            limit = client.config_get("maxmemory")["maxmemory"]
            client.config_set("maxmemory", int(client.info("memory")["used_memory"]))
            try:
                _sleep(scene, self.seconds)
            finally:
                client.config_set("maxmemory", limit)
        return True


def _signal_one(scene: Scene, service: str, number: signal.Signals) -> bool:
    pid = _pid_of_one(scene, service)
    if pid is None:
        return False
    _send(pid, number)
    return True


def _pid_of_one(scene: Scene, service: str) -> int | None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not scene.ended() and time.monotonic() < deadline:
        endpoints = read_endpoints(scene.folder, service)
        if endpoints:
            return scene.rng.choice(endpoints).pid
        time.sleep(0.05)
    return None


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
