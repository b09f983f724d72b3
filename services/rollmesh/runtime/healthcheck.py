"""Liveness check of the service of this container, for HEALTHCHECK: ``python -m rollmesh.runtime.healthcheck``.

It imports only the standard library, because it starts every few seconds and shares the cores with the service.
"""

import http.client
import os
import ssl
import sys

_SECONDS = 5.0


def check(port: int, host: str = "127.0.0.1") -> str:
    """Return the problem of the service with this admin port; empty when the service is live."""
    reasons = []
    for tls in (False, True):
        connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
        if tls:
            # The request stays on the loopback of this container, while the certificate names the pod.
            context = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=context)
        try:
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
            return "" if answer.status == http.client.OK else text
        except (OSError, http.client.HTTPException) as error:
            # A TLS port does not answer plain HTTP, and vice versa.
            reasons.append(f"{'https' if tls else 'http'}: {error}")
        finally:
            connection.close()
    return "; ".join(reasons)


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
