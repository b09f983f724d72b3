"""Faults: kills and stalls of services, failures of Redis, and damaged files, each in a running mesh."""

import contextlib
import fcntl
import functools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import redis
from redis import Redis

from rollmesh.launcher.timeline_recorder import GENERATED_TOKENS, process_key
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.store.scripts import Keys

from .attack import (
    BUSY_WAIT_SECONDS,
    IN_FLIGHT_GAUGES,
    AttackedRun,
    Victim,
    metrics_of,
    random_busy_process,
    random_process,
    send,
    sleep_while_running,
)
from .short_run import finished_train_steps

_STATES, _BATCHES, _POLICIES = "checkpoints/states", "checkpoints/batches", "checkpoints/policies"


def kill_service(attacked: AttackedRun, service: str) -> None:
    """Kill one process of a service (kill -9)."""
    victim = random_busy_process(attacked, service)
    if victim is None:
        return
    if service == "generator":
        sampled = metrics_of(victim.endpoint).get(GENERATED_TOKENS, 0.0)
        attacked.sampled_when_killed[process_key(victim.endpoint)] = sampled
    attacked.strike_holder(victim, signal.SIGKILL)


def kill_environment(attacked: AttackedRun, away_seconds: float = 3.0) -> None:
    """Kill the server of the environment (kill -9) while rollouts are in progress; it starts again after a while."""
    if attacked.environment is not None and random_busy_process(attacked, "rollout") is not None:
        attacked.struck_at.append(finished_train_steps(attacked.folder))
        attacked.environment.kill()
        sleep_while_running(attacked, away_seconds)
        attacked.environment.start(attacked.environment.port)


def kill_leader(attacked: AttackedRun) -> None:
    """Kill the leading rollout replica (kill -9); another replica becomes the leader."""
    busy_until = time.monotonic() + BUSY_WAIT_SECONDS

    def leader() -> Victim | None:
        for replica in read_endpoints(attacked.folder, "rollout"):
            metrics = metrics_of(replica)
            rollouts = int(metrics.get(IN_FLIGHT_GAUGES["rollout"], 0.0))
            if metrics.get("rollmesh_rollout_leader") and (rollouts or time.monotonic() > busy_until):
                return Victim(endpoint=replica, rollouts=rollouts)
        return None

    if victim := attacked.wait_for(leader, 0.05):
        attacked.strike_holder(victim, signal.SIGKILL)


def stall_service(attacked: AttackedRun, service: str, seconds: float) -> None:
    """Stop a process of a service (SIGSTOP) for some seconds; its session may expire in that time."""
    victim = random_busy_process(attacked, service)
    if victim is not None:
        attacked.strike_holder(victim, signal.SIGSTOP)
        sleep_while_running(attacked, seconds)
        send(victim.endpoint.pid, signal.SIGCONT)


def kill_trainer_after(attacked: AttackedRun, pattern: str) -> None:
    """Kill the trainer (kill -9) when a new path of this glob pattern appears below the run folder."""
    trainer = random_process(attacked, "trainer")
    before = set(attacked.folder.glob(pattern))
    new = attacked.wait_for(lambda: set(attacked.folder.glob(pattern)) - before)
    if trainer is not None and new:
        attacked.strike(trainer.pid, signal.SIGKILL)


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


def damage_last_step(attacked: AttackedRun, train_step: int, *, after_the_end: bool = False) -> None:
    """Damage the last step's batch file (one byte), and damage its trainer state, or delete it after the end.

    While the run ends, its launcher must detect the damage. After the end of the run, a later audit must.
    """
    pattern = f"{_STATES}/{train_step:08d}-*/COMMITTED"
    attacked.wait_for(lambda: not after_the_end and any(attacked.folder.glob(pattern)))
    for committed in attacked.folder.glob(pattern):
        if after_the_end:
            shutil.rmtree(committed.parent)
        else:
            flip_byte(committed, attacked.rng)
        flip_byte(attacked.folder / _BATCHES / f"{train_step:08d}.pb", attacked.rng)
        attacked.struck_at.append(finished_train_steps(attacked.folder))


def damage_replay(attacked: AttackedRun) -> None:
    """Damage a batch file newer than the newest trainer state (one byte), and kill the trainer."""

    def uncovered() -> Path | None:
        files = sorted((attacked.folder / _BATCHES).glob("[0-9]*.pb"))
        covered = max((int(c.parent.name.split("-")[0]) for c in _committed(attacked)), default=0)
        return files[-1] if files and int(files[-1].stem) > covered else None

    _damage_and_kill(attacked, uncovered)


def damage_state(attacked: AttackedRun) -> None:
    """Damage the newest trainer state (one byte) and kill the trainer, so that an older state is used."""

    def weights() -> Path | None:
        newest = max(_committed(attacked), key=lambda committed: committed.parent.name, default=None)
        return None if newest is None else next(newest.parent.glob("*.safetensors"), None)

    _damage_and_kill(attacked, weights)


def damage_policy(attacked: AttackedRun) -> None:
    """Damage the newest policy (one byte) before a generator reads it, and kill the trainer.

    The generators are stopped during the damage: tokens that they sampled from a damaged policy could not be verified.
    """
    trainer = random_process(attacked, "trainer")
    batches, announced = _paths(attacked, f"{_BATCHES}/[0-9]*.pb"), f"{_POLICIES}/*/ANNOUNCED"
    attacked.wait_for(lambda: _paths(attacked, f"{_BATCHES}/[0-9]*.pb") != batches)
    generators = read_endpoints(attacked.folder, "generator")
    try:
        for generator in generators:
            send(generator.pid, signal.SIGSTOP)
        attacked.note_all_leased()
        before = _paths(attacked, announced)
        new = attacked.wait_for(lambda: _paths(attacked, announced) - before)
        if trainer is not None and new:
            send(trainer.pid, signal.SIGSTOP)
            flip_byte(max(new).parent / "model.safetensors", attacked.rng)
            attacked.strike(trainer.pid, signal.SIGKILL)
    finally:
        for generator in generators:
            send(generator.pid, signal.SIGCONT)


def lose_policies(attacked: AttackedRun) -> None:
    """Kill a generator and delete the node's announced policies; wait until one is pulled from the bucket again.

    The trainer is stopped meanwhile: generators would load the newer policies that it publishes on this node.
    """
    trainer = random_process(attacked, "trainer")
    kill_service(attacked, "generator")
    if trainer is None:
        return
    send(trainer.pid, signal.SIGSTOP)
    try:
        folders = [marker.parent for marker in _paths(attacked, f"{_POLICIES}/*/ANNOUNCED")]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)  # the mesh may delete the same folder
        if not attacked.wait_for(lambda: any((folder / "manifest.json").exists() for folder in folders), 0.02):
            attacked.struck_at.clear()  # the round fails: nothing was pulled
    finally:
        send(trainer.pid, signal.SIGCONT)


def flip_byte(file: Path, rng: random.Random) -> None:
    """Flip one bit of a byte in the second quarter of a file; in a batch file, that byte belongs to a trajectory."""
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content) // 4, len(content) // 2)] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def _damage_and_kill(attacked: AttackedRun, target: Callable[[], Path | None]) -> None:
    """Wait for the target file, flip one of its bytes while the trainer is stopped, and kill the trainer."""
    trainer = random_process(attacked, "trainer")
    while trainer is not None and attacked.wait_for(lambda: target() is not None, 0.005):
        send(trainer.pid, signal.SIGSTOP)
        if (file := target()) is not None:
            flip_byte(file, attacked.rng)
            attacked.strike(trainer.pid, signal.SIGKILL)
            return
        send(trainer.pid, signal.SIGCONT)


def _committed(attacked: AttackedRun) -> set[Path]:
    return _paths(attacked, f"{_STATES}/*/COMMITTED")


def _paths(attacked: AttackedRun, pattern: str) -> set[Path]:
    return set(attacked.folder.glob(pattern))
