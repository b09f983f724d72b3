"""For how long the certificate of a process is valid, as its ``/metrics`` tells."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rollmesh.runtime.tls import TlsFiles


class CertificateCollector(Collector):
    """Reads the certificate in use at every scrape.

    A rotation thus shows by itself, and files that the process does not take leave the old times. Without TLS the
    names are announced and have no series: 0 would be a certificate that has expired.
    """

    def __init__(self, component: str, tls: TlsFiles | None) -> None:
        self._prefix = f"rollmesh_{component}_certificate"
        self._tls = tls

    def collect(self) -> Iterator[Metric]:
        """Yield the families of one scrape."""
        material = None if self._tls is None else self._tls.material
        yield GaugeMetricFamily(
            f"{self._prefix}_start_timestamp_seconds",
            "Since when the certificate in use is valid; no series without TLS.",
            value=None if material is None else material.valid_from,
        )
        yield GaugeMetricFamily(
            f"{self._prefix}_expiry_timestamp_seconds",
            "Until when the certificate in use is valid; no series without TLS.",
            value=None if material is None else material.valid_until,
        )
