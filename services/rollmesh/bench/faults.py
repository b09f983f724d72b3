"""Faults of services: failures of a machine, a network or an operator that affect processes of a running mesh."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from rollmesh.bench.attack import (
    BUSY_WAIT_SECONDS,
    IN_FLIGHT_GAUGES,
    AttackedRun,
    Cost,
    Fault,
    Victim,
    metrics_of,
    random_busy_process,
    random_process,
    send,
    sleep_while_running,
)
from rollmesh.launcher.timeline_recorder import GENERATED_TOKENS, process_key
from rollmesh.runtime.endpoints import read_endpoints


@dataclass(frozen=True, slots=True)
class KillService(Fault):
    """Fault that kills one process of a service (kill -9)."""

    service: str
    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return f"kill -9 {self.service}"

    def inject(self, attacked: AttackedRun) -> None:
        victim = random_busy_process(attacked, self.service)
        if victim is not None:
            if self.service == "generator":
                attacked.sampled_when_killed[process_key(victim.endpoint)] = metrics_of(victim.endpoint).get(
                    GENERATED_TOKENS, 0.0
                )
            attacked.strike_holder(victim, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class KillLeader(Fault):
    """Fault that kills the leading rollout replica (kill -9); another replica becomes the leader."""

    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return "kill -9 leader"

    def inject(self, attacked: AttackedRun) -> None:
        busy_until = time.monotonic() + BUSY_WAIT_SECONDS
        while attacked.may_strike():
            for replica in read_endpoints(attacked.folder, "rollout"):
                metrics = metrics_of(replica)
                rollouts = int(metrics.get(IN_FLIGHT_GAUGES["rollout"], 0.0))
                if metrics.get("rollmesh_rollout_leader") and (rollouts or time.monotonic() > busy_until):
                    attacked.strike_holder(Victim(endpoint=replica, rollouts=rollouts), signal.SIGKILL)
                    return
            time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class StallService(Fault):
    """Fault that stops a process of a service (SIGSTOP) for ``seconds``; its session may expire in that time."""

    service: str
    seconds: float
    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return f"stall {self.service} {self.seconds:g} s"

    def inject(self, attacked: AttackedRun) -> None:
        victim = random_busy_process(attacked, self.service)
        if victim is not None:
            attacked.strike_holder(victim, signal.SIGSTOP)
            sleep_while_running(attacked, self.seconds)
            send(victim.endpoint.pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class KillTrainerAfter(Fault):
    """Fault that kills the trainer (kill -9) when a new path of ``pattern`` appears, between two durable writes."""

    when: str
    pattern: str
    """Glob below the run folder for the new path."""
    cost: Cost = Cost.NOTHING

    @property
    def name(self) -> str:
        return f"kill -9 trainer {self.when}"

    def inject(self, attacked: AttackedRun) -> None:
        trainer = random_process(attacked, "trainer")
        before = set(attacked.folder.glob(self.pattern))
        while trainer is not None and attacked.may_strike():
            if set(attacked.folder.glob(self.pattern)) - before:
                attacked.strike(trainer.pid, signal.SIGKILL)
                return
            time.sleep(0.001)
