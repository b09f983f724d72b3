"""Multi-turn rollouts on a real queue, with a real tokenizer and environments written for the test."""

import asyncio
import json
import time
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from rollmesh.errors import DataError
from rollmesh.mesh import Cursor, Desired
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.metrics import Metrics
from rollmesh.store.queue_types import EvalRequest, Finish, NewGroup
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, OutcomeKind, Prompt, SamplingParams, Segment, SegmentSource, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.programs import RolloutContext
from rollmesh.worker.programs.environment import EnvironmentProgram
from rollmesh.worker.programs.snapshots import LARGEST_STATE_BYTES, Snapshot

from .replicas import limits, running, schedule
from .scripted import STOP, VOCAB, ScriptedCluster, ScriptedGenerator, ScriptedReward, ScriptedTrainer, token_at
from .waiting import until

TURN = 6
REPLY = "w8 w9"


class CountingEnvironment:
    """Ends after three turns; its reward is the number of words that it was told."""

    replayable = True

    def __init__(self, log):
        self.log = log
        self.turns = []
        self.open = True

    async def reset(self, prompt):
        self.prompt = prompt

    async def step(self, response_text, idempotency_key):
        self.turns.append(response_text)
        self.log.append(idempotency_key)
        if len(self.turns) == 3:
            words = sum(len(t.split()) for t in self.turns)
            return EnvironmentReply(text="", done=True, reward=float(words))
        return EnvironmentReply(text=REPLY, done=False)

    async def aclose(self):
        self.open = False


class ForgetfulEnvironment(CountingEnvironment):
    replayable = False


class HangingEnvironment(CountingEnvironment):
    async def step(self, response_text, idempotency_key):
        await asyncio.sleep(3600)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    RawTokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    raw.pre_tokenizer = WhitespaceSplit()
    raw.add_special_tokens([f"w{STOP}"])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": STOP}))
    return Tokenizer(folder)


def program_of(kind, tokenizer, log, *, timeout=60.0, max_turns=8):
    return EnvironmentProgram(
        lambda: kind(log),
        tokenizer,
        stop_token_ids=(STOP,),
        max_turns=max_turns,
        timeout_seconds=timeout,
        metrics=RolloutMetrics(Metrics("rollout")),
    )


async def start(store, plan, generator):
    await store.limits.init_run(limits(plan))
    cluster = ScriptedCluster(store, [generator])
    trainer = ScriptedTrainer(store, cluster)
    await trainer.start()
    return cluster, trainer


def expected_episode(trajectory_id):
    """Three turns of the policy, each up to the next multiple of TURN, with two words in between."""
    written = []
    for turn in range(3):
        end = len(written) - len(written) % TURN + TURN
        written += [(token_at(trajectory_id, i), True) for i in range(len(written), end - 1)] + [(STOP, True)]
        if turn < 2:
            written += [(8, False), (9, False)]
    return written


def check(batch):
    for group in batch.groups:
        for trajectory in group.trajectories:
            expected = expected_episode(trajectory.trajectory_id)
            assert trajectory.response_ids.tolist() == [token for token, _ in expected]
            for segment in trajectory.segments:
                assert (segment.behavior_logprobs is None) == (segment.source is SegmentSource.ENVIRONMENT)
            sources = np.concatenate([[s.source is SegmentSource.POLICY] * len(s) for s in trajectory.segments])
            assert sources.tolist() == [own for _, own in expected]
            assert trajectory.finish_reason is FinishReason.ENVIRONMENT
            words = sum(own and token != STOP for token, own in expected)
            assert trajectory.outcome.kind is OutcomeKind.SCORED
            assert trajectory.shaped_reward == words


async def test_turns_alternate_and_the_environments_reward_counts(store, tokenizer):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", stop_every=TURN))
    log, reward = [], ScriptedReward()
    async with running(store, cluster, reward, plan, program=program_of(CountingEnvironment, tokenizer, log), chunk=4):
        check(await trainer.train(1))
    assert reward.batches == []
    ids = {key.rpartition(":")[0] for key in log}
    assert sorted(log) == sorted(f"{i}:{turn}" for i in ids for turn in range(3))


class GatedEnvironment(CountingEnvironment):
    """Ends after one turn; it lasts until the gate opens in the first group, and until both its members are there in
    the others."""

    gate: asyncio.Event
    first: list[str]

    async def step(self, response_text, idempotency_key):
        if self.prompt.metadata["index"] == 0:
            self.first.append(idempotency_key)
            await self.gate.wait()
        while len(self.first) < 2:
            await asyncio.sleep(0.01)
        return EnvironmentReply(text="", done=True, reward=float(idempotency_key[-3] == "1"))


@pytest.mark.parametrize(("replayable", "chunk"), [(False, 4), (False, 8), (True, 8)])
async def test_pace_waits_for_a_group_whose_tokens_are_not_saved_before_the_end(store, tokenizer, replayable, chunk):
    """Staleness bound 1, batches of one group: one whose first token is of step 0 must be in batch 2."""
    gate = asyncio.Event()
    kind = type("Gated", (GatedEnvironment,), {"gate": gate, "first": [], "replayable": replayable})
    plan = schedule("areal", train_steps=3, groups_per_batch=1, group_size=2, max_staleness=1, pool_size=4)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", stop_every=TURN))

    async def second_cut_is_decided():
        seen = await store.mesh.view()
        return seen.cut_step == 2 or seen.blocked_since is not None

    async with running(store, cluster, ScriptedReward(), plan, program=program_of(kind, tokenizer, []), chunk=chunk):
        assert [g.group_id for g in (await trainer.train(1)).groups] == ["e0-1"]
        await until(second_cut_is_decided)
        assert (await store.mesh.view()).cut_step == 1
        gate.set()
        batch = await trainer.train(2)
        assert [g.group_id for g in batch.groups] == ["e0-0"]
        assert {t.segments[0].policy_version for t in batch.groups[0].trajectories} == {0}
    assert "stale" not in (await store.mesh.counts()).drops


async def test_a_replayable_environment_is_played_again_after_a_lost_worker(store, tokenizer):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", stop_every=TURN, seconds_per_token=0.02))
    log = []
    program = program_of(CountingEnvironment, tokenizer, log)
    async with running(store, cluster, ScriptedReward(), plan, program=program, chunk=4) as first:
        await until(lambda: len(log) >= 10)
        await first.stop()
        async with running(store, cluster, ScriptedReward(), plan, index=1, program=program, chunk=4):
            check(await trainer.train(1))
    assert len(log) > 3 * plan.pool_size, "finished turns were played again to a fresh environment"


async def test_an_environment_that_cannot_be_replayed_starts_over_without_a_trace(store, tokenizer):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", stop_every=TURN, seconds_per_token=0.02))
    log = []
    program = program_of(ForgetfulEnvironment, tokenizer, log)
    async with running(store, cluster, ScriptedReward(), plan, program=program, chunk=4) as first:
        await until(lambda: len(log) >= 10)
        await first.stop()
        view = await store.mesh.view()
        assert (view.leased, view.partial) == (0, 0)
        async with running(store, cluster, ScriptedReward(), plan, index=1, program=program, chunk=4):
            check(await trainer.train(1))


class SnapshottingEnvironment(ForgetfulEnvironment):
    def snapshot(self):
        return json.dumps(self.turns).encode()

    def restore(self, state):
        self.turns = json.loads(state)


async def test_an_environment_with_snapshots_continues_in_another_worker(store, tokenizer):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", stop_every=TURN, seconds_per_token=0.02))
    log = []
    program = program_of(SnapshottingEnvironment, tokenizer, log)
    async with running(store, cluster, ScriptedReward(), plan, program=program, chunk=4) as first:
        await until(lambda: len(log) >= 10)
        await first.stop()
        assert (await store.mesh.view()).partial > 0
        async with running(store, cluster, ScriptedReward(), plan, index=1, program=program, chunk=4):
            check(await trainer.train(1))
    assert len(log) == len(set(log)) == 3 * plan.pool_size, "no turn was played twice"


def policy_turn(number):
    ids = np.array([10 + number, STOP], np.int32)
    return Segment(token_ids=ids, behavior_logprobs=-np.ones(2, np.float32), policy_version=0, kv_min_version=0)


ENVIRONMENT_REPLY = replace(
    policy_turn(0), token_ids=np.array([8, 9], np.int32), behavior_logprobs=None, source=SegmentSource.ENVIRONMENT
)


class TurnCaller:
    """Writes one more turn at every call."""

    async def sample(self, held, budget, params, *, save, durable):
        held.add(policy_turn(5))
        return FinishReason.STOP


def kept(turns, reply=REPLY):
    state = json.dumps([f"turn {n}" for n in range(turns)]).encode()
    reply = EnvironmentReply(text=reply, done=False)
    return Snapshot(turn_count=turns, reply=reply, reward=None, state=state).to_bytes()


@pytest.mark.parametrize(
    ("segments", "snapshot", "played"),
    [
        # The worker died after a turn was saved and before it was played, after that, and after the reply was saved.
        ([policy_turn(0), ENVIRONMENT_REPLY, policy_turn(1)], kept(1), [1, 2]),
        ([policy_turn(0), ENVIRONMENT_REPLY, policy_turn(1)], kept(2), [2]),
        ([policy_turn(0), ENVIRONMENT_REPLY, policy_turn(1), ENVIRONMENT_REPLY], kept(2), [2]),
        # Redis has lost the snapshot of a turn whose reply the tokens hold, or all of them: it begins again.
        ([policy_turn(0), ENVIRONMENT_REPLY, policy_turn(1), ENVIRONMENT_REPLY], kept(1), [0, 1, 2]),
        ([policy_turn(0)], None, [0, 1, 2]),
    ],
)
async def test_a_snapshot_covers_whatever_the_worker_left(tokenizer, segments, snapshot, played):
    prompt = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), verifier="exact")
    trajectory = Trajectory(
        trajectory_id="e0-0.0", group_id="e0-0", member_index=0, prompt=prompt, segments=tuple(segments)
    )
    held, log, snapshots = ActiveTrajectory(trajectory, snapshot=snapshot), [], []

    async def save(_held):
        pass

    async def restart(held):
        held.restart()

    async def keep(held, data):
        snapshots.append(Snapshot.from_bytes(data).turn_count)

    rollout = RolloutContext(
        active=held,
        caller=TurnCaller(),
        params=SamplingParams(stop_token_ids=(STOP,)),
        budget=100,
        save=save,
        report_first_token=save,
        restart=restart,
        keep_snapshot=keep,
    )
    ending = await program_of(SnapshottingEnvironment, tokenizer, log).run(rollout)
    assert log == [f"e0-0.0:{turn}" for turn in played]
    assert snapshots == [turn + 1 for turn in played]
    assert ending.reason is FinishReason.ENVIRONMENT
    sources = [segment.source for segment in held.segments]
    assert sources == [SegmentSource.POLICY, SegmentSource.ENVIRONMENT] * 2 + [SegmentSource.POLICY]


async def test_the_reward_of_an_episode_survives_the_worker_in_its_snapshot(tokenizer):
    prompt = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), verifier="exact")
    trajectory = Trajectory(
        trajectory_id="e0-0.0", group_id="e0-0", member_index=0, prompt=prompt, segments=(policy_turn(0),)
    )
    program = program_of(SnapshottingEnvironment, tokenizer, [])
    reply = EnvironmentReply(text="", done=True, reward=3.0)
    last = Snapshot(turn_count=1, reply=reply, reward=3.0, state=b"[]").to_bytes()
    assert (await program.outcome_of(trajectory, last)).value == 3.0
    for missing in (None, kept(0)):
        assert (await program.outcome_of(trajectory, missing)).kind is OutcomeKind.VERIFIER_ERROR


def test_a_snapshot_comes_back_as_it_was_and_a_huge_one_is_refused():
    reply = EnvironmentReply(text="w8", done=False, reward=0.5)
    snapshot = Snapshot(turn_count=2, reply=reply, reward=0.5, state=b"\x00\xff")
    assert Snapshot.from_bytes(snapshot.to_bytes()) == snapshot
    with pytest.raises(DataError, match="the limit is"):
        replace(snapshot, state=bytes(LARGEST_STATE_BYTES + 1)).to_bytes()
    with pytest.raises(DataError, match="not a snapshot"):
        Snapshot.from_bytes(b"{}")


async def test_an_environment_that_hangs_ends_as_a_dead_letter_after_the_last_attempt(store, tokenizer):
    plan = schedule("sync", train_steps=1)
    cluster, _ = await start(store, plan, ScriptedGenerator("a", stop_every=TURN))
    program = program_of(HangingEnvironment, tokenizer, [], timeout=0.05)
    async with running(store, cluster, ScriptedReward(), plan, program=program) as run:

        async def letters():
            await cluster.register()
            return await store.dead_letters.newest()

        letter = (await until(letters))[0]
        assert letter.reason == "max_attempts"
        assert letter.attempts >= 3
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="failed") >= 3


class BrokenToolEnvironment(SnapshottingEnvironment):
    async def step(self, response_text, idempotency_key):
        self.log.append(idempotency_key)
        raise ValueError("the tool is broken")


async def test_an_environment_with_snapshots_that_fails_at_its_first_turn_ends_as_a_dead_letter(store, tokenizer):
    plan = schedule("sync", train_steps=1)
    cluster, _ = await start(store, plan, ScriptedGenerator("a", stop_every=TURN))
    log = []
    program = program_of(BrokenToolEnvironment, tokenizer, log)
    async with running(store, cluster, ScriptedReward(), plan, program=program, chunk=4):
        letter = (await until(store.dead_letters.newest))[0]
    assert letter.reason == "max_attempts"
    assert log.count(f"{letter.trajectory_id}:0") == 4, "the first attempt, then three without progress"


async def test_turns_run_out(store, tokenizer):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", stop_every=TURN))
    program = program_of(CountingEnvironment, tokenizer, [], max_turns=2)
    async with running(store, cluster, ScriptedReward(), plan, program=program):
        batch = await trainer.train(1)
    for group in batch.groups:
        for trajectory in group.trajectories:
            assert trajectory.finish_reason is FinishReason.LENGTH
            assert trajectory.response_ids.tolist().count(STOP) == 2


class OutageEnvironment(CountingEnvironment):
    """Fails at once until what it stands on is back: some time after it was missed first."""

    def __init__(self, log, missed):
        super().__init__(log)
        self.missed = missed

    async def step(self, response_text, idempotency_key):
        now = time.monotonic()
        if now < self.missed.setdefault("first", now) + 1.5:
            raise ConnectionError("the tool server is down")
        return await super().step(response_text, idempotency_key)


async def test_a_short_outage_of_an_environment_does_not_use_up_the_attempts(store, tokenizer):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", stop_every=TURN))
    missed = {}
    program = program_of(lambda log: OutageEnvironment(log, missed), tokenizer, [])
    async with running(store, cluster, ScriptedReward(), plan, program=program, first_pause=1.0) as run:
        check(await trainer.train(1))
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="failed") >= 1
    assert await store.dead_letters.newest() == []


class UnclosableEnvironment(CountingEnvironment):
    async def aclose(self):
        raise OSError("already gone")


async def test_an_episode_counts_even_if_its_environment_cannot_be_closed(store, tokenizer):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", stop_every=TURN))
    program = program_of(UnclosableEnvironment, tokenizer, [])
    async with running(store, cluster, ScriptedReward(), plan, program=program) as run:
        check(await trainer.train(1))
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="failed") == 0


class AwayEnvironment(CountingEnvironment):
    def __init__(self, log):
        raise ConnectionError("the tool server is away")


class ChattyEnvironment(CountingEnvironment):
    async def step(self, response_text, idempotency_key):
        return EnvironmentReply(text=None, done=False)


@pytest.mark.parametrize("kind", [AwayEnvironment, ChattyEnvironment])
async def test_an_environment_that_fails_costs_an_evaluation_its_answers_and_never_the_replica(store, tokenizer, kind):
    plan = schedule("sync", train_steps=1)
    cluster, _ = await start(store, plan, ScriptedGenerator("a", stop_every=TURN))
    await store.settings.set_user_paused(True)
    async with running(store, cluster, ScriptedReward(), plan, program=program_of(kind, tokenizer, [])) as run:
        await store.evaluations.request(EvalRequest(evaluation_id="e", policy_version=0, prompt_count=3))

        async def result():
            await cluster.register()
            return run.task.done() or (await store.evaluations.all())[0].result

        done = await until(result)
        assert not run.task.done()
        assert (done.sample_count, done.discarded_count) == (0, 3)


async def test_a_finished_episode_whose_environment_cannot_be_made_again_has_an_error_for_a_score(tokenizer):
    prompt = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), verifier="exact")
    trajectory = Trajectory(
        trajectory_id="e0-0.0", group_id="e0-0", member_index=0, prompt=prompt, segments=(policy_turn(0),)
    )
    outcome = await program_of(AwayEnvironment, tokenizer, []).outcome_of(trajectory)
    assert outcome.kind is OutcomeKind.VERIFIER_ERROR
    assert "the tool server is away" in outcome.message


class ReplayRaises:
    """Ends every trajectory at once and cannot score one whose worker has died."""

    async def run(self, rollout):
        raise AssertionError("nothing is to be rolled out")

    async def outcome_of(self, trajectory, snapshot=None):
        raise TypeError("a program with a fault")


async def test_a_finished_trajectory_whose_score_always_raises_ends_as_a_dead_letter(store):
    plan = schedule("sync", train_steps=1)
    cluster, _ = await start(store, plan, ScriptedGenerator("a"))
    leader = await store.leadership.acquire("once")
    prompt = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), verifier="exact")
    orphans = [NewGroup(group_id="e0-0", prompt=prompt, needed=2, epoch=0, index=0)]
    await store.leadership.admit(leader, orphans, Cursor(), Cursor(index=1))
    await store.leadership.set_desired(leader, Desired(pool_size=1))
    session = await store.sessions.open("the one that dies")
    assert await store.trajectories.lease(session, 1)
    last = Finish(
        trajectory_id="e0-0.0", token_offset=0, segments=[policy_turn(0)], finish_reason=FinishReason.ENVIRONMENT
    )
    await store.trajectories.finish(session, [last])
    await store.sessions.close(session)
    await store.settings.set_user_paused(True)
    async with running(store, cluster, ScriptedReward(), plan, program=ReplayRaises()):
        (letter,) = await until(store.dead_letters.newest)
    assert (letter.trajectory_id, letter.reason) == ("e0-0.0", "max_attempts to score it")
