"""About once a second, one look at the whole mesh, appended to ``timeline.jsonl``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rollmesh.launcher.run_folder import RunFolder
from rollmesh.mesh import MeshView
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.port_security import AdminClient
from rollmesh.store import TrajectoryStore
from rollmesh.types import GeneratorRecord

GENERATED_TOKENS = "rollmesh_generator_generated_tokens_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorLoad:
    """One generator process as its ``/metrics`` show it."""

    instance_id: str
    """``index:pid``."""
    policy_version: int
    running: int
    waiting: int
    slots: int
    serving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSample:
    """One look at the mesh."""

    t: float
    """Unix seconds."""
    view: MeshView
    generators: tuple[GeneratorRecord, ...]
    """The registry: as of each generator's last heartbeat."""
    loads: tuple[GeneratorLoad, ...]
    """The generators on this machine, as of now."""
    generated_token_total: float
    """Tokens sampled since the launcher came up, over all generators and their restarts.

    A generator that dies takes its last tokens, at most one interval's, with it uncounted.
    """
    generated_tokens: Mapping[str, float]
    """Newest counter by generator process (``index:pid``), those that have ended included."""
    saved_token_total: int
    """Tokens saved in the queue over the whole run."""
    dropped: Mapping[str, int]
    """Groups dropped so far, by reason."""

    def to_json(self) -> str:
        """One line of ``timeline.jsonl``."""
        view = asdict(self.view)
        for left_out in ("listed", "ready", "stalest_open", "desired", "failure"):
            view.pop(left_out)
        generators = [asdict(load) for load in self.loads]
        record: dict[str, Any] = {
            "t": self.t,
            "view": view,
            "generators": generators,
            "generated_token_total": self.generated_token_total,
            "generated_tokens": dict(self.generated_tokens),
            "saved_token_total": self.saved_token_total,
            "dropped": dict(self.dropped),
        }
        return json.dumps(record, separators=(",", ":"))


@dataclass(slots=True)
class _CounterSum:
    """Sum of a counter over processes that come, go and start again at zero."""

    seen: dict[str, float] = field(default_factory=dict)
    total: float = 0.0

    def update(self, process: str, value: float) -> None:
        before = self.seen.get(process, 0.0)
        self.total += value - before if value >= before else value
        self.seen[process] = value


class TimelineRecorder:
    """Reads the store and the generators' ``/metrics``; appends to the timeline."""

    def __init__(self, store: TrajectoryStore, folder: RunFolder, client: AdminClient) -> None:
        self._store = store
        self._folder = folder
        self._client = client
        self._generated = _CounterSum()

    async def sample(self) -> MeshSample:
        """Look once and append the line."""
        loads = await self._scrape_generators()
        counts = await self._store.counts()
        sample = MeshSample(
            t=time.time(),
            view=await self._store.view(groups=False),
            generators=tuple(await self._store.generators()),
            loads=tuple(loads),
            generated_token_total=self._generated.total,
            generated_tokens=dict(self._generated.seen),
            saved_token_total=counts.totals.get("saved_tokens_total", 0),
            dropped=dict(counts.drops),
        )
        append_line(self._folder.timeline, sample.to_json())
        return sample

    async def _scrape_generators(self) -> list[GeneratorLoad]:
        loads: list[GeneratorLoad] = []
        for endpoint in read_endpoints(self._folder.path, "generator"):
            try:
                answer = (await self._client.get(endpoint.admin, "/metrics")).raise_for_status()
            except httpx.HTTPError:
                continue  # a generator that is restarting: its counter is read again on the next look
            process = process_key(endpoint)
            values = metric_sums(answer.text)
            self._generated.update(process, values.get(GENERATED_TOKENS, 0.0))
            loads.append(_load(process, values))
        return loads


def _load(process: str, values: Mapping[str, float]) -> GeneratorLoad:
    def gauge(name: str) -> int:
        return int(values.get(f"rollmesh_generator_{name}", 0.0))

    return GeneratorLoad(
        instance_id=process,
        policy_version=gauge("policy_version"),
        running=gauge("running_calls"),
        waiting=gauge("waiting_calls"),
        slots=gauge("slots"),
        serving=bool(gauge("serving")),
    )


def process_key(endpoint: Endpoint) -> str:
    """Name of one process in the timeline: a restart has another one."""
    return f"{endpoint.index}:{endpoint.pid}"


def metric_sums(exposition: str) -> dict[str, float]:
    """Sum over the labels of every sample in Prometheus text, by name."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def append_line(file: Path, line: str) -> None:
    """Append one line to a JSON-lines file."""
    with file.open("a", encoding="utf-8") as handle:
        handle.write(line + "\n")
