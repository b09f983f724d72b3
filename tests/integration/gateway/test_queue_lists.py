"""Trajectories of the queue: sorted by reward or length, page by page, and with previews of their text."""

from __future__ import annotations

from typing import Any

import httpx

from .gateway_scene import Scene

GROUPS = 4
LONG = "1 + 2 = 3 , " * 8


async def _fill(scene: Scene) -> None:
    """Score six of eight trajectories, save some tokens of the seventh, and leave the last one pending."""
    await scene.admit(GROUPS)
    leased = await scene.store.trajectories.lease(scene.session, 2 * GROUPS - 1)
    for item, value in zip(leased[:6], (0.5, 0.25, 1.0, 0.0, 0.75, 0.125), strict=True):
        await scene.complete(item, value)
    for _ in range(3):
        offset = len(scene.tokenizer.encode(LONG)) * _
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


async def test_the_queue_is_sorted_by_reward_and_unscored_rows_are_last(
    client: httpx.AsyncClient, scene: Scene
) -> None:
    await _fill(scene)
    rising = await _all(client, order="reward")
    assert [one["reward"] for one in rising] == [0.0, 0.125, 0.25, 0.5, 0.75, 1.0, None, None]
    falling = await _all(client, order="reward", descending=True)
    assert [one["reward"] for one in falling] == [1.0, 0.75, 0.5, 0.25, 0.125, 0.0, None, None]
    scored = await _all(client, order="reward", descending=True, state="scored")
    assert len(scored) == 6
    assert {one["id"] for one in rising} == {one["id"] for one in await _all(client)}


async def test_the_longest_response_is_found_and_its_preview_has_both_ends(
    client: httpx.AsyncClient, scene: Scene
) -> None:
    await _fill(scene)
    rows = await _all(client, order="tokens", descending=True, preview=True)
    lengths = [one["tokens"] for one in rows]
    assert lengths == sorted(lengths, reverse=True)
    assert rows[0]["tokens"] == 3 * len(scene.tokenizer.encode(LONG))
    begin, end = rows[0]["preview"].split(" \N{HORIZONTAL ELLIPSIS} ")
    assert begin.startswith("1 + 2 = 3 ,") and end.endswith("= 3 ,")
    assert {one["preview"] for one in rows[1:-1]} == {"1 + 2 = 3 !"}
    assert (rows[-1]["tokens"], rows[-1]["preview"]) == (0, "")
    assert {one["preview"] for one in await _all(client)} == {None}


async def test_a_cursor_of_another_order_is_not_found(client: httpx.AsyncClient, scene: Scene) -> None:
    await _fill(scene)
    for query in ({"order": "reward", "cursor": "open:1:0"}, {"order": "queue", "cursor": "sorted:3:0"}):
        answer = await client.get("api/v1/trajectories", params=query)
        assert (answer.status_code, answer.json()["field"]) == (404, "cursor"), query
    beyond = await client.get("api/v1/trajectories", params={"order": "tokens", "cursor": "sorted:9999999999999999:0"})
    assert beyond.json() == {"items": [], "next_cursor": None}
