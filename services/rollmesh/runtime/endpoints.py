"""Where the services of a local run listen: one small JSON file per process in the run folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One running service process."""

    service: str
    index: int
    pid: int
    grpc: str
    """host:port, empty for services without a gRPC port."""
    admin: str
    """host:port of /metrics, /healthz and /readyz."""


@contextmanager
def published_endpoint(run_folder: Path, *, service: str, index: int, grpc: str, admin: str) -> Iterator[Endpoint]:
    """Write the endpoint file while the service runs; remove it after, unless a successor already replaced it."""
    endpoint = Endpoint(service=service, index=index, pid=os.getpid(), grpc=grpc, admin=admin)
    folder = run_folder / "services"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{service}-{index}.json"
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(asdict(endpoint)), encoding="utf-8")
    os.replace(temporary, file)
    try:
        yield endpoint
    finally:
        with suppress(OSError, ValueError):
            if json.loads(file.read_text(encoding="utf-8"))["pid"] == os.getpid():
                file.unlink()


def read_endpoints(run_folder: Path, service: str | None = None) -> list[Endpoint]:
    """Endpoints of living processes, ordered by service and index."""
    found: list[Endpoint] = []
    for file in sorted((run_folder / "services").glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            endpoint = Endpoint(**json.loads(file.read_text(encoding="utf-8")))
            if psutil.pid_exists(endpoint.pid) and service in (None, endpoint.service):
                found.append(endpoint)
    return found
