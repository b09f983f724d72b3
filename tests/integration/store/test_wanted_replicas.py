"""Wanted replicas: permitted requests, and the presence of a launcher that carries them out."""

from __future__ import annotations

import pytest

from rollmesh.errors import ConfigError
from rollmesh.store import TrajectoryStore


async def test_the_newest_wish_holds_until_it_is_taken_back(store: TrajectoryStore) -> None:
    assert await store.scaling.requests() == {}
    await store.scaling.request("generator", 3)
    await store.scaling.request("reward", 2)
    await store.scaling.request("generator", 0)
    assert await store.scaling.requests() == {"generator": 0, "reward": 2}
    await store.scaling.request("generator", None)
    assert await store.scaling.requests() == {"reward": 2}


async def test_a_wish_says_whether_a_launcher_carries_it_out(store: TrajectoryStore) -> None:
    assert not await store.scaling.request("generator", 2)
    assert await store.scaling.take("launcher") == {"generator": 2}
    assert await store.scaling.request("generator", 3)
    await store.scaling.leave()
    assert not await store.scaling.request("generator", 2)
    assert await store.scaling.requests() == {"generator": 2}


@pytest.mark.parametrize(
    ("service", "replicas", "text"),
    [
        ("trainer", 2, "launcher.trainer_processes"),
        ("trainer", None, "launcher.trainer_processes"),
        ("generators", 2, "generators cannot be scaled: expected one of generator, reward, rollout"),
        ("generator", -1, "generator=-1: expected 0 to 256 replicas"),
        ("generator", 257, "expected 0 to 256"),
        ("rollout", 0, "rollout=0: expected 1 to 256"),
        ("reward", 0, "reward=0: expected 1 to 256"),
    ],
)
async def test_a_wish_that_cannot_be_met_is_refused_with_the_reason(
    store: TrajectoryStore, service: str, replicas: int | None, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        await store.scaling.request(service, replicas)
    assert await store.scaling.requests() == {}
