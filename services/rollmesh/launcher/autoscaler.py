"""Autoscaler of a run on this machine: the chart's rules, evaluated on Prometheus metrics without Kubernetes.

measure  every 15 seconds: the rule's queries to Prometheus, wanted replicas from the store, ready ones from the run
decide   ``scheduling.autoscaling``: the replicas that a HorizontalPodAutoscaler would request
request  ``request_scale``; the launcher of the run starts and stops replicas. The next round overrides an operator's
         ``rollmesh scale``, except zero generators, which suspends autoscaling
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

_ROUND_SECONDS = 15.0
_SHORTEST_ROUND_SECONDS = 0.5
_QUERY_SECONDS = 10.0


class Prometheus:
    """Client for Prometheus instant queries that return one number."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--prometheus {url}: expected http:// or https://")
        self._url = url.rstrip("/") + "/api/v1/query"
        self._client = client
        self.last_error = ""
        """Reason of the last query without a response; the caller clears it before a round of queries."""

    async def value(self, query: str) -> float | None:
        """Return the result; None without data, without a number, or while Prometheus is unreachable.

        Raises ConfigError for a query that Prometheus rejects as invalid.
        """
        try:
            response = await self._client.post(self._url, data={"query": query}, timeout=_QUERY_SECONDS)
        except httpx.HTTPError as error:
            self.last_error = f"{self._url}: {type(error).__name__}: {error}"
            return None
        if response.status_code == httpx.codes.BAD_REQUEST:
            raise ConfigError(f"Prometheus rejects a query: {response.text.strip()}: {query}")
        if not response.is_success:
            # Includes 422, a temporary failure of a query: two series of one process exist while it is replaced.
            self.last_error = f"{self._url}: {response.status_code}: {response.text[:200].strip()}"
            return None
        try:
            return single_number(response.json())
        except ValueError:
            self.last_error = f"{self._url} is not a Prometheus server: it returned {response.text[:60]!r}"
            return None


def single_number(answer: Any) -> float | None:
    """Return the number in a response of /api/v1/query; None for no value, several values, NaN or infinity."""
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
    """Periodic application of autoscaling rules to one run."""

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
        self._logged: dict[str, str] = {}

    async def run(self, shutdown: asyncio.Event) -> None:
        """Apply every rule periodically until ``shutdown``; retry while Redis or Prometheus is unreachable."""
        pause = max(_SHORTEST_ROUND_SECONDS, _ROUND_SECONDS / self._speed_up)
        while not shutdown.is_set():
            try:
                for rule in self._rules.values():
                    await self.apply(rule)
            except StoreUnavailable as error:
                self._log_change("store", f"waiting for Redis: {error}")
            if await wait_or_shutdown(shutdown, pause):
                return

    async def apply(self, rule: AutoscalingRule) -> None:
        """Measure one service once and request the replicas that its rule requires."""
        service = rule.service
        values = await self._values(rule)
        error = self._prometheus.last_error
        self._log_change("prometheus", f"waiting for Prometheus: {error}" if error else "")
        wanted = (await self._store.scaling.requests()).get(service, self._configured[service])
        metrics = ReplicaMetrics(now=time.monotonic(), wanted=wanted, ready=await self._ready(service), values=values)
        decision = next_replicas(rule, self._memory[service], metrics, self._speed_up)
        self._memory[service] = decision.memory
        self._log_change(service, f"{service} {wanted} -> {decision.reason}")
        if decision.replicas != wanted:
            has_launcher = await self._store.scaling.request(service, decision.replicas)
            self._note(f"{service}: asked for {decision.replicas} replicas, was {wanted}")
            if not has_launcher:
                self._note("no launcher runs this run now: the request takes effect when one starts")

    async def _values(self, rule: AutoscalingRule) -> Mapping[str, float | None]:
        queries = {signal.name: rule.query(signal, self._selector, self._speed_up) for signal in rule.signals}
        self._prometheus.last_error = ""
        answers = await asyncio.gather(*(self._prometheus.value(query) for query in queries.values()))
        return dict(zip(queries, answers, strict=True))

    async def _ready(self, service: str) -> int:
        if service == "generator":
            return sum(record.serving for record in await self._store.generators.live())
        return Counter(endpoint.service for endpoint in read_endpoints(self._folder.path))[service]

    def _log_change(self, topic: str, text: str) -> None:
        """Note ``text`` if it differs from the last one of this topic; empty text clears the topic."""
        if text and self._logged.get(topic) != text:
            self._note(text)
        self._logged[topic] = text
