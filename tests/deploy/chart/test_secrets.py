"""The Secret that the chart makes: random at the first install, unchanged by upgrades, replaced by an existing one."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from .object_checks import all_checks
from .rendering import CHART, NAMESPACE, RELEASE, Helm, HelmError, Object, Rendering

NAME = "demo-rollmesh-secrets"
ENTRIES = {"redis-password", "checkpoint-secret", "gateway-token", "mesh-token", "sglang-admin-key"}


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


def installed(helm: Helm, secrets: dict[str, Object], *sets: str) -> Rendering:
    """The chart as it is rendered in a cluster with these Secrets."""
    paths = {f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}": secret for name, secret in secrets.items()}
    with cluster(discovery(helm.template(CHART, (), sets).objects) | paths) as url:
        flags = ("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", url)
        return helm.template(CHART, (), sets, *flags)


def test_one_command_on_an_empty_namespace_makes_every_secret_that_the_pods_need(helm: Helm) -> None:
    rendering = installed(helm, {}, "security.token.enabled=true")

    secret = rendering.one("Secret")
    words = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    assert secret["metadata"]["name"] == NAME and set(words) == ENTRIES
    assert all(len(word) == 48 and word.isalnum() for word in words.values()), "no default, no empty secret"
    assert len(set(words.values())) == len(words), "one for each purpose"
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    for check in all_checks():
        assert not list(check(rendering)), check.__name__


def owned(secret: Object, data: dict[str, str]) -> dict[str, Object]:
    """The Secret as Helm stored it, also for a release that was uninstalled: by name, with the owner's annotations."""
    owner = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
    metadata = {**secret["metadata"], "annotations": {**secret["metadata"]["annotations"], **owner}}
    return {NAME: {**secret, "metadata": metadata, "data": data}}


def test_an_upgrade_and_an_install_after_an_uninstall_keep_the_secrets_and_add_missing_ones(helm: Helm) -> None:
    first = installed(helm, {}).one("Secret")
    old = {key: value for key, value in first["data"].items() if key != "mesh-token"}

    again = installed(helm, owned(first, old)).one("Secret")

    assert {key: again["data"][key] for key in old} == old
    assert set(again["data"]) == ENTRIES and again["data"]["mesh-token"] != first["data"]["mesh-token"]
    assert installed(helm, owned(first, first["data"])).one("Secret")["data"] == first["data"]


def test_an_existing_secret_is_used_instead(helm4: Helm) -> None:
    rendering = helm4.template(CHART, (), ["secrets.existingSecret=ours"])

    assert not rendering.of_kind("Secret")
    references = [
        entry["valueFrom"]["secretKeyRef"]["name"]
        for _, _, container in rendering.containers()
        for entry in container.get("env", [])
        if "secretKeyRef" in entry.get("valueFrom", {})
    ]
    assert set(references) == {"ours"}


@pytest.mark.parametrize(
    "sets",
    [
        ["redis.enabled=false", "redis.externalUrl=redis://elsewhere:6379"],
        ["redis.externalSentinelPassword=true"],
    ],
)
def test_the_password_of_an_external_redis_cannot_be_made_up(helm: Helm, sets: list[str]) -> None:
    with pytest.raises(HelmError, match=r"secrets\.create cannot make the password of an external Redis"):
        helm.template(CHART, (), sets)
    helm.template(CHART, (), [*sets, "secrets.existingSecret=ours"])
