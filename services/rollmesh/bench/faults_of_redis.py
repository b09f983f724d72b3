"""Faults of Redis: it is killed, does not answer, or is full."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import redis
from redis import Redis

from rollmesh.bench.attack import AttackedRun, Cost, Ending, Fault, one_of, send, sleep_unless_over
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.store.keys import Keys


@dataclass(frozen=True, slots=True)
class KillRedis(Fault):
    """kill -9 of Redis; optionally the end of its append-only file is lost, or is zeros, as after a power cut.

    The launcher starts it again at once, or after ``away_seconds``: until then connections are refused. Without a cut
    there is no bound either: with AOF every second, a server whose disk is slow answers up to two seconds before it
    writes, and a kill takes what was answered along.
    """

    lost_bytes: int = 0
    zero_bytes: int = 0
    away_seconds: float = 0.0
    cost: Cost = Cost.UNBOUNDED

    @property
    def name(self) -> str:
        lost = f", cut {self.lost_bytes >> 10} KiB of its AOF" if self.lost_bytes else ""
        zeros = f", {self.zero_bytes >> 10} KiB of zeros at the end of its AOF" if self.zero_bytes else ""
        return f"kill -9 redis{lost}{zeros}" + (f", refused {self.away_seconds:g} s" if self.away_seconds else "")

    @property
    def ending(self) -> Ending:
        return Ending(says="append-only file of the embedded Redis was damaged" if self.zero_bytes else "")

    def inject(self, scene: AttackedRun) -> None:
        pid = scene.redis.pid
        if pid is None:
            return
        # Stopped first: the launcher starts a dead server again at once, and must not find the file half cut.
        scene.strike(pid, signal.SIGSTOP)
        if self.lost_bytes or self.zero_bytes:
            _damage_tail(scene.redis.folder, self.lost_bytes, self.zero_bytes)
        with open(scene.redis.folder / "lock", "a", encoding="utf-8") as lock:
            send(pid, signal.SIGKILL)
            if self.away_seconds:
                _take_lock(scene, lock.fileno(), pid)
                sleep_unless_over(scene, self.away_seconds)


@dataclass(frozen=True, slots=True)
class StallRedis(Fault):
    """Redis does not answer for a while.

    It loses nothing that it has taken. Workers hold what is not saved, at most ``partial_save_tokens`` of each rollout,
    and it is lost at most once: when the sessions end in the outage and another worker is the first to lease the
    rollout. Nobody leases during it.
    """

    seconds: float
    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return f"redis outage {self.seconds:g} s"

    def inject(self, scene: AttackedRun) -> None:
        pid = scene.redis.pid
        if pid is None:
            return
        scene.await_leases()
        workers = [endpoint.pid for endpoint in read_endpoints(scene.folder, "rollout")]
        try:
            # They take dozens of leases at once, and none between the count and the fault.
            for worker in workers:
                send(worker, signal.SIGSTOP)
            scene.note_all_leased()
            scene.strike(pid, signal.SIGSTOP)
        finally:
            for worker in workers:
                send(worker, signal.SIGCONT)
        sleep_unless_over(scene, self.seconds)
        send(pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class FillRedis(Fault):
    """maxmemory is reached for a while: what needs memory is refused. A trainer dies in it, and has to begin again.

    Leases and saves are refused, heartbeats are not: workers wait with what is not saved, at most
    ``partial_save_tokens`` of each rollout. The trainer holds no rollouts.
    """

    seconds: float
    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return f"redis maxmemory reached {self.seconds:g} s, kill -9 trainer"

    def inject(self, scene: AttackedRun) -> None:
        scene.await_leases()
        with Redis(unix_socket_path=str(scene.redis.socket_path)) as client:
            limit = client.config_get("maxmemory")["maxmemory"]
            # Half of what is used: freeing some of it must not end the fault early.
            client.config_set("maxmemory", int(client.info("memory")["used_memory"]) // 2)
            try:
                try:
                    client.set("chaos-probe", 1, ex=1)
                except redis.exceptions.OutOfMemoryError:
                    scene.note_all_leased()  # from here on none is leased
                    self._restart_trainer(scene, client)
                sleep_unless_over(scene, self.seconds)
            finally:
                client.config_set("maxmemory", limit)

    def _restart_trainer(self, scene: AttackedRun, client: Redis) -> None:
        """Kill the trainer; the fault has struck once another one has opened its session in the full server."""
        session = functools.partial(client.hget, Keys(scene.run).single("meta"), "trainer")
        trainer, before, step = one_of(scene, "trainer"), session(), scene.train_step()
        if trainer is None:
            return
        send(trainer.pid, signal.SIGKILL)
        while session() == before and scene.waits():
            time.sleep(0.05)
        if session() != before:
            scene.struck_at.append(step)


def _take_lock(scene: AttackedRun, descriptor: int, killed: int) -> None:
    """Hold the lock of Redis's folder, without which no other server starts there."""
    while scene.waits():
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        another = scene.redis.pid
        if another is not None and another != killed:  # the launcher was faster
            send(another, signal.SIGKILL)
        time.sleep(0.001)


def _damage_tail(folder: Path, lost_bytes: int, zero_bytes: int) -> None:
    files = sorted(folder.glob("appendonlydir/*.incr.aof"), key=lambda f: f.stat().st_mtime)
    if files:
        size = files[-1].stat().st_size
        kept = max(0, size - lost_bytes)
        os.truncate(files[-1], kept)
        os.truncate(files[-1], kept + zero_bytes)  # a file that grows is filled with zeros
