"""Object stores that refuse a kind of call: a final error with a remedy, where an outage is waited for."""

import http.server
import ssl
import threading
import urllib.request
from pathlib import Path

import pytest

from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.errors import Reason
from rollmesh.runtime.health import Waits

from ...kit.certificates import Authority
from ...kit.checkpoint_samples import refused
from ...kit.s3_server import Bucket


def use(store: ObjectStore, folder: Path) -> None:
    """Make every kind of call that a run makes."""
    source = folder / "source"
    source.write_bytes(b"weights")
    store.write("state", b"state")
    store.put(source, "policies/1/weights")
    assert store.put_new(source, "batches/1")
    assert set(store.sizes("policies")) == {"policies/1/weights"}
    assert store.read("state", 100) == b"state"
    store.get("policies/1/weights", folder / "copy")
    store.delete(["state"])


@pytest.mark.parametrize(
    ("fault", "remedies"),
    [
        ("no conditional writes", ["conditional writes (If-None-Match)", "docs/object-stores.md"]),
        ("no listing", ["this server refuses", "list the bucket", "docs/object-stores.md"]),
        ("no checksums", ["AWS_REQUEST_CHECKSUM_CALCULATION=when_required", "docs/object-stores.md"]),
    ],
)
def test_a_refusal_that_cannot_pass_is_a_final_error_with_a_remedy_at_once(
    tmp_path: Path, fault: str, remedies: list[str]
) -> None:
    bucket = Bucket(tmp_path / "s3.log", fault)
    try:
        store = ObjectStore(f"s3://{bucket.name}/runs/x", {"endpoint_url": bucket.url}, retry_seconds=3600.0)
        error = refused(use, store, tmp_path)
    finally:
        bucket.stop()
    assert error.reason == Reason.REFUSED and error.final and error.outside and not error.passing
    for part in (f"s3://{bucket.name}/runs/x", *remedies):
        assert part in str(error)


def test_the_documented_switch_of_the_checksums_serves_a_server_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
    bucket = Bucket(tmp_path / "s3.log", "no checksums")
    try:
        use(ObjectStore(f"s3://{bucket.name}/runs/x", {"endpoint_url": bucket.url}), tmp_path)
    finally:
        bucket.stop()


@pytest.mark.parametrize("fault", ["outage", "full quota"])
def test_an_outage_shows_its_error_while_it_is_waited_for_and_no_more_afterwards(tmp_path: Path, fault: str) -> None:
    class SeenWaits(Waits):
        """Waits that end the outage once its error is shown."""

        def begin(self, operation: str, error: str, *, blocks: bool = False, after_seconds: float = 0.0) -> None:
            super().begin(operation, error, blocks=blocks, after_seconds=after_seconds)
            if "this server refuses" in self.text():
                seen.append(self.text())
                urllib.request.urlopen(f"{bucket.url}/heal").close()

    seen = list[str]()
    bucket, waits = Bucket(tmp_path / "s3.log", fault), SeenWaits()
    place, options = f"s3://{bucket.name}/runs/x", {"endpoint_url": bucket.url}
    try:
        error = refused(ObjectStore(place, options, retry_seconds=0.0).write, "state", b"state")
        store = ObjectStore(place, options, retry_seconds=3600.0, waits=waits)
        store.write("state", b"state")
        assert store.read("state", 100) == b"state"
    finally:
        bucket.stop()
    assert error.reason == Reason.UNREACHABLE and error.passing and "this server refuses" in str(error)
    assert seen and waits.text() == ""


def test_a_missing_bucket_an_endpoint_that_is_none_and_http_behind_https_are_refusals(bucket: Bucket) -> None:
    for name, url, remedy in (
        ("nowhere", bucket.url, "create the bucket, or correct checkpoints.folder"),
        (bucket.name, "minio:9000", "correct endpoint_url in checkpoints.object_store"),
        (bucket.name, bucket.url.replace("http:", "https:"), "does not speak TLS: use http://"),
    ):
        store = ObjectStore(f"s3://{name}/x", {"endpoint_url": url}, retry_seconds=3600.0)
        error = refused(store.write, "key", b"value")
        assert remedy in str(error) and error.reason == Reason.REFUSED


def test_a_client_without_credentials_is_told_to_have_some(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = ObjectStore(f"s3://{bucket.name}/x", {"endpoint_url": bucket.url}, retry_seconds=3600.0)
    error = refused(store.write, "key", b"value")
    assert "set the credentials in the environment" in str(error) and error.reason == Reason.REFUSED


@pytest.mark.parametrize("expired", [False, True])
def test_a_certificate_of_an_unknown_authority_is_a_refusal_and_an_expired_one_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expired: bool
) -> None:
    own = Authority(tmp_path).issue("s3", expired=expired)
    if expired:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(own.ca))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.certificate, own.key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = {"endpoint_url": f"https://127.0.0.1:{server.server_port}"}
        store = ObjectStore("s3://bucket/x", options, retry_seconds=0.1 if expired else 3600.0)
        error = refused(store.write, "key", b"value")
        server.shutdown()
    assert ("has expired" if expired else "set AWS_CA_BUNDLE") in str(error)
    assert error.reason == (Reason.UNREACHABLE if expired else Reason.REFUSED)
