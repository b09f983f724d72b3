"""Evaluations by the rollout service: one pinned version, outside of the pool."""

import asyncio

import pytest
from structlog.testing import capture_logs

from rollmesh.config.rollout import EvalConfig
from rollmesh.errors import DataError
from rollmesh.store.queue_types import EvalRequest

from ...kit.waiting import reached
from .replicas import running, schedule
from .scenes import start, whole_mesh
from .scripted import ScriptedGenerator, ScriptedPrompts, ScriptedReward


async def evaluated(store, evaluation_id):
    return any(r.request.evaluation_id == evaluation_id and r.result for r in await store.evaluations.all())


async def claimed(store):
    return (await store.evaluations.all())[0].claimed


async def first_result(store):
    return (await store.evaluations.all())[0].result


def finished(replica, count):
    """The result is in the queue before the worker counts it."""
    return replica.value("rollmesh_rollout_evaluations_total") == count


async def test_an_evaluation_counts_only_answers_of_the_pinned_version_and_leaves_the_pool_alone(store):
    await store.settings.set_user_paused(True)
    config = EvalConfig(prompt_count=12, samples_per_prompt=2)
    async with whole_mesh(store, ScriptedGenerator("a", seconds_per_token=0.001), evaluation=config) as run:
        request = EvalRequest(evaluation_id="v0", policy_version=0, prompt_count=12, samples_per_prompt=2)
        await store.evaluations.request(request)

        done = await reached(lambda: first_result(store))
        assert (done.sample_count, done.discarded_count) == (24, 0)
        assert done.mean == pytest.approx(0.5)
        assert done.standard_error == 0, "each of the 12 prompts has one right answer of two"
        assert (await store.mesh.view()).leased == 0
        assert await store.policies.pinned() is None
    assert run.trainer.batches == []


async def test_an_evaluation_waits_for_the_pin_of_a_person_and_takes_back_only_its_own(store):
    async with whole_mesh(store, ScriptedGenerator("a"), steps=2) as run:
        await run.trainer.train(1)
        await store.policies.pin(0)
        await store.evaluations.request(EvalRequest(evaluation_id="v1", policy_version=1, prompt_count=2))

        await reached(lambda: claimed(store))
        assert await store.policies.pinned() == 0
        await store.policies.pin(None)
        assert (await reached(lambda: first_result(store))).sample_count == 2
        assert await store.policies.pinned() is None
        await store.policies.pin(1)
        await store.evaluations.request(EvalRequest(evaluation_id="again", policy_version=1, prompt_count=2))
        await reached(lambda: evaluated(store, "again"))
        assert await store.policies.pinned() == 1


async def test_an_evaluation_with_other_rows_than_those_of_the_run_is_refused(store):
    """The file was changed between two starts: the evaluations of one run would have different prompts."""
    plan = schedule("sync", train_steps=1)
    cluster, _ = await start(store, plan, ScriptedGenerator("a"))
    assert await store.leadership.record_content("data.source", "") == ""
    await store.evaluations.request(EvalRequest(evaluation_id="v0", policy_version=0, prompt_count=2))
    prompts = ScriptedPrompts()
    prompts.content = "47 rows bb"
    with pytest.raises(DataError, match="data.source: the files have changed since the run began: .* 47 rows bb now"):
        async with running(store, cluster, ScriptedReward(), plan, prompts=prompts) as replica:
            while not replica.task.done():
                await cluster.register()
                await asyncio.sleep(0)
    assert (await store.evaluations.all())[0].result is None


async def test_an_evaluation_of_a_version_that_does_not_exist_ends_without_scores(store):
    async with whole_mesh(store, ScriptedGenerator("a")) as replica:
        await store.evaluations.request(EvalRequest(evaluation_id="v9", policy_version=9, prompt_count=2))
        await reached(lambda: evaluated(store, "v9"))
        await reached(lambda: finished(replica, 1))
        assert replica.value("rollmesh_rollout_evaluations_given_up_total") == 1
    assert (await store.evaluations.all())[0].result.sample_count == 0


async def test_an_evaluation_that_no_generator_can_serve_is_given_up_and_the_next_one_is_done(store):
    # The generator never goes back to an older version.
    async with whole_mesh(store, ScriptedGenerator("a"), steps=2, unserved_seconds=0.3) as replica:
        await replica.trainer.train(1)
        for version in (0, 1):
            await store.evaluations.request(
                EvalRequest(evaluation_id=f"v{version}", policy_version=version, prompt_count=2)
            )

        async def results():
            found = [r.result for r in await store.evaluations.all()]
            return found if all(found) else None

        given_up, done = await reached(results)
        assert (given_up.sample_count, done.sample_count) == (0, 2)
        assert await store.policies.pinned() is None
        await reached(lambda: finished(replica, 2))
        assert replica.value("rollmesh_rollout_evaluations_given_up_total") == 1


async def test_an_evaluation_of_a_version_that_the_generators_refuse_is_given_up_at_once_with_the_reason(store):
    refusing = ScriptedGenerator("a", refuses=0)
    with capture_logs() as lines:
        async with whole_mesh(store, refusing, steps=2, unserved_seconds=3600.0) as replica:
            await replica.trainer.train(1)
            await store.evaluations.request(EvalRequest(evaluation_id="v0", policy_version=0, prompt_count=2))
            assert (await reached(lambda: first_result(store))).sample_count == 0
    (given_up,) = [line for line in lines if line["event"] == "evaluation_given_up"]
    assert given_up["message"] == "every generator that should serve it refuses it: canary: nan"
