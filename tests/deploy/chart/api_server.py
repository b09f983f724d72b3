"""An API server of the tests: the chart as it is rendered in a cluster that has these objects."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .rendering import CHART, NAMESPACE, RELEASE, Helm, Object, Rendering


def installed(helm: Helm, objects: Mapping[str, Object], *sets: str) -> Rendering:
    """Render the chart in a cluster with these objects, which are given by their path in the API."""
    with cluster(discovery(helm.template(CHART, (), sets).objects) | dict(objects)) as url:
        flags = ("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", url)
        return helm.template(CHART, (), sets, *flags)


def owned(thing: Object) -> Object:
    """Return the object as Helm stores it, with the owner's annotations."""
    owner = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
    metadata = thing["metadata"]
    return {**thing, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **owner}}}


def discovery(objects: list[Object]) -> dict[str, Object]:
    """The answers by which Helm finds the kinds of these objects: path -> JSON."""
    kinds: dict[str, set[str]] = {"v1": {"Secret"}}
    for thing in objects:
        kinds.setdefault(thing["apiVersion"], set()).add(thing["kind"])
    groups = [version.split("/") for version in kinds if "/" in version]
    versions = [(group, {"groupVersion": f"{group}/{version}", "version": version}) for group, version in groups]
    answers: dict[str, Object] = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [{"name": group, "versions": [one], "preferredVersion": one} for group, one in versions],
        },
    }
    for version, names in kinds.items():
        resources = [{"name": f"{kind.lower()}s", "namespaced": True, "kind": kind, "verbs": ["get"]} for kind in names]
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        answers[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    return answers


@contextmanager
def cluster(answers: dict[str, Object]) -> Iterator[str]:
    """The URL of an API server that answers these paths, and no others."""

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(missing if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
