"""Who is let in, and when the last one has left."""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.errors import GenerationRefused
from rollmesh.generator.serving_state import ServingState


def serving() -> ServingState:
    rotation = ServingState()
    rotation.put_in()
    return rotation


def test_nothing_is_let_in_before_a_policy_is_in_the_engine():
    with pytest.raises(GenerationRefused, match="no policy has been loaded"), ServingState().admitted():
        pass


@pytest.mark.parametrize(
    ("close", "message"),
    [
        (ServingState.drain, "draining"),
        (lambda r: r.set_reloading(True), "waiting for running calls"),
        (lambda r: r.take_out("canary off by 3"), "canary off by 3"),
    ],
)
def test_a_closed_door_says_why_and_tells_the_registry(close, message):
    rotation = serving()
    rotation.changed.clear()
    close(rotation)
    assert rotation.changed.is_set()
    with pytest.raises(GenerationRefused, match=message), rotation.admitted():
        pass
    assert rotation.call_count == 0


def test_draining_is_for_good():
    rotation = serving()
    rotation.drain()
    rotation.put_in()
    rotation.set_reloading(False)
    assert rotation.reason == "draining"


async def test_idle_means_that_every_admitted_call_has_ended():
    rotation = serving()
    await rotation.until_idle()
    with rotation.admitted():
        waiting = asyncio.create_task(rotation.until_idle())
        with rotation.admitted():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


def test_every_instance_has_its_own_identity():
    assert ServingState().instance_id != ServingState().instance_id


def test_refused_versions_count_once_each_until_one_is_served_and_not_while_they_are_retried():
    rotation = serving()
    rotation.refuse(1, "torn", retried=True)
    assert (rotation.refused_version, rotation.refused_count) == (1, 0)
    for _ in range(2):
        rotation.refuse(1, "tampered", retried=False)
    rotation.refuse(3, "canary", retried=False)
    assert (rotation.refused_version, rotation.refused_count, rotation.refused_reason) == (3, 2, "canary")
    rotation.refuse(4, "torn", retried=True)
    assert (rotation.refused_version, rotation.refused_count) == (4, 0)
    rotation.refuse(4, "tampered", retried=False)
    rotation.accept(2)
    assert rotation.refused_count == 3
    rotation.accept(4)
    assert (rotation.refused_version, rotation.refused_count) == (None, 0)
