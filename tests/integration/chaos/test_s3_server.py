"""The S3 server of the bench and its clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.runtime.addresses import free_port

from ...kit.s3_server import CREDENTIALS, Bucket, is_installed

pytestmark = [pytest.mark.long, pytest.mark.skipif(not is_installed(), reason="moto and s3fs are not installed")]


def test_a_proxy_of_the_environment_is_not_asked_for_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")  # no proxy is there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    server = Bucket(tmp_path / "s3.log")
    try:
        ObjectStore(f"s3://{server.name}/run", server.options).write("policies/1", b"weights")
        server.copy("run", tmp_path / "copy")
    finally:
        server.stop()
    assert (tmp_path / "copy" / "policies" / "1").read_bytes() == b"weights"
