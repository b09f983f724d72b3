"""Outages in the middle of calls: cancelled callers, lost sessions, clocks set back, a Redis that comes back twice."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from rollmesh.config.store import StoreConfig
from rollmesh.errors import SessionLost, StoreUnavailable
from rollmesh.mesh import Cursor
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.health import Waits
from rollmesh.runtime.metrics import Metrics
from rollmesh.store import EmbeddedServer, ReRegistered, TrajectoryStore
from rollmesh.store.redis_connection import StoreCallObserver
from rollmesh.worker.worker_session import WorkerSession

from ...kit.records import generator_record
from ...kit.waiting import reached
from .store_mesh import Mesh, earlier_state, limits, policy


async def test_a_cancelled_caller_always_ends(store: TrajectoryStore) -> None:
    delays = random.Random(0)

    async def call_forever() -> None:
        while True:
            await store.recovery.server_run_id()
            await asyncio.sleep(0.0005)

    for _ in range(200):
        task = asyncio.create_task(call_forever())
        await asyncio.sleep(0.004 * delays.random())
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=60.0)
        assert done, "the cancellation was swallowed"
        assert task.cancelled()


async def test_a_caller_that_is_cancelled_while_its_connection_is_released_leaks_none(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, pool = store.connection, store.connection.client.connection_pool
    await connection.commands([("PING",)])
    monkeypatch.setattr("rollmesh.store.redis_connection._MOST_IDLE", 0)
    async with asyncio.timeout(60):
        async with pool._lock:
            task = asyncio.create_task(connection.commands([("PING",)]))
            while not pool._lock._waiters:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
        assert task.cancelled()
        while pool._in_use_connections - set(connection._idle):
            await asyncio.sleep(0)


def shown(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"rollmesh_reward_store_call_{name}") or 0.0


async def test_calls_are_timed_and_tries_without_an_answer_counted(own_server: EmbeddedServer) -> None:
    metrics = Metrics("reward")
    store = await TrajectoryStore.connect(
        StoreConfig(), run="timed", url=own_server.url, retry_seconds=60.0, observer=StoreCallObserver(Waits(), metrics)
    )
    async with store:
        await store.limits.init_run(limits())
        await store.mesh.view()
        before = shown(metrics, "seconds_count")
        await store.mesh.view()
        assert shown(metrics, "seconds_count") == before + 1
        # A wait for news is no slow answer, and a refusal is an answer.
        assert await store.policies.wait(-1, 0.05) is None
        assert shown(metrics, "seconds_count") == before + 1
        with pytest.raises(SessionLost):
            await store.leadership.cut("no leader's token", 1, ["e0-0"])
        assert shown(metrics, "failures_total") == 0
        own_server.kill()
        unanswered = asyncio.create_task(store.mesh.view())
        # Each try counts by itself, while the call goes on.
        while shown(metrics, "failures_total") < 2:
            assert not unanswered.done()
            await asyncio.sleep(0.01)
        unanswered.cancel()
        await asyncio.wait({unanswered})
        assert shown(metrics, "seconds_count") == before + 1


async def test_an_outage_in_the_middle_of_a_recovery_does_not_stop_the_heartbeat_watch(
    own_server: EmbeddedServer,
) -> None:
    beats, away = asyncio.Semaphore(0), asyncio.Event()
    async with await TrajectoryStore.connect(
        StoreConfig(), run="outage", url=own_server.url, retry_seconds=0.05
    ) as store:
        await Mesh.start(store)
        session = WorkerSession(store.sessions, "worker", 0.05, RolloutMetrics(Metrics("rollout")))
        await session.open()
        reregister = store.sessions.reregister

        async def reregister_and_lose_redis(*arguments: object) -> list[ReRegistered]:
            if not away.is_set():
                await asyncio.to_thread(own_server.kill)
                away.set()
            return await reregister(*arguments)  # type: ignore[arg-type]

        store.sessions.reregister = reregister_and_lose_redis  # type: ignore[method-assign]
        lost = session.current
        await store.sessions.close(lost)
        heartbeat = asyncio.create_task(session.keep_alive(beats.release))
        try:
            await asyncio.wait_for(away.wait(), 60)
            while not beats.locked():
                await beats.acquire()
            for _ in range(3):
                await asyncio.wait_for(beats.acquire(), 30)
            assert session.current == lost, "it is still recovering"
            await asyncio.to_thread(own_server.start)
            async with asyncio.timeout(60):
                while session.current == lost:
                    await beats.acquire()
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)
            await session.close()


CLOCK_TTL = 0.2
HOUR_MS = 3_600_000


async def set_back(store: TrajectoryStore) -> None:
    """Let every stored time lie an hour ahead of the server's clock."""
    keys, command = store.connection.keys, store.connection.command
    meta = keys.single("meta")
    for field in ("leader_since", "leader_until", "quiet_until", "recovering_until"):
        value = await command("HGET", meta, field)
        if value is not None:
            await command("HSET", meta, field, int(value) + HOUR_MS)
    for key in (keys.single("sessions"), keys.single("generator_expiry")):
        for name in await command("ZRANGE", key, 0, -1):
            await command("ZINCRBY", key, HOUR_MS, name)


@pytest.mark.parametrize("recovers", [False, True])
async def test_a_clock_that_was_set_back_holds_up_neither_reaping_nor_the_end_of_a_recovery(
    store: TrajectoryStore, recovers: bool
) -> None:
    mesh = await Mesh.start(store, session_ttl_seconds=CLOCK_TTL, groups=2)
    assert len(await store.trajectories.lease(mesh.session, 4)) == 4
    if recovers:
        await store.training.close_session(mesh.trainer)
        await store.connection.command("HSET", store.connection.keys.single("meta"), "run_id", "another")
        assert await store.recovery.begin()
    await set_back(store)
    assert await reached(lambda: store.leadership.reap(mesh.leader)) == 4
    assert (await store.mesh.view()).leased == 0


async def test_a_clock_that_was_set_back_does_not_keep_a_dead_leader_in_the_lead(store: TrajectoryStore) -> None:
    await Mesh.start(store, session_ttl_seconds=CLOCK_TTL)
    await set_back(store)
    await reached(lambda: store.leadership.acquire("another"))


async def test_a_clock_that_was_set_back_does_not_keep_a_dead_generator_in_the_registry(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, session_ttl_seconds=CLOCK_TTL)
    await store.generators.register(generator_record("dead"), CLOCK_TTL)
    await set_back(store)

    async def forgotten() -> bool:
        await store.leadership.reap(mesh.leader)
        return not await store.generators.live() and (await store.mesh.view()).registered_generators == 0

    await reached(forgotten)


TTL = 60.0
"""Seconds of a session, and so of a recovery, that no machine that stalls exceeds."""


@pytest.mark.parametrize("at", ["second group", "payload"])
async def test_a_claim_during_which_redis_comes_back_returns_no_mix_of_two_states(
    durable_server: EmbeddedServer, durable_store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr("rollmesh.store.limits.MAX_KEYS_PER_SCRIPT", 1)  # a call for each group
    monkeypatch.setattr("rollmesh.store.training._TOKENS_PER_CLAIM", 4 if at == "payload" else 1 << 15)
    mesh = await Mesh.start(durable_store, session_ttl_seconds=TTL, groups=2)
    leased = await durable_store.trajectories.lease(mesh.session, 64)
    for item in leased[:-1]:
        await mesh.complete(item, float(item.trajectory.member_index))
    last = leased[-1].trajectory.trajectory_id
    await mesh.append(last, 0, 3)
    come_back = earlier_state(durable_server)
    await mesh.finish(last, 3, 2)
    await mesh.score(last, 1.0)
    await durable_store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    run, commands, reads = durable_store.connection.run, durable_store.connection.commands, Counter[str]()

    async def die_before_the_second_group(name: str, *arguments: Any) -> Any:
        reads[name] += 1
        if at == "second group" and name == "claim" and reads[name] == 2:
            come_back()
        return await run(name, *arguments)

    async def die_before_a_payload(batch: Any, label: str = "") -> Any:
        reads["payload"] += bool(batch)
        if at == "payload" and reads["payload"] == 2:
            come_back()
        return await commands(batch, label)

    monkeypatch.setattr(durable_store.connection, "run", die_before_the_second_group)
    monkeypatch.setattr(durable_store.connection, "commands", die_before_a_payload)
    with pytest.raises(StoreUnavailable, match="came back during a claim"):
        await durable_store.training.claim(mesh.trainer, 1, 1)


async def test_a_redis_that_dies_again_during_a_re_assertion_gets_all_of_it_again(
    durable_server: EmbeddedServer, durable_store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would count the steps as trained, and their groups, which it still has as ready, would be cut again."""
    mesh = await Mesh.start(durable_store, session_ttl_seconds=TTL, groups=3, completed=True)
    come_back = earlier_state(durable_server)
    await durable_store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    batch = await durable_store.training.claim(mesh.trainer, 1, 1)
    assert batch is not None
    await durable_store.training.confirm_batch_file(mesh.trainer, 1, "digest")
    await durable_store.training.report_trained(mesh.trainer, 1)
    run, crashes = durable_store.connection.run, ["once"]

    async def die_before_the_end(name: str, *arguments: str | int | float | bytes) -> Any:
        if name == "reassert_done" and crashes:
            crashes.pop()
            come_back()
        return await run(name, *arguments)

    come_back()
    monkeypatch.setattr(durable_store.connection, "run", die_before_the_end)
    assertion = (mesh.trainer, 0, 1, [(1, [g.group_id for g in batch.groups])], [policy(0)], Cursor(index=3))
    with pytest.raises(StoreUnavailable, match="came back again"):
        await durable_store.training.reassert(*assertion)
    assert (await durable_store.training.reassert(*assertion)).trained_step == 1
    assert [g.group_id for g in (await durable_store.mesh.view()).ready] == ["e0-2"]


async def test_a_redis_that_comes_back_before_it_has_the_outcomes_of_a_batch_file_takes_them_with_the_file(
    durable_server: EmbeddedServer, durable_store: TrajectoryStore
) -> None:
    """Else it would take the groups, which it has as open, for ones that end again, and count them nowhere."""
    mesh = await Mesh.start(durable_store, session_ttl_seconds=TTL, keeps_history=True, groups=2)
    come_back = earlier_state(durable_server)
    await mesh.complete_all()
    await durable_store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    await durable_store.training.claim(mesh.trainer, 1, 1)
    outcomes = await durable_store.prompt_records.unsaved(mesh.trainer, 1)
    await durable_store.training.confirm_batch_file(mesh.trainer, 1, "digest")
    confirmed_by = await durable_store.recovery.server_run_id()
    come_back()
    with pytest.raises(StoreUnavailable, match="came back after the batch file"):
        await durable_store.prompt_records.save(mesh.trainer, 1, outcomes, confirmed_by)
    file = (1, ["e0-0", "e0-1"])
    await durable_store.training.reassert(mesh.trainer, 0, 0, [file], [policy(0)], Cursor(index=2), outcomes=[outcomes])
    await durable_store.prompt_records.save(mesh.trainer, 1, outcomes, await durable_store.recovery.server_run_id())
    records = await durable_store.prompt_records.read(["0", "1"])
    assert {prompt: record.groups for prompt, record in records.items()} == {"0": 1, "1": 1}
