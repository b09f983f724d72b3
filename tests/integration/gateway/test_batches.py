"""Trained trajectories listed by step, from the batch files of a live run."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from .gateway_scene import RunningGateway, Scene


@pytest.fixture
async def rows(client: httpx.AsyncClient, scene: Scene) -> Any:
    """Train two steps of two groups with two members each; return the rows of a request."""
    await scene.admit(4)
    await scene.complete_all()
    await scene.train(1, ["e0-0", "e0-1"])
    await scene.train(2, ["e0-2", "e0-3"])

    async def get(path: str) -> Any:
        return (await client.get(f"/api/v1/{path}")).raise_for_status().json()

    return get


async def test_the_steps_with_a_batch_file_are_listed_newest_first(rows: Any) -> None:
    assert await rows("batches") == {"train_steps": [2, 1]}


async def test_a_batch_is_sorted_by_reward_and_paged(rows: Any) -> None:
    trained = await rows("batches/1")
    assert [row["id"] for row in trained["items"]] == ["e0-0.0", "e0-0.1", "e0-1.0", "e0-1.1"]
    assert trained["total"] == 4
    best = await rows("batches/1?order=reward&descending=true&limit=2")
    assert [(row["id"], row["reward"]) for row in best["items"]] == [("e0-0.1", 1.0), ("e0-1.1", 1.0)]
    worst = await rows("batches/1?order=reward&descending=true&first=2")
    assert [row["reward"] for row in worst["items"]] == [0.0, 0.0]
    assert worst["first"] == 2


async def test_a_row_has_a_preview_that_the_viewer_agrees_with(rows: Any) -> None:
    row = (await rows("batches/2?limit=1"))["items"][0]
    detail = await rows(f"trajectories/{row['id']}")
    policy = [text for run in detail["runs"] if run["source"] != "prompt" for text in run["texts"]]
    assert row["preview"] == " ".join("".join(policy).split())
    assert row["tokens"] == detail["response_tokens"]
    assert detail["member_rewards"] == [0.0, 1.0]


async def test_a_step_without_a_batch_file_is_not_found(rows: Any, client: httpx.AsyncClient) -> None:
    answer = await client.get("/api/v1/batches/3")
    assert answer.status_code == 404
    assert "step 3 has no batch file" in answer.json()["error"]


async def test_the_configuration_leaves_out_secrets_and_needs_the_token(
    client: httpx.AsyncClient, scene: Scene, gateway: RunningGateway
) -> None:
    async with gateway.client() as outsider:
        assert (await outsider.get("/api/v1/overview")).status_code == 200
        assert (await outsider.get("/api/v1/config")).status_code == 401
    text = (await client.get("/api/v1/config")).raise_for_status().json()["yaml"]
    assert f"name: {scene.config.name}" in text
    assert "token:" not in text.replace("max_context_tokens", "") and "password:" not in text
