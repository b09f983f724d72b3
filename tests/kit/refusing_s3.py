"""Run as a script by the tests: moto's S3 server, which refuses one kind of call as other servers and accounts do.

Usage: refusing_s3.py FAULT, one of the keys of ``FAULTS``, which a request of /heal ends. It prints the line that
moto's own command prints.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Environment = dict[str, Any]

FAULTS: dict[str, tuple[str, str, Callable[[Environment], bool]]] = {
    "no conditional writes": (
        "501 Not Implemented",
        "NotImplemented",
        lambda call: "HTTP_IF_NONE_MATCH" in call,
    ),
    "no listing": ("403 Forbidden", "AccessDenied", lambda call: "list-type" in call["QUERY_STRING"]),
    "no checksums": (
        "400 Bad Request",
        "InvalidArgument",
        lambda call: call["REQUEST_METHOD"] == "PUT" and any("CHECKSUM" in name for name in call),
    ),
    "full quota": ("403 Forbidden", "QuotaExceeded", lambda call: "/runs/" in call["PATH_INFO"]),
    "outage": ("503 Service Unavailable", "ServiceUnavailable", lambda call: "/runs/" in call["PATH_INFO"]),
}
"""HTTP status, S3 code and the refused calls, by name."""


def main(fault: str) -> None:
    served = DomainDispatcherApplication(create_backend_app)
    status, code, refuses = FAULTS[fault]

    healed = threading.Event()

    def refusing(call: Environment, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if call["PATH_INFO"] == "/heal":
            healed.set()
            start_response("204 No Content", [])
            return []
        if healed.is_set() or not refuses(call):
            return served(call, start_response)
        body = f"<Error><Code>{code}</Code><Message>this server refuses</Message></Error>".encode()
        call["wsgi.input"].read(int(call.get("CONTENT_LENGTH") or 0))
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    server = make_server("127.0.0.1", 0, refusing, threaded=True)
    print(f"Running on http://127.0.0.1:{server.port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
