"""What an environment says before the first turn is in the context, never in the loss, and said once."""

import pytest

from rollmesh.tasks.environments.environment_protocol import EnvironmentReply
from rollmesh.types import FinishReason, SegmentSource

from ...kit.waiting import reached
from .environment_episodes import (
    REPLY,
    TURN,
    CountingEnvironment,
    ForgetfulEnvironment,
    SnapshottingEnvironment,
    program_of,
)
from .replicas import running
from .scenes import members, whole_mesh
from .scripted import ScriptedGenerator, ScriptedReward

FIRST = EnvironmentReply(text=REPLY, done=False, reward=-1.0)


def speaking(kind, first=FIRST):
    class Speaking(kind):
        async def reset(self, prompt):
            await super().reset(prompt)
            return first

    return Speaking


def check_spoken(batch):
    for trajectory in members(batch):
        assert trajectory.response_ids.tolist()[:2] == [8, 9]
        sources = [segment.source for segment in trajectory.segments]
        assert sources[0] is SegmentSource.ENVIRONMENT and sources[1] is SegmentSource.POLICY
        assert sum(len(s) for s in trajectory.segments if s.source is SegmentSource.ENVIRONMENT) == 6
        assert trajectory.segments[0].policy_version == 0
        assert trajectory.finish_reason is FinishReason.ENVIRONMENT


@pytest.mark.parametrize("kind", [CountingEnvironment, ForgetfulEnvironment, SnapshottingEnvironment])
async def test_the_first_words_of_an_environment_come_before_the_first_turn_once(store, tokenizer, kind):
    log = []
    made = program_of(speaking(kind), tokenizer, log)
    slow = ScriptedGenerator("a", stop_every=TURN, seconds_per_token=0.02)
    async with whole_mesh(store, slow, program=made, chunk=4) as first:
        await reached(lambda: len(log) >= 6)
        await first.stop()  # half of the episodes continue in another worker
        async with running(store, first.cluster, ScriptedReward(), first.plan, index=1, program=made, chunk=4):
            check_spoken(await first.trainer.train(1))


async def test_the_reward_of_the_first_words_is_that_of_an_episode_without_a_turn(store, tokenizer):
    reward = ScriptedReward()
    made = program_of(speaking(CountingEnvironment), tokenizer, [])
    generator = ScriptedGenerator("a", stop_every=1000)
    async with whole_mesh(store, generator, program=made, reward=reward, budget=TURN) as run:
        batch = await run.trainer.train(1)
    assert {(t.finish_reason, t.shaped_reward) for t in members(batch)} == {(FinishReason.LENGTH, -1.0)}
    assert reward.batches == []


class TalksTooMuch(CountingEnvironment):
    async def step(self, response_text, idempotency_key):
        return EnvironmentReply(text="w8 " * 10_000_000, done=False, reward=2.0)


async def test_a_reply_of_megabytes_is_not_even_tokenized_and_ends_the_episode(store, tokenizer):
    async with whole_mesh(
        store, ScriptedGenerator("a", stop_every=TURN), program=program_of(TalksTooMuch, tokenizer, [])
    ) as run:
        batch = await run.trainer.train(1)
    assert {(t.finish_reason, len(t.response_ids), t.shaped_reward) for t in members(batch)} == {
        (FinishReason.LENGTH, TURN, 2.0)
    }


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (EnvironmentReply(text="w8 " * 100, done=False), "leaves no room for an answer: raise rollout.max_new_tokens"),
        (EnvironmentReply(text="", done=True), "max_attempts"),
        ("hello", "max_attempts"),
    ],
)
async def test_first_words_after_which_no_turn_can_be_sampled_end_as_a_dead_letter(store, tokenizer, first, reason):
    made = program_of(speaking(CountingEnvironment, first), tokenizer, [])
    async with whole_mesh(store, ScriptedGenerator("a", stop_every=TURN), program=made):
        letter = (await reached(store.dead_letters.newest))[0]
    assert reason in letter.reason
