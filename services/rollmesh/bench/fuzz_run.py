"""Run under test of the fuzz bench: its processes, their memory and logs, and its ports."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import numpy as np
import psutil
import yaml
from grpc_health.v1 import health_pb2

from rollmesh.bench.chaos import round_config
from rollmesh.bench.fuzz_ports import GrpcPort, HttpPort, RawPort
from rollmesh.checkpoints.api_token import TOKEN_FILE as GATEWAY_TOKEN_FILE
from rollmesh.errors import RollmeshError
from rollmesh.launcher.mesh_token import TOKEN_FILE
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.grpc import call_metadata
from rollmesh.store.embedded import EmbeddedServer
from rollmesh.v1 import generation_service_pb2 as generation
from rollmesh.v1 import generation_service_pb2_grpc as generation_stubs
from rollmesh.v1 import reward_service_pb2 as reward

_NAME = "fuzz"
_PROGRESS_SECONDS = 300.0
_AUDIT_SECONDS = 1200.0
_ENDLESS = 1_000_000
_MAX_MESSAGE: list[tuple[str, Any]] = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
"""Options of our channels: they remove the client's limit, so that the server's limit applies."""
_ADMIN_DOCUMENT: Mapping[str, Any] = {"paths": {path: {"get": {}} for path in ("/metrics", "/healthz", "/readyz")}}
_KNOWN_FIELDS: Mapping[str, Sequence[Any]] = {
    "trajectory_id": ("f-1", "f-2", "f-3"),
    "group_id": ("f",),
    "dtype": (1,),
    "data": (np.array([1, 2, 3, 4], np.int32).tobytes(),),
    "prompt_token_count": (4,),
    "max_new_token_count": (1, 8),
    "chunk_token_count": (1, 4),
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, 5),
    "stop_token_ids": (1, 2),
    "min_policy_version": (0,),
    "pinned_policy_version_plus_one": (0,),
    "unacknowledged_token_limit": (0, 8),
    "verifier": ("countdown", "countdown", "countdown", "exact", "math", "python_code"),
    "finish_reason": (1, 2),
    "service": ("", "rollmesh.v1.GenerationService"),
}
_KNOWN_JSON: Mapping[str, Sequence[Any]] = {
    "model": (_NAME, f"{_NAME}@0"),
    "prompt": ("1 + 2", [1, 2, 3]),
    "max_tokens": (1, 8),
    "max_completion_tokens": (1, 8),
    "n": (1, 2),
    "temperature": (1.0,),
    "stream": (True, False),
    "wait_seconds": (0.0, 0.1),
}


class FuzzError(RollmeshError):
    """The run did not start, or stopped training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """State of a service process at one time."""

    pid: int
    rss: int
    """Resident memory of the process and its children, in bytes."""
    lines: int
    """Number of lines in its log."""
    tracebacks: tuple[str, ...]
    """Lines of its log with a traceback."""


@dataclass(frozen=True, slots=True)
class FuzzedRun:
    """Run below ``root``."""

    root: Path

    @property
    def folder(self) -> RunFolder:
        """Run folder."""
        return RunFolder(self.root / "run")

    @property
    def train_steps(self) -> int:
        """Number of finished train steps: the lines of the run's metrics."""
        metrics = self.folder.metrics
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def write(self) -> None:
        """Write the run file: a chaos round with the demo's batches and without an end."""
        data = round_config(self.root / "run", 0)
        data["schedule"] |= {"groups_per_batch": 16, "group_size": 8, "pool_size": 192}
        data["trainer"] |= {"train_steps": _ENDLESS}
        data["checkpoints"] |= {"keep_last": 10_000}
        data["agents"] = {"enabled": True}
        (self.root / "run.yaml").write_text(yaml.safe_dump({**data, "name": _NAME}))

    @contextlib.contextmanager
    def up(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start ``rollmesh up``; kill its remaining processes at the end, also when this process gets a SIGTERM."""
        command = [sys.executable, "-m", "rollmesh.cli.main", "up", str(self.root / "run.yaml"), *options]
        with (self.root / "output.txt").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            yield process
        finally:
            signal.signal(signal.SIGTERM, before)
            if process.poll() is None:
                process.kill()
                process.wait()
                EmbeddedServer(self.folder.redis).kill()

    def audit(self) -> bool:
        """Audit the run while its mesh is up, so that the queue's data is complete; return True if it is green."""
        command = [sys.executable, "-m", "rollmesh.cli.main", "audit", str(self.folder.path)]
        with (self.root / "output.txt").open("ab") as log:
            return subprocess.run(command, stdout=log, stderr=log, timeout=_AUDIT_SECONDS, check=False).returncode == 0

    def output(self) -> str:
        """Return the last lines that the launcher printed."""
        return (self.root / "output.txt").read_text()[-2_000:]

    async def until(self, condition: Callable[[], bool], goal: str, process: subprocess.Popen[bytes]) -> None:
        """Wait for a condition. Raises FuzzError if the run ends first or takes too long."""
        deadline = time.monotonic() + _PROGRESS_SECONDS
        while not condition():
            if process.poll() is not None or time.monotonic() > deadline:
                raise FuzzError(f"the run did not reach {goal} (status {process.poll()}): {self.output()}")
            await asyncio.sleep(0.2)

    async def states(self) -> dict[str, ServiceState]:
        """Return the state of every service process, with the smallest memory of three samples."""
        samples = []
        for _ in range(3):
            await asyncio.sleep(1.0)
            samples.append({f"{e.service}-{e.index}": self._state(e) for e in read_endpoints(self.folder.path)})
        return {name: min((s[name] for s in samples if name in s), key=lambda s: s.rss) for name in samples[-1]}

    def _state(self, endpoint: Endpoint) -> ServiceState:
        rss = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(endpoint.pid)
            for member in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    rss += member.memory_info().rss
        log = self.folder.log_file(endpoint.service, endpoint.index).read_text(errors="replace")
        lines = log.splitlines()
        tracebacks = tuple(line for line in lines if "Traceback (most recent" in line)
        return ServiceState(pid=endpoint.pid, rss=rss, lines=len(lines), tracebacks=tracebacks)

    async def ports(self, stack: AsyncExitStack, launcher: int) -> list[GrpcPort | RawPort]:
        """Return every TCP port on which a process of the run listens."""
        mesh_token = (self.folder.path / TOKEN_FILE).read_text().strip()
        gateway_token = (self.folder.path / GATEWAY_TOKEN_FILE).read_text().strip()
        ports: list[GrpcPort | RawPort] = []
        for endpoint in read_endpoints(self.folder.path):
            ports.append(_admin_port(endpoint, mesh_token))
            if endpoint.grpc:
                ports.append(await _grpc_port(endpoint, mesh_token, stack))
                host, _, number = endpoint.grpc.rpartition(":")
                name = f"{endpoint.service}-{endpoint.index} gRPC, raw"
                ports.append(RawPort(name=name, host=host, port=int(number)))
            if endpoint.url:
                ports.append(await _public_port(endpoint, gateway_token))
        named = {port.port for port in ports if isinstance(port, RawPort)}
        others = sorted(_listening(launcher) - named)
        return [*ports, *(RawPort(name=f"port {number}", host="127.0.0.1", port=number) for number in others)]


def _admin_port(endpoint: Endpoint, token: str) -> HttpPort:
    host, _, number = endpoint.admin.rpartition(":")
    name = f"{endpoint.service}-{endpoint.index} admin"
    return HttpPort(name=name, host=host, port=int(number), token=token, document=_ADMIN_DOCUMENT, known={})


async def _grpc_port(endpoint: Endpoint, token: str, stack: AsyncExitStack) -> GrpcPort:
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(endpoint.grpc, options=_MAX_MESSAGE))
    known = dict(_KNOWN_FIELDS)
    if endpoint.service == "generator":
        stub = generation_stubs.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.GetStatus(generation.GetStatusRequest(), metadata=call_metadata(token=token))
        known["instance_id"] = (answer.instance_id,)
    file = (generation if endpoint.service == "generator" else reward).DESCRIPTOR
    services = (*list(file.services_by_name.values()) * 3, health_pb2.DESCRIPTOR.services_by_name["Health"])
    name = f"{endpoint.service}-{endpoint.index} gRPC"
    return GrpcPort(name=name, channel=channel, services=services, token=token, known=known)


async def _public_port(endpoint: Endpoint, token: str) -> HttpPort:
    url = httpx.URL(endpoint.url)
    prefix = "/api/v1" if endpoint.service == "gateway" else url.path
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        document = (await client.get(url.join(f"{prefix}/openapi.json"))).json()
    name = f"{endpoint.service}-{endpoint.index}"
    return HttpPort(name=name, host=url.host, port=url.port or 80, token=token, document=document, known=_KNOWN_JSON)


def _listening(launcher: int) -> set[int]:
    """Return the TCP ports on which the launcher and its descendants listen."""
    ports = set()
    root = psutil.Process(launcher)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            ports |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return ports
