"""Metrics of the validity of a process's certificate."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rollmesh.runtime.tls import TlsFiles


class CertificateCollector(Collector):
    """Collector that reads the certificate in use at every scrape.

    A rotation is therefore visible without an update, and invalid files leave the old times. Without TLS the metrics
    have no series, because 0 would mean an expired certificate.
    """

    def __init__(self, component: str, tls: TlsFiles | None) -> None:
        self._prefix = f"rollmesh_{component}_certificate"
        self._tls = tls

    def collect(self) -> Iterator[Metric]:
        """Yield the families of one scrape."""
        material = None if self._tls is None else self._tls.material
        yield GaugeMetricFamily(
            f"{self._prefix}_start_timestamp_seconds",
            "Start of the validity of the certificate in use; no series without TLS.",
            value=None if material is None else material.valid_from,
        )
        yield GaugeMetricFamily(
            f"{self._prefix}_expiry_timestamp_seconds",
            "End of the validity of the certificate in use; no series without TLS.",
            value=None if material is None else material.valid_until,
        )
