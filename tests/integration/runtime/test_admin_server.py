import socket

import httpx
import pytest

from rollmesh.runtime.health import Health
from rollmesh.runtime.http_server import listen
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.service_host import admin_server


async def test_admin_port_serves_metrics_and_turns_unready_and_dead_into_503() -> None:
    now = [0.0]
    health = Health(clock=lambda: now[0])
    metrics = Metrics("demo")
    metrics.counter("rollmesh_demo_things_total", "Things.").inc(3)
    async with admin_server(metrics, health, "127.0.0.1") as port, httpx.AsyncClient(timeout=60.0) as client:
        base = f"http://127.0.0.1:{port}"
        assert "rollmesh_demo_things_total 3.0" in (await client.get(f"{base}/metrics")).text
        assert (await client.get(f"{base}/readyz")).status_code == 503
        health.set_ready(True)
        assert (await client.get(f"{base}/readyz")).status_code == 200
        health.watch("loop", 5.0)
        assert (await client.get(f"{base}/healthz")).status_code == 200
        now[0] = 6.0
        answer = await client.get(f"{base}/healthz")
        assert answer.status_code == 503
        assert answer.json()["stalled"] == {"loop": 6.0}
        health.beat("loop")
        assert (await client.get(f"{base}/healthz")).status_code == 200


async def test_head_is_answered_as_get_without_the_body() -> None:
    health = Health()
    async with (
        admin_server(Metrics("demo"), health, "127.0.0.1") as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client,
    ):
        for path, status in (("/metrics", 200), ("/healthz", 200), ("/readyz", 503), ("/nothing", 404)):
            head, get = await client.head(path), await client.get(path)
            assert (head.status_code, head.content) == (get.status_code, b"") == (status, b""), path
            assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_ipv6_wildcard_accepts_clients_of_both_families(address: str) -> None:
    with listen("::", 0, "network.admin_port") as listener:
        socket.create_connection((address, listener.getsockname()[1]), timeout=60.0).close()
