"""kill -9 of a real agents service in the middle of an answer."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
from openai import AsyncOpenAI

from rollmesh.runtime.addresses import free_port

from .agent_mesh import TOKEN, AgentMesh, agents_process

SAVED = 48


async def test_a_killed_service_loses_no_more_of_an_answer_than_may_be_unsaved(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(
        rollout={"partial_save_tokens": SAVED},
        schedule={"groups_per_batch": 1},
        generator={"pace": [[1, 0.02]]},
        store={"session_ttl_seconds": 5.0},
    )
    port = free_port()  # the next service has to be found where the first one was
    url = f"http://127.0.0.1:{port}/v1"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=120) as http,
        AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=60) as client,
    ):
        async with agents_process(mesh, port) as first:
            told = (await http.post("/sessions", json={"wait_seconds": 90})).json()
            call: dict[str, Any] = {
                "model": mesh.config.name,
                "messages": told["messages"],
                "max_tokens": 220,
                "extra_headers": {"X-Rollmesh-Session": told["id"]},
                "extra_body": {"return_token_ids": True},
            }
            ids: list[int] = []
            try:
                async for event in await client.chat.completions.create(**call, stream=True):
                    ids += event.choices[0].token_ids if event.choices and event.choices[0].model_extra else []
                    if len(ids) > 90:
                        first.send_signal(signal.SIGKILL)
            except (openai.APIError, httpx.HTTPError):
                pass
            assert first.wait(60) == -signal.SIGKILL
        assert 90 < len(ids) < 220
        async with agents_process(mesh, port):
            deadline = time.monotonic() + 120
            while (seen := await http.get(f"/sessions/{told['id']}")).status_code == 503:
                assert time.monotonic() < deadline
                assert seen.json()["error"]["code"] == "session_not_known_yet"
                await asyncio.sleep(0.1)
            (kept,) = seen.json()["trajectories"]
            assert kept["tokens"] >= len(ids) - SAVED
            answer = await client.chat.completions.create(**call)
            whole = answer.choices[0].token_ids  # type: ignore[attr-defined]
            assert whole[: len(ids)] == ids, "the same policy samples the lost tokens again as they were"
            assert len(whole) == 220 or whole[-1] in mesh.tokenizer.eos_token_ids
            after = (await http.get(f"/sessions/{told['id']}")).json()
            assert (after["drift_count"], len(after["trajectories"])) == (0, 1)
            assert (await http.post(f"/sessions/{told['id']}/reward", json={"reward": 1.0})).status_code == 200
    counts = await mesh.store.mesh.counts()
    assert counts.totals.get("restarts_total", 0) == 0
    assert counts.trajectories["scored"] == 1
