"""Addresses of the services of a local run: one small JSON file per process in the run folder.

The folder ``scrape/`` contains the same for Prometheus (file_sd): ``files: [<run folder>/scrape/*.json]``.
"""

from __future__ import annotations

import json
import os
import uuid
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
def published_endpoint(
    run_folder: Path,
    *,
    service: str,
    index: int,
    grpc: str,
    admin: str,
    run: str = "",
    url: str = "",
    pod: str = "",
    starting: bool = False,
) -> Iterator[Endpoint]:
    """Write the endpoint files and remove them at exit, unless a successor has replaced them.

    ``run`` is the run's name for the Prometheus labels, by default the name of its folder.
    """
    endpoint = Endpoint(
        service=service, index=index, pid=os.getpid(), grpc=grpc, admin=admin, url=url, pod=pod, starting=starting
    )
    name = f"{service}-{index}.json"
    file, target = run_folder / "services" / name, run_folder / "scrape" / name
    labels = {"run": run or run_folder.name, "service": service, "index": str(index)}
    _write(file, asdict(endpoint))
    _write(target, [{"targets": [admin], "labels": labels}])
    try:
        yield endpoint
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
