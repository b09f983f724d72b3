"""Run under test of the fuzz bench: the states of its services, and its ports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio
import httpx
import numpy as np
import psutil
from grpc_health.v1 import health_pb2

from rollmesh.checkpoints.api_token import TOKEN_FILE as GATEWAY_TOKEN_FILE
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.service_specs import TOKEN_FILE
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.grpc import call_metadata
from rollmesh.v1 import generation_service_pb2 as generation
from rollmesh.v1 import generation_service_pb2_grpc as generation_stubs
from rollmesh.v1 import reward_service_pb2 as reward

from ..chaos.short_run import short_run_config
from .fuzz_grpc import GrpcPort
from .fuzz_http import HttpPort, RawPort

T = TypeVar("T")

_NAME = "fuzz"
_ENDLESS = 1_000_000
_QUICK_PACE = [[1, 0.05]]
"""Seconds of a decode step, at least."""
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


def fuzzed_config(folder: RunFolder, *, quick: bool = False) -> dict[str, Any]:
    """Return the run file: a short run with the demo's batches, with the agents service and without an end.

    A ``quick`` one has small batches and paced generators: requests get the processor, and few steps are audited.
    """
    data = short_run_config(folder.path, 0)
    if quick:
        data["generator"] |= {"pace": _QUICK_PACE}
    else:
        data["schedule"] |= {"groups_per_batch": 16, "group_size": 8, "pool_size": 192}
    data["trainer"] |= {"train_steps": _ENDLESS}
    data["checkpoints"] |= {"keep_last": 10_000}
    return {**data, "agents": {"enabled": True}, "name": _NAME}


async def service_states(folder: RunFolder) -> dict[str, ServiceState]:
    """Return the state of every service process, with the smallest memory of three samples."""
    samples = []
    for _ in range(3):
        await asyncio.sleep(1.0)
        samples.append({f"{e.service}-{e.index}": _state(folder, e) for e in read_endpoints(folder.path)})
    return {name: min((s[name] for s in samples if name in s), key=lambda s: s.rss) for name in samples[-1]}


def _state(folder: RunFolder, endpoint: Endpoint) -> ServiceState:
    rss = sum(_in_tree(endpoint.pid, lambda process: int(process.memory_info().rss)))
    lines = folder.log_file(endpoint.service, endpoint.index).read_text(errors="replace").splitlines()
    tracebacks = tuple(line for line in lines if "Traceback (most recent" in line)
    return ServiceState(pid=endpoint.pid, rss=rss, lines=len(lines), tracebacks=tracebacks)


async def open_ports(folder: RunFolder, stack: AsyncExitStack, launcher: int) -> list[GrpcPort | RawPort]:
    """Return every TCP port on which a process of the run listens."""
    mesh_token = (folder.path / TOKEN_FILE).read_text().strip()
    gateway_token = (folder.path / GATEWAY_TOKEN_FILE).read_text().strip()
    ports: list[GrpcPort | RawPort] = []
    for endpoint in read_endpoints(folder.path):
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
    return HttpPort(name=name, host=host, port=int(number), token=token, document=_ADMIN_DOCUMENT, known={}, weight=1.0)


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
    port = url.port or 80
    return HttpPort(name=name, host=url.host, port=port, token=token, document=document, known=_KNOWN_JSON, weight=8.0)


def _listening(launcher: int) -> set[int]:
    """Return the TCP ports on which the launcher and its descendants listen."""
    connections = _in_tree(launcher, lambda process: process.net_connections("tcp"))
    return {c.laddr.port for found in connections for c in found if c.status == psutil.CONN_LISTEN}


def _in_tree(pid: int, read: Callable[[psutil.Process], T]) -> list[T]:
    """Return a fact about a process and each of its descendants; skip processes that have ended."""
    found: list[T] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(read(process))
    return found
