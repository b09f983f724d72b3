"""Faults of services: failures of a machine, a network or an operator that affect processes of a running mesh."""

from __future__ import annotations

import signal
import time

from rollmesh.launcher.timeline_recorder import GENERATED_TOKENS, process_key
from rollmesh.runtime.endpoints import read_endpoints

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


def kill_service(attacked: AttackedRun, service: str) -> None:
    """Kill one process of a service (kill -9)."""
    victim = random_busy_process(attacked, service)
    if victim is None:
        return
    if service == "generator":
        sampled = metrics_of(victim.endpoint).get(GENERATED_TOKENS, 0.0)
        attacked.sampled_when_killed[process_key(victim.endpoint)] = sampled
    attacked.strike_holder(victim, signal.SIGKILL)


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
