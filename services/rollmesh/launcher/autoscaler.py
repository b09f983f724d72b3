"""Scaling a run on this machine by Prometheus: the chart's autoscaling rules without Kubernetes.

look     every 15 seconds: the rule's queries to Prometheus, wanted replicas from the store, working ones from the run
decide   ``scheduling.autoscaling``: what a HorizontalPodAutoscaler would want
ask      ``request_scale``; the launcher of the run carries it out. A person's own ``rollmesh scale`` is overruled at
         the next look, except for zero generators, where autoscaling rests
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from rollmesh.config import RunConfig
from rollmesh.config.autoscaling_rule import AutoscalingRule
from rollmesh.config.replica_bounds import configured_replicas
from rollmesh.errors import ConfigError, StoreUnavailable
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.lifecycle import wait_or_shutdown
from rollmesh.scheduling.autoscaling import ReplicaMemory, ReplicaMetrics, next_replicas
from rollmesh.store import TrajectoryStore

_LOOK_SECONDS = 15.0
_FASTEST_LOOK_SECONDS = 0.5
_QUERY_SECONDS = 10.0


class Prometheus:
    """Instant queries with one number as their answer."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--prometheus {url}: expected http:// or https://")
        self._url = url.rstrip("/") + "/api/v1/query"
        self._client = client
        self.trouble = ""
        """Why a query had no answer at all; the reader empties it before it asks."""

    async def value(self, query: str) -> float | None:
        """The answer; None for no data, for no number, or while Prometheus is away. ConfigError for a bad query."""
        try:
            response = await self._client.post(self._url, data={"query": query}, timeout=_QUERY_SECONDS)
        except httpx.HTTPError as error:
            self.trouble = f"{self._url}: {type(error).__name__}: {error}"
            return None
        if response.status_code == httpx.codes.BAD_REQUEST:
            raise ConfigError(f"Prometheus refuses a query: {response.text.strip()}: {query}")
        if not response.is_success:
            # Among them 422, a query that cannot be carried out now: two series of one process while it is replaced.
            self.trouble = f"{self._url}: {response.status_code}: {response.text[:200].strip()}"
            return None
        try:
            return single_number(response.json())
        except ValueError:
            self.trouble = f"{self._url} is no Prometheus: it answers {response.text[:60]!r}"
            return None


def single_number(answer: Any) -> float | None:
    """The number in an answer of /api/v1/query; None when there is none, several, or not a finite one."""
    try:
        data = answer["data"]
        points = [data["result"]] if data["resultType"] == "scalar" else [row["value"] for row in data["result"]]
        if len(points) != 1:
            return None
        number = float(points[0][1])
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


class Autoscaler:
    """Applies rules to one run until it is told to stop."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        store: TrajectoryStore,
        prometheus: Prometheus,
        rules: Sequence[AutoscalingRule],
        note: Callable[[str], None],
        *,
        selector: str,
        speed_up: float = 1.0,
    ) -> None:
        self._configured = configured_replicas(config)
        self._folder = folder
        self._store = store
        self._prometheus = prometheus
        self._rules = {rule.service: rule for rule in rules}
        self._note = note
        self._selector = selector
        self._speed_up = speed_up
        self._memory = {service: ReplicaMemory() for service in self._rules}
        self._said: dict[str, str] = {}

    async def run(self, shutdown: asyncio.Event) -> None:
        """Look, decide and ask until ``shutdown``; an outage of Redis or Prometheus is waited out."""
        pause = max(_FASTEST_LOOK_SECONDS, _LOOK_SECONDS / self._speed_up)
        while not shutdown.is_set():
            try:
                for rule in self._rules.values():
                    await self.look(rule)
            except StoreUnavailable as error:
                self._say("store", f"waiting for Redis: {error}")
            if await wait_or_shutdown(shutdown, pause):
                return

    async def look(self, rule: AutoscalingRule) -> None:
        """One look at one service."""
        service = rule.service
        values = await self._values(rule)
        self._say("prometheus", f"waiting for Prometheus: {trouble}" if (trouble := self._prometheus.trouble) else "")
        wanted = (await self._store.scale_requests()).get(service, self._configured[service])
        look = ReplicaMetrics(now=time.monotonic(), wanted=wanted, ready=await self._ready(service), values=values)
        verdict = next_replicas(rule, self._memory[service], look, self._speed_up)
        self._memory[service] = verdict.memory
        self._say(service, f"{service} {wanted} -> {verdict.why}")
        if verdict.replicas != wanted:
            heard = await self._store.request_scale(service, verdict.replicas)
            self._note(f"{service}: asked for {verdict.replicas} replicas, was {wanted}")
            if not heard:
                self._note("no launcher runs this run now: nobody carries that out yet")

    async def _values(self, rule: AutoscalingRule) -> Mapping[str, float | None]:
        queries = {signal.name: rule.query(signal, self._selector, self._speed_up) for signal in rule.signals}
        self._prometheus.trouble = ""
        answers = await asyncio.gather(*(self._prometheus.value(query) for query in queries.values()))
        return dict(zip(queries, answers, strict=True))

    async def _ready(self, service: str) -> int:
        if service == "generator":
            return sum(record.serving for record in await self._store.generators())
        return Counter(endpoint.service for endpoint in read_endpoints(self._folder.path))[service]

    def _say(self, what: str, text: str) -> None:
        """Say what is new; nothing is what there is to say when all is well."""
        if text and self._said.get(what) != text:
            self._note(text)
        self._said[what] = text
