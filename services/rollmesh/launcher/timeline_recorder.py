"""Recorder of ``timeline.jsonl``: one sample of the whole mesh about every second."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rollmesh.file_writes import writing
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.mesh import MeshView
from rollmesh.runtime.endpoints import AdminClient, Endpoint, read_endpoints
from rollmesh.store import TrajectoryStore
from rollmesh.types import GeneratorRecord

GENERATED_TOKENS = "rollmesh_generator_generated_tokens_total"
_WORK = {
    name: f"rollmesh_generator_{name}_total"
    for name in ("decode_steps", "generated_tokens", "prefill_tokens", "busy_seconds")
} | {"cpu_seconds": "process_cpu_seconds_total"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorLoad:
    """Load of one generator process, read from its ``/metrics``."""

    instance_id: str
    """``index:pid``."""
    policy_version: int
    running: int
    waiting: int
    slots: int
    serving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSample:
    """One sample of the mesh."""

    t: float
    """Unix seconds."""
    view: MeshView
    generators: tuple[GeneratorRecord, ...]
    """Registry entries, as of each generator's last heartbeat."""
    loads: tuple[GeneratorLoad, ...]
    """Current loads of the generators on this machine."""
    generated_token_total: float
    """Tokens sampled since the start of the launcher, over all generators and their restarts.

    The tokens between the last sample and a crash of a generator are not counted.
    """
    generated_tokens: Mapping[str, float]
    """Newest counter by generator process (``index:pid``), including ended processes."""
    saved_token_total: int
    """Tokens saved in the queue over the whole run."""
    dropped: Mapping[str, int]
    """Groups dropped so far, by reason."""
    work: Mapping[str, float]
    """Counters of the generators that answered, added up, by name: for ``rollmesh sim --calibrate``."""
    pinned_version: int | None = None
    """Policy version that an operator has pinned; None without a pin."""

    def to_json(self) -> str:
        """Return the sample as one line of ``timeline.jsonl``."""
        record = asdict(self)
        for omitted in ("listed", "ready", "stalest_open", "desired", "failure"):
            record["view"].pop(omitted)
        record["generators"] = record.pop("loads")
        return json.dumps(record, separators=(",", ":"))


class TimelineRecorder:
    """Recorder that samples the store and the generators' ``/metrics`` into the timeline."""

    def __init__(self, store: TrajectoryStore, folder: RunFolder, client: AdminClient) -> None:
        self._store = store
        self._folder = folder
        self._client = client
        self._generated_total = 0.0
        self._generated: dict[str, float] = {}

    async def sample(self) -> MeshSample:
        """Take one sample and append it to the timeline."""
        loads, work = await self._scrape_generators()
        counts = await self._store.mesh.counts()
        pin = await self._store.policies.held_pin()
        sample = MeshSample(
            t=time.time(),
            view=await self._store.mesh.view(groups=False),
            generators=tuple(await self._store.generators.live()),
            loads=tuple(loads),
            generated_token_total=self._generated_total,
            generated_tokens=dict(self._generated),
            saved_token_total=counts.totals.get("saved_tokens_total", 0),
            dropped=dict(counts.drops),
            work=work,
            pinned_version=None if pin is None or pin.owner else pin.policy_version,
        )
        with writing(self._folder.timeline), self._folder.timeline.open("a", encoding="utf-8") as timeline:
            timeline.write(sample.to_json() + "\n")
        return sample

    async def _scrape_generators(self) -> tuple[list[GeneratorLoad], Mapping[str, float]]:
        loads: list[GeneratorLoad] = []
        work: Counter[str] = Counter()
        for endpoint in read_endpoints(self._folder.path, "generator"):
            try:
                answer = (await self._client.get(endpoint.admin, "/metrics")).raise_for_status()
            except httpx.HTTPError:
                continue  # a generator that restarts: the next sample reads its counter
            process = process_key(endpoint)
            values = metric_sums(answer.text)
            now, before = values.get(GENERATED_TOKENS, 0.0), self._generated.get(process, 0.0)
            self._generated_total += now - before if now >= before else now  # a restart begins at zero
            self._generated[process] = now
            work.update({name: values[metric] for name, metric in _WORK.items() if metric in values})
            loads.append(_load(process, values))
        return loads, dict(work)


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
    """Return the timeline's key of one process; it changes with a restart."""
    return f"{endpoint.index}:{endpoint.pid}"


def metric_sums(exposition: str) -> dict[str, float]:
    """Sum the samples of a Prometheus exposition over all labels, by name."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums
