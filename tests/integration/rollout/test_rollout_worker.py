"""The rollout service on a real queue, with generators and rewards that follow a script."""

import asyncio

import pytest

from ...kit.waiting import reached
from .replicas import running, schedule
from .scenes import check_batch, check_sampled_once, start, whole_mesh
from .scripted import ScriptedGenerator, ScriptedReward


async def paused(store):
    return (await store.leadership.desired()).paused


async def test_a_pause_parks_everything_and_the_resumed_run_loses_no_token(store):
    # Slow until all are at rest: however late the worker hears of the pause, answers are under way.
    generator = ScriptedGenerator("a", seconds_per_token=0.2)
    async with whole_mesh(store, generator) as run:
        await reached(lambda: run.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 20)
        await store.settings.set_user_paused(True)

        async def at_rest():
            return (await store.mesh.view()).leased == 0

        await reached(at_rest)
        assert (await store.mesh.view()).partial > 0
        # The queue has it a moment before the worker has counted it.
        await reached(lambda: run.value("rollmesh_rollout_trajectories_parked_total", reason="paused") > 0)
        generator.seconds_per_token = 0.001
        await store.settings.set_user_paused(False)
        check_batch(await run.trainer.train(1), run.plan)
        check_sampled_once(run)


async def is_at_rest(store):
    view = await store.mesh.view()
    return view.leased == 0 and view.pending > 0


async def pause_for(worker, store):
    """Pause the run, and wait until the worker has parked what it knows of."""
    await store.settings.set_user_paused(True)
    await reached(lambda: worker._desired.paused)


async def test_trajectories_leased_just_before_a_pause_come_to_rest_too(store, monkeypatch):
    """They are the queue's answer to a lease that was under way when the worker parked all others."""
    lease, leased_in_the_window = store.trajectories.lease, []

    async def lease_then_pause(*arguments):
        leased = await lease(*arguments)
        if leased and not leased_in_the_window:
            leased_in_the_window.extend(leased)
            await pause_for(run.replica._worker, store)
        return leased

    monkeypatch.setattr(store.trajectories, "lease", lease_then_pause)
    async with whole_mesh(store, ScriptedGenerator("a")) as run:
        parked = lambda: run.value("rollmesh_rollout_trajectories_parked_total", reason="paused")  # noqa: E731
        await reached(lambda: leased_in_the_window and (run.cluster.contexts or parked() == len(leased_in_the_window)))
        assert run.cluster.contexts == {}, "no generator was called in the pause"
        await reached(lambda: is_at_rest(store))
        await store.settings.set_user_paused(False)
        check_batch(await run.trainer.train(1), run.plan)


@pytest.mark.parametrize("stops", ["paused", "drained"])
async def test_a_fork_opened_just_before_a_pause_or_a_drain_comes_to_rest_too(store, monkeypatch, stops):
    fork, draining = store.trajectories.fork, []

    async def fork_then_stop(*arguments):
        answer = await fork(*arguments)
        if stops == "paused":
            await pause_for(run.replica._worker, store)
        else:
            draining.append(asyncio.create_task(run.stop()))
            await reached(run.replica._worker._draining.is_set)
        return answer

    monkeypatch.setattr(store.trajectories, "fork", fork_then_stop)
    async with whole_mesh(store, ScriptedGenerator("a", seconds_per_token=0.05), chunk=4, concurrency=4) as run:
        await reached(lambda: run.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 8)
        parent = next(held for held in run.session.trajectories.values() if not held.finished)
        answer = await run.replica._worker.fork(parent, "nonce")
        child = answer.leased.trajectory.trajectory_id
        await reached(lambda: child not in run.session.trajectories)
        await asyncio.gather(*draining)
        assert child not in run.cluster.contexts, "no generator was called for it"
        assert run.value("rollmesh_rollout_trajectories_parked_total", reason=stops) >= 1


async def test_a_fork_whose_session_is_registered_again_meanwhile_is_the_one_member_of_its_request(store, monkeypatch):
    fork, answers = store.trajectories.fork, []

    async def fork_then_register(*arguments):
        answers.append(await fork(*arguments))
        if len(answers) == 1:
            await store.sessions.close(run.session.current)
            await run.session.recover(run.session.current)
        return answers[-1]

    monkeypatch.setattr(store.trajectories, "fork", fork_then_register)
    async with whole_mesh(store, ScriptedGenerator("a", seconds_per_token=0.05), chunk=4, concurrency=4) as run:
        await reached(lambda: run.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 8)
        parent = next(held for held in run.session.trajectories.values() if not held.finished)
        answer = await run.replica._worker.fork(parent, "nonce")
        child = answer.leased.trajectory.trajectory_id
        assert {each.leased.trajectory.trajectory_id for each in answers} == {child} and len(answers) == 2
        assert child in run.session.trajectories
        assert (await store.mesh.counts()).totals["forks_total"] == 1


async def test_a_drained_worker_leaves_partials_that_another_one_finishes(store):
    async with whole_mesh(store, ScriptedGenerator("a", seconds_per_token=0.02)) as first:
        await reached(lambda: first.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 20)
        await first.stop()
        view = await store.mesh.view()
        assert view.leased == 0
        assert view.partial > 0
        async with running(store, first.cluster, ScriptedReward(), first.plan, index=1) as second:
            check_batch(await first.trainer.train(1), first.plan)
            assert second.value("rollmesh_rollout_leases_resumed_total") == view.partial
            sampled = sum(r.value("rollmesh_rollout_sampled_tokens_total", age="0") for r in (first, second))
    assert sampled == sum(len(t.response_ids) for g in first.trainer.batches[0].groups for t in g.trajectories)


async def test_two_replicas_share_the_pool_and_one_leads(store):
    plan = schedule("copris", train_steps=3)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", seconds_per_token=0.002))
    async with (
        running(store, cluster, ScriptedReward(), plan, concurrency=6) as one,
        running(store, cluster, ScriptedReward(), plan, index=1, concurrency=6) as two,
    ):
        for step in range(1, 4):
            check_batch(await trainer.train(step), plan)
            assert (await store.mesh.view()).leased <= plan.pool_size
        assert one.value("rollmesh_rollout_leader") + two.value("rollmesh_rollout_leader") == 1
        assert one.value("rollmesh_rollout_leases_total") > 0
        assert two.value("rollmesh_rollout_leases_total") > 0
