"""Settings of an operator survive a Redis that comes back with an earlier state."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rollmesh.config.store import StoreConfig
from rollmesh.errors import ConfigError
from rollmesh.store import EmbeddedServer, TrajectoryStore

from .store_mesh import Mesh, earlier_state, policy

Clients = tuple[TrajectoryStore, TrajectoryStore]


@pytest.fixture
async def clients(durable_server: EmbeddedServer) -> AsyncIterator[Clients]:
    """Two processes that look at the same run."""
    run = "settings"
    async with (
        await TrajectoryStore.connect(StoreConfig(), run=run, url=durable_server.url) as one,
        await TrajectoryStore.connect(StoreConfig(), run=run, url=durable_server.url) as other,
    ):
        mesh = await Mesh.start(one)
        await one.policies.announce(mesh.trainer, policy(1))
        yield one, other


async def back_as_it_was_before(server: EmbeddedServer, write: Callable[[], Awaitable[object]]) -> None:
    """Make a write, and kill the server; it comes back without it, as after the loss of its file's tail."""
    come_back = await asyncio.to_thread(earlier_state, server)
    await write()
    await asyncio.to_thread(come_back)


@pytest.mark.parametrize("paused", [True, False])
async def test_a_pause_or_its_end_that_redis_has_forgotten_is_repeated_by_who_said_it(
    durable_server: EmbeddedServer, clients: Clients, paused: bool
) -> None:
    store, stranger = clients
    await store.settings.set_user_paused(not paused)
    await back_as_it_was_before(durable_server, lambda: store.settings.set_user_paused(paused))
    assert (await stranger.mesh.view()).user_paused is not paused, "it has not seen the newer setting"
    assert (await store.mesh.view()).user_paused is paused
    assert (await stranger.mesh.view()).user_paused is paused


@pytest.mark.parametrize("paused", [True, False])
async def test_a_client_does_not_repeat_its_own_older_order_over_a_newer_one(
    durable_server: EmbeddedServer, clients: Clients, paused: bool
) -> None:
    launcher, gateway = clients
    await launcher.settings.set_user_paused(not paused)
    await gateway.settings.set_user_paused(paused)
    await asyncio.to_thread(durable_server.kill)
    await asyncio.to_thread(durable_server.start)
    seen = await launcher.mesh.view()
    assert seen.recovering
    assert seen.user_paused is paused
    assert (await gateway.mesh.view()).user_paused is paused


async def test_a_client_that_has_seen_a_forgotten_setting_repeats_it_when_its_writer_is_gone(
    durable_server: EmbeddedServer, clients: Clients
) -> None:
    gateway, leader = clients

    async def pause_and_leave() -> None:
        await gateway.settings.set_user_paused(True)
        assert (await leader.mesh.view()).user_paused
        await gateway.aclose()

    await back_as_it_was_before(durable_server, pause_and_leave)
    assert (await leader.mesh.view()).user_paused


async def test_a_pin_a_scale_target_and_a_rollback_that_redis_has_forgotten_are_repeated(
    durable_server: EmbeddedServer, clients: Clients
) -> None:
    gateway, _ = clients
    await gateway.scaling.request("reward", 4)

    async def orders() -> None:
        await gateway.policies.pin(0)
        await gateway.scaling.request("generator", 3)
        await gateway.scaling.request("reward", None)
        await gateway.rollbacks.request(0)

    await back_as_it_was_before(durable_server, orders)
    await gateway.mesh.view()
    assert await gateway.policies.pinned() == 0
    assert await gateway.scaling.requests() == {"generator": 3}
    request = await gateway.rollbacks.pending()
    assert request is not None and request.policy_version == 0
    await back_as_it_was_before(durable_server, lambda: gateway.policies.pin(None))
    await gateway.mesh.view()
    assert await gateway.policies.pinned() is None, "the end of a pin is an order too"


async def test_a_rollback_that_was_carried_out_is_not_asked_for_again(
    durable_server: EmbeddedServer, clients: Clients
) -> None:
    trainer, leader = clients
    request = await trainer.rollbacks.request(0)

    async def carry_out() -> None:
        session = await trainer.training.open_session("another trainer")
        await trainer.rollbacks.finish(session, request)

    await back_as_it_was_before(durable_server, carry_out)
    assert await leader.rollbacks.pending() == request
    await trainer.mesh.view()
    assert await leader.rollbacks.pending() is None


async def test_a_pin_waits_for_the_trainer_to_announce_its_version_to_a_redis_that_came_back_empty(
    durable_server: EmbeddedServer, clients: Clients
) -> None:
    store, _ = clients
    await store.policies.pin(1)
    await store.settings.set_user_paused(True)
    await store.connection.command("FLUSHALL")
    assert (await store.mesh.view()).user_paused
    assert await store.policies.pinned() is None
    session = await store.training.open_session("trainer")
    for version in (0, 1):
        await store.policies.announce(session, policy(version))
    await store.mesh.view()
    assert await store.policies.pinned() == 1


async def test_an_operators_pause_and_the_launchers_are_two_switches(clients: Clients) -> None:
    store, _ = clients
    await store.settings.set_launcher_paused(True)
    await store.settings.set_user_paused(True)
    await store.settings.set_launcher_paused(False)
    view = await store.mesh.view()
    assert (view.user_paused, view.launcher_paused) == (True, False)
    await store.settings.set_launcher_paused(True)
    await store.settings.set_user_paused(False)
    view = await store.mesh.view()
    assert (view.user_paused, view.launcher_paused) == (False, True)


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
        ("generators", 2, "generators cannot be scaled: expected one of generator, reward, rollout, teacher-NAME"),
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
