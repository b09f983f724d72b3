"""Liveness check of the service of this container, for HEALTHCHECK: ``python -m rollmesh.runtime.healthcheck``.

It imports only the standard library, because it starts every few seconds and shares the cores with the service.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys

_SECONDS = 5.0


def check(port: int, host: str = "127.0.0.1") -> str:
    """Return the problem of the service with this admin port; empty when the service is live."""
    reasons = []
    for tls in (False, True):
        try:
            status, text = _get_health(host, port, tls)
        except (OSError, http.client.HTTPException) as error:
            # A TLS port does not answer plain HTTP, and vice versa.
            reasons.append(f"{'https' if tls else 'http'}: {error}")
            continue
        return "" if status == http.client.OK else text
    return "; ".join(reasons)


def _get_health(host: str, port: int, tls: bool) -> tuple[int, str]:
    if tls:
        # The request stays on the loopback of this container, while the certificate names the pod.
        context = ssl._create_unverified_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, port, timeout=_SECONDS, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def main() -> None:
    """Exit with status 1 and the reason when the service is not live."""
    port = os.environ.get("ROLLMESH_NETWORK__ADMIN_PORT", "0")
    if port == "0":
        sys.exit("ROLLMESH_NETWORK__ADMIN_PORT is not set: set it to the admin port of this container's service")
    problem = check(int(port))
    if problem:
        sys.exit(problem)


if __name__ == "__main__":
    main()
