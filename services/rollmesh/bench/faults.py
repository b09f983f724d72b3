"""Faults of services: what a machine, a network or an operator does to the processes of a running mesh."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from rollmesh.bench.attack import (
    HELD,
    PATIENCE_SECONDS,
    AttackedRun,
    Cost,
    Fault,
    Victim,
    busy_one_of,
    metrics_of,
    one_of,
    send,
    sleep_unless_over,
)
from rollmesh.launcher.timeline_recorder import GENERATED_TOKENS, process_key
from rollmesh.runtime.endpoints import read_endpoints


@dataclass(frozen=True, slots=True)
class KillService(Fault):
    """kill -9 of one process of a service."""

    service: str
    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return f"kill -9 {self.service}"

    def inject(self, scene: AttackedRun) -> None:
        victim = busy_one_of(scene, self.service)
        if victim is not None:
            if self.service == "generator":
                scene.counted[process_key(victim.endpoint)] = metrics_of(victim.endpoint).get(GENERATED_TOKENS, 0.0)
            scene.strike_holder(victim, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class KillLeader(Fault):
    """kill -9 of the rollout replica that leads: another one takes over."""

    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return "kill -9 leader"

    def inject(self, scene: AttackedRun) -> None:
        busy_until = time.monotonic() + PATIENCE_SECONDS
        while scene.waits():
            for replica in read_endpoints(scene.folder, "rollout"):
                metrics = metrics_of(replica)
                held = int(metrics.get(HELD["rollout"], 0.0))
                if metrics.get("rollmesh_rollout_leader") and (held or time.monotonic() > busy_until):
                    scene.strike_holder(Victim(endpoint=replica, rollouts=held), signal.SIGKILL)
                    return
            time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class StallService(Fault):
    """SIGSTOP of one process of a service, SIGCONT after some seconds: it wakes up a zombie of its own session."""

    service: str
    seconds: float
    cost: Cost = Cost.UNSAVED

    @property
    def name(self) -> str:
        return f"stall {self.service} {self.seconds:g} s"

    def inject(self, scene: AttackedRun) -> None:
        victim = busy_one_of(scene, self.service)
        if victim is not None:
            scene.strike_holder(victim, signal.SIGSTOP)
            sleep_unless_over(scene, self.seconds)
            send(victim.endpoint.pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class KillTrainerAfter(Fault):
    """kill -9 of the trainer at the moment a new path of a kind appears: between two of its durable writes."""

    when: str
    pattern: str
    """Glob below the run folder: what has just been written."""
    cost: Cost = Cost.NOTHING

    @property
    def name(self) -> str:
        return f"kill -9 trainer {self.when}"

    def inject(self, scene: AttackedRun) -> None:
        trainer = one_of(scene, "trainer")
        before = set(scene.folder.glob(self.pattern))
        while trainer is not None and scene.waits():
            if set(scene.folder.glob(self.pattern)) - before:
                scene.strike(trainer.pid, signal.SIGKILL)
                return
            time.sleep(0.001)
