"""Leases and sessions of a worker come and go; none of its trajectories is forgotten or runs twice."""

import asyncio
from dataclasses import replace

import numpy as np

from rollmesh.config.store import StoreConfig
from rollmesh.errors import StoreUnavailable
from rollmesh.store import Append, TrajectoryStore, WriteStatus

from ...kit.records import policy_tokens
from ...kit.waiting import reached
from .replicas import running, schedule
from .scenes import all_groups, check_batch, check_sampled_once, start, whole_mesh
from .scripted import ScriptedGenerator, ScriptedReward, answer_of


async def test_a_trajectory_that_is_let_go_while_the_queue_counts_it_as_ours_is_leased_again(store, monkeypatch):
    """Or its group would never be complete: the session that holds it lives on and has forgotten it."""
    append, refused = store.trajectories.append, []

    async def refuse_once(session, items):
        results = await append(session, items)
        if not refused:
            refused.append(results[0].trajectory_id)
            return [replace(results[0], status=WriteStatus.REFUSED, saved_token_count=1 << 20), *results[1:]]
        return results

    monkeypatch.setattr(store.trajectories, "append", refuse_once)
    async with whole_mesh(store, ScriptedGenerator("a", seconds_per_token=0.001)) as run:
        check_batch(await run.trainer.train(1), run.plan)
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="taken_back") == 1
    assert refused


async def test_a_lease_that_no_task_works_on_is_noticed_and_leased_again(store, monkeypatch):
    """The queue counts it as leased by a live session: no other worker would ever lease it."""
    lease, forgotten = store.trajectories.lease, []

    async def lease_and_forget_one(*arguments):
        leased = await lease(*arguments)
        if leased and not forgotten:
            forgotten.append(leased.pop().trajectory.trajectory_id)
        return leased

    monkeypatch.setattr(store.trajectories, "lease", lease_and_forget_one)
    async with whole_mesh(store, ScriptedGenerator("a"), heartbeat=0.1) as run:
        check_batch(await run.trainer.train(1), run.plan)
    assert forgotten[0] in {t.trajectory_id for g in run.trainer.batches[0].groups for t in g.trajectories}
    assert (await store.mesh.counts()).totals["released_by_recovery_total"] == 1


async def test_a_busy_worker_that_has_forgotten_nothing_never_registers_again(store, monkeypatch):
    reregister, held_by, stated, compared = store.sessions.reregister, store.sessions.held_by, [], []

    async def noted(session, held, *worker):
        stated.append(len(held))
        return await reregister(session, held, *worker)

    async def looked(session):
        compared.append(session)
        return await held_by(session)

    monkeypatch.setattr(store.sessions, "reregister", noted)
    monkeypatch.setattr(store.sessions, "held_by", looked)
    async with whole_mesh(
        store, ScriptedGenerator("a", seconds_per_token=0.001), plan=schedule("copris", train_steps=6), heartbeat=0.05
    ) as run:
        for step in range(1, 7):
            check_batch(await run.trainer.train(step), run.plan)
        await reached(lambda: len(compared) >= 10)
    assert stated == []


async def test_trajectories_leased_in_the_moment_in_which_redis_stops_are_not_lost(store, monkeypatch):
    """The same server comes back, so no worker registers again."""
    lease, desired, away = store.trajectories.lease, store.leadership.desired, []

    async def lease_and_lose_redis(*arguments):
        leased = await lease(*arguments)
        if leased and not away:
            away.extend([True, True, True])
        return leased

    async def desired_once_it_is_back():
        if any(away):
            away[away.index(True)] = False
            raise StoreUnavailable("gone for a moment")
        return await desired()

    monkeypatch.setattr(store.trajectories, "lease", lease_and_lose_redis)
    monkeypatch.setattr(store.leadership, "desired", desired_once_it_is_back)
    async with whole_mesh(store, ScriptedGenerator("a")) as run:
        check_batch(await run.trainer.train(1), run.plan)
    assert away == [False, False, False]


async def test_tokens_are_never_joined_to_tokens_that_another_worker_has_saved(store):
    async with whole_mesh(store, ScriptedGenerator("a", seconds_per_token=0.03), chunk=16) as run:
        longest = await reached(lambda: next((i for i in run.session.trajectories if len(answer_of(i, 40)) > 20), None))
        ids, logprobs = answer_of(longest, 40)[:3], np.array([-0.5, -1.5, -2.5], np.float32)
        other = policy_tokens(ids, behavior_logprobs=logprobs)
        item = Append(trajectory_id=longest, token_offset=0, segments=[other])
        assert (await store.trajectories.append(run.session.current, [item]))[0].status is WriteStatus.SAVED
        batch = await run.trainer.train(1)
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="taken_back") == 1
    trajectory = next(t for g in batch.groups for t in g.trajectories if t.trajectory_id == longest)
    first, second = trajectory.segments[:2]
    assert first.behavior_logprobs.tolist() == logprobs.tolist()
    assert len(second) == 16, "the next call went on after what was saved"
    assert trajectory.response_ids.tolist() == answer_of(longest, 40)


async def test_a_worker_that_stalls_past_its_ttl_does_not_join_its_tokens_to_those_of_a_later_beginning(
    store, server, monkeypatch
):
    """A saves and stalls; B leases, begins again, saves fewer tokens and releases; then A wakes."""
    awake, open_session = asyncio.Event(), store.sessions.open
    awake.set()

    async def open_once_awake(*worker):
        await awake.wait()
        return await open_session(*worker)

    monkeypatch.setattr(store.sessions, "open", open_once_awake)
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", seconds_per_token=0.05))
    run_name = store.connection.keys.run
    async with (
        running(store, cluster, ScriptedReward(), plan, chunk=4) as run,
        await TrajectoryStore.connect(StoreConfig(), run=run_name, url=server.url) as b,
    ):
        session = run.session
        longest = await reached(
            lambda: next(
                (i for i, h in session.trajectories.items() if h.saved_token_count >= 8 and not h.finished), None
            )
        )
        awake.clear()
        await b.sessions.close(session.current)
        other = await b.sessions.open("B")
        await b.trajectories.lease(other, 64)
        assert (await b.trajectories.restart(other, [longest])) is not None
        first_save = Append(trajectory_id=longest, token_offset=0, segments=[policy_tokens([1, 2, 3])], incarnation=1)
        (result,) = await b.trajectories.append(other, [first_save])
        assert result.status is WriteStatus.SAVED
        await b.sessions.close(other)
        awake.set()
        batch = await trainer.train(1)
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="taken_back") == 1
    (trained,) = (t for g in batch.groups for t in g.trajectories if t.trajectory_id == longest)
    assert trained.response_ids[:3].tolist() == [1, 2, 3]
    assert [1, 2, 3] in [ids[:3] for ids in cluster.contexts[longest]], "the rest was sampled after those very tokens"


async def test_a_refusal_that_comes_after_the_session_was_replaced_does_not_cost_the_new_one(store, monkeypatch):
    """Otherwise every lease would wait for a session that no worker renews to expire."""
    lease, refused = store.trajectories.lease, []

    async def refused_late(session, *arguments):
        if not refused and run.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 24:
            refused.append(session)
            await store.sessions.close(session)
            await reached(lambda: run.session.current != session)
        return await lease(session, *arguments)

    monkeypatch.setattr(store.trajectories, "lease", refused_late)
    async with whole_mesh(store, ScriptedGenerator("a", seconds_per_token=0.05), chunk=4) as run:
        check_batch(await run.trainer.train(1), run.plan)
        assert refused
        assert run.value("rollmesh_rollout_sessions_lost_total") == 1
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="taken_back") == 0
        check_sampled_once(run)


async def test_no_trajectory_runs_twice_while_a_lost_session_is_replaced(store, monkeypatch):
    """The new session may lease only once it has taken along what is running here."""
    reregister, slowly = store.sessions.reregister, []

    async def reregister_slowly(session, held, *worker):
        slowly.append(len(held))
        await asyncio.sleep(0.8)
        return await reregister(session, held, *worker)

    monkeypatch.setattr(store.sessions, "reregister", reregister_slowly)
    async with whole_mesh(store, ScriptedGenerator("a", seconds_per_token=0.05), chunk=4) as run:
        await reached(lambda: run.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 24)
        await store.sessions.close(run.session.current)
        check_batch(await run.trainer.train(1), run.plan)
        assert run.value("rollmesh_rollout_leases_total") == run.plan.pool_size
        check_sampled_once(run)
    assert slowly[0] > 0


async def test_saves_continue_while_everything_is_registered_with_a_restarted_server(store, monkeypatch):
    reregister, saves = store.sessions.reregister, []

    async def saved():
        return (await store.mesh.counts()).totals["saved_tokens_total"]

    def more_than(before):
        async def count():
            now = await saved()
            return now if now > before else None

        return count

    async def answer_late(session, held, *worker):
        answers = await reregister(session, held, *worker)
        before = await saved()
        saves.append(await reached(more_than(before)) - before)
        generator.seconds_per_token = 0.005
        return answers

    monkeypatch.setattr(store.sessions, "reregister", answer_late)
    # Slow until a save is seen: however late Redis registers everything, some tokens come after that.
    generator = ScriptedGenerator("a", seconds_per_token=0.2)
    async with whole_mesh(store, generator, chunk=4) as run:
        await reached(lambda: run.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 24)
        await run.session.recover(run.session.current, "another server")
        check_batch(await run.trainer.train(1), run.plan)
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="taken_back") == 0
        check_sampled_once(run)
    assert saves[0] > 0


async def test_a_lease_whose_answer_comes_after_everything_was_registered_again_costs_no_tokens(store, monkeypatch):
    """The registration did not name its trajectories, so the queue has taken them back: they are leased again."""
    lease, late = store.trajectories.lease, []

    async def lease_late(session, *arguments):
        leased = await lease(session, *arguments)
        if leased and not late:
            late.append(len(leased))
            await run.session.recover(session, "another server")
        return leased

    monkeypatch.setattr(store.trajectories, "lease", lease_late)
    async with whole_mesh(store, ScriptedGenerator("a", seconds_per_token=0.01), chunk=4) as run:
        check_batch(await run.trainer.train(1), run.plan)
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="taken_back") == 0
        check_sampled_once(run)
    assert late == [run.plan.pool_size]


async def test_a_killed_redis_costs_time_and_nothing_else(durable_server):
    plan = schedule("sync", train_steps=2)
    async with await TrajectoryStore.connect(
        StoreConfig(), run="killed", url=durable_server.url, retry_seconds=1
    ) as store:
        generator = ScriptedGenerator("a", seconds_per_token=0.02)
        cluster, trainer = await start(store, plan, generator, session_ttl_seconds=5.0)
        async with running(store, cluster, ScriptedReward(), plan, chunk=4) as run:
            await reached(lambda: run.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 40)
            durable_server.kill()
            await asyncio.sleep(2)
            await asyncio.to_thread(durable_server.start)
            for step in (1, 2):
                check_batch(await trainer.train(step), plan)
            assert len(set(all_groups(trainer))) == 4
            sampled = sum(run.value("rollmesh_rollout_sampled_tokens_total", age=str(age)) for age in range(3))
        tokens = sum(len(t.response_ids) for b in trainer.batches for g in b.groups for t in g.trajectories)
        assert sampled == tokens
