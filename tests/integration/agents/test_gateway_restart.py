"""A restart of the gateway leaves the sessions of agents alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.endpoints import read_endpoints

from ..gateway.gateway_scene import start_gateway
from .agent_mesh import TOKEN, AgentMesh, agents_process


async def test_a_restarted_gateway_parks_no_rollout_and_names_the_address_of_the_api(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh()
    folder, token = Path(mesh.config.folder), {"ROLLMESH_GATEWAY__TOKEN": TOKEN}
    port, url = free_port(), mesh.config.store.url
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        agents_process(mesh, port) as process,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}/v1", headers=headers, trust_env=False, timeout=120
        ) as http,
    ):
        told = (await http.post("/sessions", json={"wait_seconds": 90})).json()
        body = {"model": mesh.config.name, "messages": told["messages"], "max_tokens": 20}
        session = {"X-Rollmesh-Session": told["id"]}
        assert (await http.post("/chat/completions", json=body, headers=session)).status_code == 200
        before = (await http.get(f"/sessions/{told['id']}")).json()
        for _ in range(2):
            gateway = await asyncio.to_thread(start_gateway, folder / "run.yaml", url, token)
            try:
                async with gateway.client(headers=headers) as page:
                    answer = await page.post("v1/chat/completions", json=body)
                assert answer.status_code == 404
                assert f"use http://127.0.0.1:{port}/v1" in answer.json()["error"]["message"]
                assert await asyncio.to_thread(gateway.terminate) == 0
            finally:
                gateway.process.kill()
                gateway.process.wait()
        after = (await http.get(f"/sessions/{told['id']}")).json()
        assert after["trajectories"] == before["trajectories"]
        assert (before["state"], after["state"]) == ("active", "active")
        (endpoint,) = read_endpoints(folder, "agents")
        assert (endpoint.pid, endpoint.url) == (process.pid, f"http://127.0.0.1:{port}/v1")
        exported = (await http.get(f"http://{endpoint.admin}/metrics")).text
        parked = [line for line in exported.splitlines() if line.startswith("rollmesh_rollout_trajectories_parked_to")]
        assert parked and all(line.endswith(" 0.0") for line in parked)
    assert (await mesh.store.mesh.view()).partial == 0
