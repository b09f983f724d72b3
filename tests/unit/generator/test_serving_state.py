"""Admission of calls, and the wait for the last one to end."""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.errors import GenerationRefused
from rollmesh.generator.serving_state import ServingState


def serving() -> ServingState:
    serving_state = ServingState()
    serving_state.put_in_service()
    return serving_state


def test_nothing_is_let_in_before_a_policy_is_in_the_engine():
    with pytest.raises(GenerationRefused, match="no policy has been loaded"), ServingState().admitted():
        pass


@pytest.mark.parametrize(
    ("close", "message"),
    [
        (ServingState.drain, "draining"),
        (lambda r: r.set_reloading(True), "waiting for running calls"),
        (lambda r: r.take_out_of_service("canary off by 3"), "canary off by 3"),
    ],
)
async def test_a_closed_door_says_why_and_tells_the_registry(close, message):
    serving_state = serving()
    serving_state.changed.clear()
    close(serving_state)
    assert serving_state.changed.is_set()
    with pytest.raises(GenerationRefused, match=message), serving_state.admitted():
        pass
    async with asyncio.timeout(60):
        await serving_state.until_idle()


def test_draining_is_final():
    serving_state = serving()
    serving_state.drain()
    serving_state.put_in_service()
    serving_state.set_reloading(False)
    assert serving_state.reason == "draining"


async def test_idle_means_that_every_admitted_call_has_ended():
    serving_state = serving()
    await serving_state.until_idle()
    with serving_state.admitted():
        waiting = asyncio.create_task(serving_state.until_idle())
        with serving_state.admitted():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


def test_every_instance_has_its_own_identity():
    assert ServingState().instance_id != ServingState().instance_id


def test_refused_versions_count_once_each_until_one_is_served_and_not_while_they_are_retried():
    serving_state = serving()
    serving_state.refuse(1, "torn", retried=True)
    assert (serving_state.refused_version, serving_state.refused_count) == (1, 0)
    for _ in range(2):
        serving_state.refuse(1, "tampered", retried=False)
    serving_state.refuse(3, "canary", retried=False)
    assert (serving_state.refused_version, serving_state.refused_count, serving_state.refused_reason) == (
        3,
        2,
        "canary",
    )
    serving_state.refuse(4, "torn", retried=True)
    assert (serving_state.refused_version, serving_state.refused_count) == (4, 0)
    serving_state.refuse(4, "tampered", retried=False)
    serving_state.accept(2)
    assert serving_state.refused_count == 3
    serving_state.accept(4)
    assert (serving_state.refused_version, serving_state.refused_count) == (None, 0)
