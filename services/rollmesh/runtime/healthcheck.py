"""``python -m rollmesh.runtime.healthcheck``: whether the service of this container lives; what HEALTHCHECK runs.

Standard library only, since it starts every few seconds beside a service that needs the cores.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys

_SECONDS = 5.0


def check(port: int, host: str = "127.0.0.1") -> str:
    """What is wrong with the service whose admin port this is; empty when every loop of it lives."""
    reasons = []
    for tls in (False, True):
        try:
            status, text = _ask(host, port, tls)
        except (OSError, http.client.HTTPException) as error:
            # A port with TLS does not answer plain HTTP, and the other way round.
            reasons.append(f"{'https' if tls else 'http'}: {error}")
            continue
        return "" if status == http.client.OK else text
    return "; ".join(reasons)


def _ask(host: str, port: int, tls: bool) -> tuple[int, str]:
    if tls:
        # It asks its own container over the loopback: the certificate names the pod, and there is nobody between.
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
    """Exit with status 1 and the reason when the service does not live."""
    port = os.environ.get("ROLLMESH_NETWORK__ADMIN_PORT", "0")
    if port == "0":
        sys.exit("ROLLMESH_NETWORK__ADMIN_PORT is not set: the health of this container cannot be asked for")
    problem = check(int(port))
    if problem:
        sys.exit(problem)


if __name__ == "__main__":
    main()
