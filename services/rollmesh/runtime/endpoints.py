"""Where the services of a local run listen: one small JSON file per process in the run folder.

Beside it, ``scrape/`` holds the same for Prometheus (file_sd): ``files: [<run folder>/scrape/*.json]`` scrapes the run.
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
    """host:port, empty for services without a gRPC port."""
    admin: str
    """host:port of /metrics, /healthz and /readyz."""
    url: str = ""
    """URL of the page and the REST API; empty for services without one."""


@contextmanager
def published_endpoint(
    run_folder: Path, *, service: str, index: int, grpc: str, admin: str, run: str = "", url: str = ""
) -> Iterator[Endpoint]:
    """Write the endpoint files while the service runs; remove them after, unless a successor already replaced them.

    ``run`` is the run's name, for the labels of Prometheus; the name of its folder by default.
    """
    endpoint = Endpoint(service=service, index=index, pid=os.getpid(), grpc=grpc, admin=admin, url=url)
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
    """Write a JSON file so that readers see all of it or its predecessor."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # Not named by the process alone: in pods that share a run folder all of them are process 1.
    temporary = file.with_suffix(f".{os.getpid()}-{uuid.uuid4().hex}.tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    os.replace(temporary, file)


def read_endpoints(run_folder: Path, service: str | None = None) -> list[Endpoint]:
    """Endpoints of living processes, ordered by service and index."""
    found: list[Endpoint] = []
    for file in sorted((run_folder / "services").glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            endpoint = Endpoint(**json.loads(file.read_text(encoding="utf-8")))
            if psutil.pid_exists(endpoint.pid) and service in (None, endpoint.service):
                found.append(endpoint)
    return found
