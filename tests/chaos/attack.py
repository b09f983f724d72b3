"""Run under attack: its processes and leases, and the record of a fault."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
from redis import Redis

from rollmesh.launcher.timeline_recorder import metric_sums
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.store.embedded import EmbeddedServer
from rollmesh.store.scripts import Keys

from ..kit.openenv_server import OpenEnvServer
from .short_run import finished_train_steps

T = TypeVar("T")

IN_FLIGHT_GAUGES = {
    "rollout": "rollmesh_rollout_in_flight_trajectories",
    "agents": "rollmesh_agents_running_calls",
    "generator": "rollmesh_generator_running_calls",
}
"""Gauge of the rollouts in flight at a process, by service."""

BUSY_WAIT_SECONDS = 5.0
"""Limit of the wait for a leader, or a mesh, with rollouts in flight: the other replica may hold the whole pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackedRun:
    """Run under attack."""

    folder: Path
    run: str
    """Name of the run, which is part of its keys in Redis."""
    redis: EmbeddedServer
    rng: random.Random
    ended: Callable[[], bool]
    """Function that returns True after the end of the run; a waiting fault is then not injected."""
    deadline: float
    """Monotonic seconds after which a waiting fault is not injected."""
    environment: OpenEnvServer | None = None
    """Server of the environment, outside of the mesh."""
    struck_at: list[int] = field(default_factory=list)
    """Finished train steps at the time of each fault."""
    fault_ended_at: list[float] = field(default_factory=list)
    """Unix seconds of the end of each fault: the process is dead, or the stalled process runs again."""
    in_flight: list[int] = field(default_factory=list)
    """Rollouts in flight at each victim at the time of the fault."""
    killed_generators: list[str] = field(default_factory=list)
    """gRPC addresses of the killed generators; the logs of the workers name the broken calls."""
    sampled_when_killed: dict[str, float] = field(default_factory=dict)
    """Tokens that a generator had sampled when it was killed, by process."""

    def may_strike(self) -> bool:
        """Return True until the run has ended or the deadline has passed."""
        return not self.ended() and time.monotonic() < self.deadline

    def wait_for(self, find: Callable[[], T], pause: float = 0.001) -> T | None:
        """Poll until ``find`` returns something; return None if the run ends or the deadline passes first."""
        while self.may_strike():
            if found := find():
                return found
            time.sleep(pause)
        return None

    def strike(self, pid: int, number: signal.Signals) -> None:
        """Send the signal of the fault and record the train step."""
        self.struck_at.append(finished_train_steps(self.folder))
        send(pid, number)

    def strike_holder(self, victim: "Victim", number: signal.Signals) -> None:
        """Send the signal to a process and record its rollouts in flight.

        A worker is stopped first and its leases are counted in Redis: its metrics are slightly old, and it takes dozens
        of leases at once. For a killed generator, the workers' logs name the calls that had not ended: its own count
        excludes calls whose last tokens were sampled but not read, and these tokens are lost too.
        """
        if victim.endpoint.service in ("rollout", "agents"):
            send(victim.endpoint.pid, signal.SIGSTOP)
            self.in_flight.append(self.leases(f"{victim.endpoint.service}-{victim.endpoint.index}"))
        elif victim.endpoint.service == "generator" and number is signal.SIGKILL:
            self.killed_generators.append(victim.endpoint.grpc)
        else:
            self.in_flight.append(victim.rollouts)
        self.strike(victim.endpoint.pid, number)

    def leases(self, worker: str) -> int:
        """Count the unfinished rollouts that the sessions of a worker hold in Redis."""
        keys = Keys(self.run)
        with self._client() as client:
            sessions = [
                name
                for name in client.zrange(keys.single("sessions"), 0, -1)
                if client.hget(keys.of("session", name), "worker") == worker
            ]
            leases = [name for session in sessions for name in client.smembers(keys.of("held", session))]
            states = [client.hget(keys.of("trajectory", name), "state") for name in leases]
        return states.count("leased")

    def note_all_leased(self) -> None:
        """Record the number of leased rollouts in the mesh: each may have unsaved tokens."""
        with self._client() as client:
            client.ping()  # the reply means that all earlier commands are done
            self.in_flight.append(self._leased(client))

    def await_leases(self) -> None:
        """Wait briefly for a leased rollout: a fault of Redis without leases has no cost."""
        until = time.monotonic() + BUSY_WAIT_SECONDS
        with self._client() as client:
            self.wait_for(lambda: self._leased(client) or time.monotonic() > until, 0.02)

    def _leased(self, client: Redis) -> int:
        return int(client.hget(Keys(self.run).single("counts"), "leased") or 0)

    def _client(self) -> Redis:
        return Redis(unix_socket_path=str(self.redis.socket_path), decode_responses=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """Process and its rollouts in flight."""

    endpoint: Endpoint
    rollouts: int
    """Rollouts in flight, by the newest metrics of the process; 0 for a service that has none."""


def random_process(attacked: AttackedRun, service: str) -> Endpoint | None:
    """Return a random process of the service; None if the run ends before there is one."""
    endpoints = attacked.wait_for(lambda: read_endpoints(attacked.folder, service), 0.05)
    return attacked.rng.choice(endpoints) if endpoints else None


def random_busy_process(attacked: AttackedRun, service: str) -> Victim | None:
    """Wait for a random process of the service with rollouts in flight; None if the run ends first."""
    gauge = IN_FLIGHT_GAUGES.get(service)

    def busy_process() -> Victim | None:
        process = random_process(attacked, service)
        rollouts = 0 if process is None or gauge is None else int(metrics_of(process).get(gauge, 0.0))
        return Victim(endpoint=process, rollouts=rollouts) if process and (gauge is None or rollouts) else None

    return attacked.wait_for(busy_process, 0.02)


def metrics_of(endpoint: Endpoint) -> dict[str, float]:
    """Return the metrics of a process, summed over their labels; empty if it does not answer."""
    try:
        return metric_sums(httpx.get(f"http://{endpoint.admin}/metrics", timeout=10.0).text)
    except httpx.HTTPError:
        return {}


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def sleep_while_running(attacked: AttackedRun, seconds: float) -> None:
    """Sleep for the duration of a fault, or until the run ends."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not attacked.ended():
        time.sleep(0.05)
