"""Rollouts whose generators die, hang, send invalid answers or change their weights, on a real queue."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from rollmesh.errors import EngineError
from rollmesh.types import FinishReason

from ...kit.waiting import reached
from .replicas import running, schedule
from .scenes import check_batch, start, whole_mesh
from .scripted import ScriptedGenerator, ScriptedReward


def wrong_version(chunk):
    return replace(chunk, policy_version=chunk.policy_version + 7, kv_min_version=0)


def not_a_number(chunk):
    return replace(chunk, behavior_logprobs=np.full_like(chunk.behavior_logprobs, np.nan))


def outside_the_vocabulary(chunk):
    return replace(chunk, token_ids=chunk.token_ids + 1000)


def early_end(chunk):
    return replace(chunk, finish_reason=FinishReason.LENGTH)


class PoisonedGenerator(ScriptedGenerator):
    """Breaks whenever it is given one trajectory."""

    async def generate(self, call):
        if call.trajectory_id == "e0-0.0":
            raise EngineError("the kernel died")
        async for chunk in super().generate(call):
            yield chunk


@dataclass
class StopsOnOne(ScriptedGenerator):
    """Stops every call after its first chunk of version 1, until the generator dies."""

    died: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: dict[str, int] = field(default_factory=dict)
    """Tokens of the context with that chunk, by trajectory."""

    async def generate(self, call):
        context_tokens = len(call.context_ids)
        async for chunk in super().generate(call):
            yield chunk
            context_tokens += len(chunk.token_ids)
            if chunk.policy_version == 1 and chunk.finish_reason is None:
                self.stopped[call.trajectory_id] = context_tokens
                await self.died.wait()

    def die(self):
        self.dead = True
        self.died.set()


class PassingOver(ScriptedGenerator):
    """Loads no version until it is wanted."""

    wanted = False

    def load(self, version):
        if self.wanted:
            super().load(version)


async def test_a_generator_that_dies_hands_its_trajectories_to_another_from_the_last_chunk(store):
    dying = ScriptedGenerator("dying", seconds_per_token=0.01)
    async with whole_mesh(store, dying, ScriptedGenerator("other", seconds_per_token=0.005)) as run:
        await reached(lambda: len(dying.running) >= 2)
        dying.dead = True
        check_batch(await run.trainer.train(1), run.plan)
        assert run.value("rollmesh_rollout_calls_ended_total", reason="broken") >= 1
    assert run.cluster.generators["other"].calls > 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (wrong_version, "version"),
        (not_a_number, "logprob"),
        (outside_the_vocabulary, "token_id"),
        (early_end, "finish_reason"),
    ],
)
async def test_a_generator_that_answers_nonsense_is_avoided_and_nothing_of_it_is_kept(store, fault, reason):
    bad = ScriptedGenerator("bad", fault=fault)
    async with whole_mesh(store, bad, ScriptedGenerator("good", seconds_per_token=0.001)) as run:
        check_batch(await run.trainer.train(1), run.plan)
        assert run.value("rollmesh_rollout_calls_ended_total", reason=reason) >= 1
    assert bad.calls <= run.plan.pool_size


async def test_a_generator_that_hangs_is_given_up_after_the_chunk_timeout(store):
    async with whole_mesh(
        store, ScriptedGenerator("hangs", hang=True), ScriptedGenerator("works"), chunk_timeout=0.3
    ) as run:
        check_batch(await run.trainer.train(1), run.plan)
        assert run.value("rollmesh_rollout_calls_ended_total", reason="hung") >= 1


async def test_a_trajectory_that_breaks_every_generator_ends_as_a_dead_letter(store, monkeypatch):
    monkeypatch.setattr("rollmesh.worker.generation_calls.MOST_FAILED_CALLS", 3)
    monkeypatch.setattr("rollmesh.worker.generation_calls.GARBAGE_AVOID_SECONDS", 0.01)
    monkeypatch.setattr("rollmesh.worker.generator_pool.LONGEST_AVOID_SECONDS", 0.02)
    async with whole_mesh(store, PoisonedGenerator("a"), PoisonedGenerator("b"), max_attempts=2) as run:
        check_batch(await run.trainer.train(1), run.plan)
    letters = await store.dead_letters.newest()
    assert [(letter.trajectory_id, letter.attempts) for letter in letters] == [("e0-0.0", 2)]


async def test_a_trajectory_never_goes_back_to_an_older_version(store):
    """The new trajectories of sync need the newest policy: a generator that stays behind gets none of them."""
    slow = ScriptedGenerator("behind")
    async with whole_mesh(store, slow, ScriptedGenerator("current", seconds_per_token=0.001), steps=2) as run:
        check_batch(await run.trainer.train(1), run.plan)
        slow.version = 0
        calls = slow.calls
        await run.cluster.register()
        batch = await run.trainer.train(2)
        check_batch(batch, run.plan)
        assert {v for g in batch.groups for t in g.trajectories for v in t.policy_versions} == {1}
        assert slow.calls == calls


async def test_tokens_of_a_version_that_died_with_its_generator_are_continued_once_another_one_has_loaded_it(store):
    """The one left passes over versions (reload_every_versions): the worker asks for the version that it needs."""
    plan = schedule("copris", train_steps=8)
    behind, ahead = PassingOver("behind"), StopsOnOne("ahead", slots=64)
    cluster, trainer = await start(store, plan, behind, ahead)

    async def required() -> int:
        await cluster.register()
        value = await store.connection.command("HGET", store.connection.keys.single("desired"), "required_version")
        return int(value or 0)

    def saved() -> bool:
        """Tell whether tokens of version 1, which only one generator serves, are saved."""
        return any(cluster.acknowledged.get(i, 0) >= tokens for i, tokens in ahead.stopped.items())

    async with running(store, cluster, ScriptedReward(), plan):
        check_batch(await trainer.train(1), plan)
        await reached(saved)
        assert (behind.version, ahead.version, await required()) == (0, 1, 0)
        ahead.die()
        assert await reached(required) == 1
        behind.wanted = True
        behind.load(1)
        for step in range(2, 5):
            check_batch(await trainer.train(step), plan)


async def test_versions_swapped_under_running_calls_continue_the_same_call(store):
    generators = [ScriptedGenerator(name, seconds_per_token=0.01, keep_kv=True) for name in ("a", "b")]
    async with whole_mesh(store, *generators, plan=schedule("copris", train_steps=4)) as run:
        for step in range(1, 5):
            check_batch(await run.trainer.train(step), run.plan)
        assert run.value("rollmesh_rollout_calls_ended_total", reason="interrupted") == 0
    spans = [len(t.policy_versions) for b in run.trainer.batches for g in b.groups for t in g.trajectories]
    assert max(spans) > 1


async def test_a_generator_that_ignores_the_interrupt_is_cut_off_and_the_pause_happens(store):
    stuck = ScriptedGenerator("stuck", hang=True)
    async with whole_mesh(store, stuck, grace=0.5) as run:
        await reached(lambda: len(stuck.running) == run.plan.pool_size)
        await store.settings.set_user_paused(True)

        async def at_rest():
            return (await store.mesh.view()).leased == 0

        await reached(at_rest)
        assert run.value("rollmesh_rollout_calls_ended_total", reason="cut_off") == run.plan.pool_size
        stuck.hang = False
        await store.settings.set_user_paused(False)
        check_batch(await run.trainer.train(1), run.plan)
