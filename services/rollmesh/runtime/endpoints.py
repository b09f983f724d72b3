"""Addresses of the services of a run, one small JSON file per process in its folder, and questions to their ports.

The folder ``scrape/`` contains the same for Prometheus (file_sd): ``files: [<run folder>/scrape/*.json]``.
"""

import asyncio
import json
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import httpx
import psutil

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.addresses import host_port
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.port_security import OPEN, PortSecurity


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One running service process."""

    service: str
    index: int
    pid: int = field(default_factory=os.getpid)
    grpc: str = ""
    """Address host:port; empty for services without a gRPC port."""
    admin: str
    """Address host:port of /metrics, /healthz and /readyz."""
    url: str = ""
    """URL of the page and the REST API, or of the OpenAI-compatible API; empty for services without one."""
    pod: str = ""
    """Name of the pod in Kubernetes: ``network.instance``."""
    starting: bool = False
    """True while only the admin port answers."""


@contextmanager
def published_endpoint(run_folder: Path, endpoint: Endpoint, run: str = "") -> Iterator[None]:
    """Write the endpoint files and remove them at exit, unless a successor has replaced them.

    ``run`` is the run's name for the Prometheus labels, by default the name of its folder.
    """
    name = f"{endpoint.service}-{endpoint.index}.json"
    file, target = run_folder / "services" / name, run_folder / "scrape" / name
    service, _, teacher = endpoint.service.partition("-")
    index = f"{teacher}-{endpoint.index}" if teacher else str(endpoint.index)
    labels = {"run": run or run_folder.name, "service": service, "index": index}
    _write(file, asdict(endpoint))
    _write(target, [{"targets": [endpoint.admin], "labels": labels}])
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            if json.loads(file.read_text(encoding="utf-8"))["pid"] == os.getpid():
                target.unlink(missing_ok=True)
                file.unlink()


def _write(file: Path, content: object) -> None:
    """Replace a JSON file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # The process id is not unique: in pods that share a run folder every process has id 1.
    temporary = file.with_suffix(f".{os.getpid()}-{uuid.uuid4().hex}.tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    os.replace(temporary, file)


def read_endpoints(run_folder: Path, service: str | None = None, *, starting: bool = False) -> list[Endpoint]:
    """Return the endpoints of running processes, ordered by service and index; with ``starting`` also of those."""
    found: list[Endpoint] = []
    for file in sorted((run_folder / "services").glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            endpoint = Endpoint(**json.loads(file.read_text(encoding="utf-8")))
            if not starting and endpoint.starting:
                continue
            if psutil.pid_exists(endpoint.pid) and service in (None, endpoint.service):
                found.append(endpoint)
    return found


Addresses = Callable[[], Sequence[str]]
"""Function that returns the host:port of every running service; may block."""


def service_addresses(config: RunConfig, section: str, address: str | None, service: str) -> Addresses:
    """Return the function that finds the services of a ``section`` of the run file, by address or in the run folder.

    Raises ConfigError if the run file gives neither an address nor a shared folder.
    """
    if address is not None:
        return ResolvedName(address)
    if not config.network.shared_folder:
        variable = f"ROLLMESH_{section.upper().replace('.', '__')}__ADDRESS"
        raise ConfigError(
            f"{section}.address is missing: without a shared run folder (network.shared_folder=false), set it to the "
            f"host:port of a headless service, for example by {variable}"
        )
    folder = Path(config.folder)
    return lambda: [endpoint.grpc for endpoint in read_endpoints(folder, service)]


class ResolvedName:
    """All addresses behind one ``host:port``; the last known ones while the name cannot be resolved."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._known: list[str] = []
        self._failing = False

    def __call__(self) -> Sequence[str]:
        """Resolve the name; blocks until the system's resolver returns."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            if not self._failing:
                get_logger("scoring-client").warning("service_name_unknown", name=self._host, message=str(error))
            self._failing = True
            return self._known
        self._failing = False
        self._known = sorted({host_port(str(entry[4][0]), self._port) for entry in found})
        return self._known


_KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000))
    if hasattr(socket, name)
]
"""A connection whose other machine is gone ends after half a minute, also one with a request that nobody confirms."""


class AdminClient:
    """HTTP client of the services' admin ports (``/metrics``, ``/readyz``, ...) with this process's identity.

    ``send`` is for the other HTTP ports of the mesh.
    """

    def __init__(self, security: PortSecurity = OPEN, timeout_seconds: float = 2.0) -> None:
        self._security = security
        self._timeout_seconds = timeout_seconds
        self._state: object = None
        self._client: httpx.AsyncClient | None = None
        self._retired: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in (*self._retired, *([] if self._client is None else [self._client])):
            await client.aclose()

    async def get(self, address: str, path: str) -> httpx.Response:
        """Send GET ``path`` to the admin port at host:port. Raises httpx.HTTPError."""
        token = self._security.sent_token
        headers = [] if token is None else [(b"Authorization", b"Bearer " + token.encode())]
        answer = await self.send("GET", address, path, headers)
        try:
            await answer.aread()
        finally:
            await answer.aclose()
        return answer

    async def send(
        self,
        method: str,
        address: str,
        path: str,
        headers: Sequence[tuple[bytes, bytes]] = (),
        content: bytes = b"",
        timeout: httpx.Timeout | None = None,
    ) -> httpx.Response:
        """Send a request to a port; the caller reads the answer and closes it. Raises httpx.HTTPError."""
        client, tls = await self._current(), self._security.tls
        request = client.build_request(
            method,
            f"{self._security.scheme}://{address}{path}",
            headers=headers,
            content=content,
            timeout=timeout or client.timeout,
            extensions={} if tls is None else {"sni_hostname": tls.server_name},
        )
        return await client.send(request, stream=True)

    async def _current(self) -> httpx.AsyncClient:
        """Return the connection pool; creates a new one after a rotation of the certificates."""
        tls, state = self._security.tls, self._security.channel_state()
        if self._client is not None and state is self._state:
            return self._client
        # The previous pool may have requests in progress; those of older pools have timed out.
        done, self._retired = self._retired, [] if self._client is None else [self._client]
        verify = tls.client_context() if tls is not None else False
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        transport = httpx.AsyncHTTPTransport(verify=verify, limits=limits, socket_options=_KEEP_ALIVE, trust_env=False)
        new = self._client = httpx.AsyncClient(transport=transport, timeout=self._timeout_seconds, trust_env=False)
        self._state = state
        for client in done:
            await client.aclose()
        return new


class ServiceStates:
    """Ready services of a run folder, and the waits of all of them, as their ``/readyz`` tells."""

    def __init__(self, folder: Path, client: AdminClient) -> None:
        self._folder = folder
        self._client = client
        self.ready: Sequence[str] = ()
        """Ready services, ``service-index``."""
        self.waits: Mapping[str, str] = {}
        """What each service waits for, by ``service-index``."""

    async def read(self) -> None:
        """Ask every service once."""
        endpoints = await asyncio.to_thread(read_endpoints, self._folder, starting=True)
        answers = await asyncio.gather(*(self._answer(endpoint) for endpoint in endpoints))
        states = {f"{each.service}-{each.index}": answer for each, answer in zip(endpoints, answers, strict=True)}
        self.ready = [name for name, (ready, _) in states.items() if ready]
        self.waits = {name: wait for name, (_, wait) in states.items() if wait}

    async def _answer(self, endpoint: Endpoint) -> tuple[bool, str]:
        try:
            answer = await self._client.get(endpoint.admin, "/readyz")
            return answer.is_success, str(answer.json()["waits"])
        except httpx.ConnectError as error:
            # The error of the operating system is below that of the client, which has a text of its own.
            cause: BaseException | None = error
            while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
                inner = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else None
                cause = inner or cause.__cause__ or cause.__context__
            reason = cause.strerror if isinstance(cause, OSError) else error
            return False, f"its admin port cannot be reached from here: {reason}"
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False, ""  # a service that ends, or is too busy to answer
