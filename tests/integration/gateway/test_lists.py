"""Lists: trained trajectories by step, the queue sorted, processes and their logs, which need the token."""

from pathlib import Path
from typing import Any

import httpx

from rollmesh.checkpoints.bucket import open_checkpoints

from .gateway_scene import RunningGateway, Scene


async def test_trained_trajectories_are_listed_by_step_sorted_and_paged(
    client: httpx.AsyncClient, scene: Scene
) -> None:
    """Two steps of two groups with two members each."""
    await scene.admit(4)
    await scene.complete_all()
    await scene.train(1, ["e0-0", "e0-1"])
    await scene.train(2, ["e0-2", "e0-3"])

    async def rows(path: str) -> Any:
        return (await client.get(f"/api/v1/{path}")).raise_for_status().json()

    assert await rows("batches") == {"train_steps": [2, 1]}
    trained = await rows("batches/1")
    assert [row["id"] for row in trained["items"]] == ["e0-0.0", "e0-0.1", "e0-1.0", "e0-1.1"]
    assert trained["total"] == 4
    best = await rows("batches/1?order=reward&descending=true&limit=2")
    assert [(row["id"], row["reward"]) for row in best["items"]] == [("e0-0.1", 1.0), ("e0-1.1", 1.0)]
    worst = await rows("batches/1?order=reward&descending=true&first=2")
    assert ([row["reward"] for row in worst["items"]], worst["first"]) == ([0.0, 0.0], 2)

    for group, step in (("e0-2", 2), ("e0-0", 1), ("e0-1", 1)):
        detail = await rows(f"trajectories/{group}.1")
        assert (detail["found_in"], detail["state"], detail["train_step"]) == ("batch", "consumed", step)
        assert detail["outcome"] == {"kind": "scored", "value": 1.0, "parts": {"right": 1.0}, "message": ""}
        assert detail["shaped_reward"] == 1.0
    policies = await rows("policies?limit=2")
    assert [(p["policy_version"], p["newest"]) for p in policies["policies"]] == [(2, True), (1, False)]
    assert policies["total"] == 3
    row = (await rows("batches/2?limit=1"))["items"][0]
    detail = await rows(f"trajectories/{row['id']}")
    policy = [text for run in detail["runs"] if run["source"] != "prompt" for text in run["texts"]]
    assert row["preview"] == " ".join("".join(policy).split()), "the viewer agrees with the preview"
    assert row["tokens"] == detail["response_tokens"]
    assert detail["member_rewards"] == [0.0, 1.0]

    answer = await client.get("/api/v1/batches/3")
    assert answer.status_code == 404
    assert "step 3 has no batch file" in answer.json()["error"]


async def test_a_trajectory_that_a_damaged_batch_file_may_have_is_not_said_to_be_in_none(
    client: httpx.AsyncClient, scene: Scene
) -> None:
    await scene.admit(2)
    await scene.complete_all()
    await scene.train(1, ["e0-0"])
    await scene.train(2, ["e0-1"])
    (path,) = open_checkpoints(scene.config).root.glob("batches/*2.pb")
    path.write_bytes(path.read_bytes()[:-40])
    answer = await client.get("/api/v1/trajectories/e0-1.0")
    assert answer.status_code == 404
    assert "a batch file that may have it cannot be read" in answer.json()["error"]
    assert path.name in answer.json()["error"]
    assert (await client.get("/api/v1/trajectories/e0-0.0")).json()["train_step"] == 1

    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.write_text("no folder")
    answer = await client.get("/api/v1/batches")
    assert (answer.status_code, "the batch files cannot be read now" in answer.json()["error"]) == (503, True)


async def test_the_configuration_leaves_out_secrets_and_needs_the_token(
    client: httpx.AsyncClient, scene: Scene, gateway: RunningGateway
) -> None:
    async with gateway.client() as outsider:
        assert (await outsider.get("/api/v1/overview")).status_code == 200
        assert (await outsider.get("/api/v1/config")).status_code == 401
    text = (await client.get("/api/v1/config")).raise_for_status().json()["yaml"]
    assert f"name: {scene.config.name}" in text
    assert "token:" not in text.replace("max_context_tokens", "") and "password:" not in text


GROUPS = 4
LONG = "1 + 2 = 3 , " * 8


async def _fill(scene: Scene) -> None:
    """Score six of eight trajectories, save some tokens of the seventh, and leave the last one pending."""
    await scene.admit(GROUPS)
    leased = await scene.store.trajectories.lease(scene.session, 2 * GROUPS - 1)
    for item, value in zip(leased[:6], (0.5, 0.25, 1.0, 0.0, 0.75, 0.125), strict=True):
        await scene.complete(item, value)
    for part in range(3):
        offset = len(scene.tokenizer.encode(LONG)) * part
        await scene.append(leased[6].trajectory.trajectory_id, offset, scene.segment(LONG))


async def _all(client: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    """Read every page of a list, three rows at a time."""
    found: list[dict[str, Any]] = []
    cursor: dict[str, str] = {}
    while True:
        page = (await client.get("api/v1/trajectories", params={"limit": 3, **query, **cursor})).json()
        found += page["items"]
        if page["next_cursor"] is None:
            return found
        cursor = {"cursor": page["next_cursor"]}


async def test_the_queue_is_sorted_by_reward_or_length_and_previewed(client: httpx.AsyncClient, scene: Scene) -> None:
    await _fill(scene)
    rising = await _all(client, order="reward")
    assert [one["reward"] for one in rising] == [0.0, 0.125, 0.25, 0.5, 0.75, 1.0, None, None]
    falling = await _all(client, order="reward", descending=True)
    assert [one["reward"] for one in falling] == [1.0, 0.75, 0.5, 0.25, 0.125, 0.0, None, None]
    scored = await _all(client, order="reward", descending=True, state="scored")
    assert len(scored) == 6
    open_first = [f"e0-{group}.{member}" for group in (3, 0, 1, 2) for member in range(2)]
    assert [one["id"] for one in await _all(client)] == open_first
    assert [one["id"] for one in await _all(client, state="leased")] == ["e0-3.0"]

    rows = await _all(client, order="tokens", descending=True, preview=True)
    lengths = [one["tokens"] for one in rows]
    assert lengths == sorted(lengths, reverse=True)
    assert rows[0]["tokens"] == 3 * len(scene.tokenizer.encode(LONG))
    begin, end = rows[0]["preview"].split(" \N{HORIZONTAL ELLIPSIS} ")
    assert begin.startswith("1 + 2 = 3 ,") and end.endswith("= 3 ,")
    assert {one["preview"] for one in rows[1:-1]} == {"1 + 2 = 3 !"}
    assert (rows[-1]["tokens"], rows[-1]["preview"]) == (0, "")
    assert {one["preview"] for one in await _all(client)} == {None}

    for query in ({"order": "reward", "cursor": "open:1:0"}, {"order": "queue", "cursor": "sorted:3:0"}):
        answer = await client.get("api/v1/trajectories", params=query)
        assert (answer.status_code, answer.json()["field"]) == (404, "cursor"), query
    beyond = await client.get("api/v1/trajectories", params={"order": "tokens", "cursor": "sorted:9999999999999999:0"})
    assert beyond.json() == {"items": [], "next_cursor": None}


async def test_a_log_needs_the_token_the_list_does_not_and_no_other_file_is_read(
    client: httpx.AsyncClient, scene: Scene
) -> None:
    folder = Path(scene.config.folder) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer-0.log").write_text("first\nsecond\nthird\n")
    (folder.parent / "secret-0.log").write_text("hidden\n")
    for name in ("trainer-1", "..%2fsecret-0", "trainer-0.log", "secret-0"):
        answer = await client.get(f"api/v1/logs/{name}")
        assert answer.status_code in (400, 404)
        assert "hidden" not in answer.text
    answer = await client.get("api/v1/logs/trainer-0", params={"lines": 2})
    assert answer.json() == {"name": "trainer-0", "lines": ["second", "third"]}
    del client.headers["Authorization"]
    listed = (await client.get("api/v1/processes")).json()["processes"]
    assert [(one["name"], one["pid"], one["log_bytes"]) for one in listed] == [("trainer-0", None, 19)]
    assert (await client.get("api/v1/logs/trainer-0")).status_code == 401
