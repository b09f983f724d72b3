"""Prometheus metrics of one process, in a separate registry.

Names are ``rollmesh_<component>_<thing>_<unit>``; counters end in ``_total``; a policy version is a value, never a
label. Labels are given with their values where these are known: their series are created at startup, so that a counter
is 0 before its first event.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

import rollmesh

Labels = Sequence[str] | Mapping[str, Iterable[str]]
"""Label names, or the values of each label; with values, every combination becomes a series at once."""

M = TypeVar("M", Counter, Gauge, Histogram)

_NAME = re.compile(r"^rollmesh_[a-z][a-z0-9]*(_[a-z0-9]+)+$")

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bucket limits in seconds, from a Redis script to a weight load."""

STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Bucket limits in train steps."""

LENGTH_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Bucket limits in tokens."""


class Metrics:
    """Registry of one service process; creating a metric twice is an error, as in prometheus_client."""

    def __init__(self, component: str) -> None:
        self.component = component
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        build = self.gauge(f"rollmesh_{component}_build_info", "Version of rollmesh; always 1.", ("version",))
        build.labels(version=rollmesh.__version__).set(1)

    def counter(self, name: str, documentation: str, labels: Labels = ()) -> Counter:
        """Create a counter; raises ValueError unless the name ends in ``_total``."""
        if not name.endswith("_total"):
            raise ValueError(f"counter {name}: the name must end in _total")
        return _with_series(Counter(self._checked(name), documentation, tuple(labels), registry=self.registry), labels)

    def gauge(self, name: str, documentation: str, labels: Labels = ()) -> Gauge:
        """Create a gauge."""
        return _with_series(Gauge(self._checked(name), documentation, tuple(labels), registry=self.registry), labels)

    def histogram(
        self, name: str, documentation: str, buckets: Sequence[float] = LATENCY_BUCKETS, labels: Labels = ()
    ) -> Histogram:
        """Create a histogram."""
        histogram = Histogram(
            self._checked(name), documentation, tuple(labels), registry=self.registry, buckets=buckets
        )
        return _with_series(histogram, labels)

    def exposition(self) -> bytes:
        """Return the body of ``/metrics``."""
        return generate_latest(self.registry)

    def _checked(self, name: str) -> str:
        if not _NAME.match(name):
            raise ValueError(f"metric {name}: expected rollmesh_<component>_<thing>_<unit> in lower case")
        return name


def _with_series(metric: M, labels: Labels) -> M:
    if isinstance(labels, Mapping):
        for values in product(*labels.values()):
            metric.labels(*values)
    return metric
