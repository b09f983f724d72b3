"""Faults of Redis: a kill, a stall, and a full memory."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import time
from pathlib import Path

import redis
from redis import Redis

from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.store.scripts import Keys

from .attack import AttackedRun, random_process, send, sleep_while_running
from .short_run import finished_train_steps


def kill_redis(attacked: AttackedRun, *, lost_bytes: int = 0, zero_bytes: int = 0, away_seconds: float = 0.0) -> None:
    """Kill Redis (kill -9) and cut or zero the end of its append-only file, like the result of a power failure.

    The launcher restarts Redis at once, or after ``away_seconds``; until then connections are refused.
    """
    pid = attacked.redis.pid
    if pid is None:
        return
    # Stop the server first: the launcher restarts a dead server at once and must not read a half-cut file.
    attacked.strike(pid, signal.SIGSTOP)
    if lost_bytes or zero_bytes:
        _damage_tail(attacked.redis.folder, lost_bytes, zero_bytes)
    with open(attacked.redis.folder / "lock", "a", encoding="utf-8") as lock:
        send(pid, signal.SIGKILL)
        if away_seconds:
            _take_lock(attacked, lock.fileno(), pid)
            sleep_while_running(attacked, away_seconds)


def stall_redis(attacked: AttackedRun, seconds: float) -> None:
    """Stall Redis for some seconds.

    Redis loses no stored data. Workers keep the unsaved tokens, at most ``partial_save_tokens`` of each rollout. These
    are lost at most once: if the sessions expire in the outage and another worker leases the rollout first. There are
    no new leases during the outage.
    """
    pid = attacked.redis.pid
    if pid is None:
        return
    attacked.await_leases()
    workers = [endpoint.pid for endpoint in read_endpoints(attacked.folder, "rollout")]
    try:
        # Workers take dozens of leases at once; stop them so that none is taken between the count and the fault.
        for worker in workers:
            send(worker, signal.SIGSTOP)
        attacked.note_all_leased()
        attacked.strike(pid, signal.SIGSTOP)
    finally:
        for worker in workers:
            send(worker, signal.SIGCONT)
    sleep_while_running(attacked, seconds)
    send(pid, signal.SIGCONT)


def fill_redis(attacked: AttackedRun, seconds: float) -> None:
    """Fill Redis (maxmemory) for some seconds, so that it rejects writes, and kill the trainer.

    Redis rejects leases and saves, but not heartbeats. Workers keep the unsaved tokens, at most ``partial_save_tokens``
    of each rollout. The trainer holds no rollouts.
    """
    attacked.await_leases()
    with Redis(unix_socket_path=str(attacked.redis.socket_path)) as client:
        limit = client.config_get("maxmemory")["maxmemory"]
        # Half of the used memory, so that freed memory does not end the fault early.
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) // 2)
        try:
            try:
                client.set("chaos-probe", 1, ex=1)
            except redis.exceptions.OutOfMemoryError:
                attacked.note_all_leased()  # no leases are granted after this point
                _restart_trainer(attacked, client)
            sleep_while_running(attacked, seconds)
        finally:
            client.config_set("maxmemory", limit)


def _restart_trainer(attacked: AttackedRun, client: Redis) -> None:
    """Kill the trainer; the fault counts once a new trainer has opened its session on the full server."""
    session = functools.partial(client.hget, Keys(attacked.run).single("meta"), "trainer")
    trainer, before, step = random_process(attacked, "trainer"), session(), finished_train_steps(attacked.folder)
    if trainer is None:
        return
    send(trainer.pid, signal.SIGKILL)
    if attacked.wait_for(lambda: session() != before, 0.05):
        attacked.struck_at.append(step)


def _take_lock(attacked: AttackedRun, descriptor: int, killed: int) -> None:
    """Take the lock of Redis's folder, so that no other server starts there."""
    while attacked.may_strike():
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        another = attacked.redis.pid
        if another is not None and another != killed:  # the launcher restarted it first
            send(another, signal.SIGKILL)
        time.sleep(0.001)


def _damage_tail(folder: Path, lost_bytes: int, zero_bytes: int) -> None:
    files = sorted(folder.glob("appendonlydir/*.incr.aof"), key=lambda f: f.stat().st_mtime)
    if files:
        size = files[-1].stat().st_size
        kept = max(0, size - lost_bytes)
        os.truncate(files[-1], kept)
        os.truncate(files[-1], kept + zero_bytes)  # the added bytes are zeros
