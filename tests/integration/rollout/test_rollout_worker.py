"""The rollout service on a real queue, with generators and rewards that follow a script."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rollmesh.config.data import RewardConfig
from rollmesh.config.services import EvalConfig, StoreConfig
from rollmesh.errors import DataError, EngineError, RewardUnavailable, StoreUnavailable
from rollmesh.store import Append, TrajectoryStore, WriteStatus
from rollmesh.store.types import EvalRequest
from rollmesh.types import FinishReason, OutcomeKind, RewardOutcome, Segment

from .replicas import limits, running, schedule
from .scripted import ScriptedCluster, ScriptedGenerator, ScriptedPrompts, ScriptedReward, ScriptedTrainer, answer_of
from .waiting import until


def check_batch(batch, plan, longest=40):
    assert len(batch.groups) == plan.groups_per_batch
    for group in batch.groups:
        assert len(group.trajectories) == plan.group_size
        for trajectory in group.trajectories:
            answer = answer_of(trajectory.trajectory_id, longest)
            assert trajectory.response_ids.tolist() == answer
            logprobs = np.concatenate([s.behavior_logprobs for s in trajectory.segments])
            assert logprobs.tolist() == [-float(t) for t in answer]
            versions = [s.policy_version for s in trajectory.segments]
            assert versions == sorted(versions)
            assert batch.train_step - 1 - versions[0] <= plan.max_staleness
            assert trajectory.outcome.kind is OutcomeKind.SCORED


def all_groups(trainer):
    return [group.group_id for batch in trainer.batches for group in batch.groups]


async def start(store, plan, *generators, **overrides):
    await store.init_run(limits(plan, **overrides))
    cluster = ScriptedCluster(store, generators)
    trainer = ScriptedTrainer(store, cluster)
    await trainer.start()
    return cluster, trainer


@pytest.mark.parametrize("preset", ["sync", "one_step_off", "copris", "copris_paper", "areal"])
async def test_every_preset_trains_its_steps_and_every_group_ends(store, preset):
    plan = schedule(preset, train_steps=4)
    cluster, trainer = await start(
        store, plan, ScriptedGenerator("a", seconds_per_token=0.001), ScriptedGenerator("b", seconds_per_token=0.002)
    )
    async with running(store, cluster, ScriptedReward(), plan) as run:
        for step in range(1, 5):
            check_batch(await trainer.train(step), plan)
        await until(lambda: store_is_empty(store))
        assert run.value("rollmesh_rollout_leader") == 1
    groups = all_groups(trainer)
    assert len(groups) == len(set(groups)) == 8
    counts = await store.counts()
    assert set(counts.drops) <= {"run_complete"}
    assert counts.dead_letters == 0


async def store_is_empty(store):
    view = await store.view()
    return view.trained_enough and view.open_groups == view.ready_groups == view.leased == 0


async def test_a_generator_that_dies_hands_its_trajectories_to_another_from_the_last_chunk(store):
    plan = schedule("sync", train_steps=1)
    dying = ScriptedGenerator("dying", seconds_per_token=0.01)
    cluster, trainer = await start(store, plan, dying, ScriptedGenerator("other", seconds_per_token=0.005))
    async with running(store, cluster, ScriptedReward(), plan) as run:
        await until(lambda: len(dying.running) >= 2)
        dying.dead = True
        check_batch(await trainer.train(1), plan)
        assert run.value("rollmesh_rollout_calls_ended_total", reason="broken") >= 1
    assert cluster.generators["other"].calls > 0


def wrong_version(chunk):
    return replace(chunk, policy_version=chunk.policy_version + 7, kv_min_version=0)


def not_a_number(chunk):
    return replace(chunk, behavior_logprobs=np.full_like(chunk.behavior_logprobs, np.nan))


def outside_the_vocabulary(chunk):
    return replace(chunk, token_ids=chunk.token_ids + 1000)


def early_end(chunk):
    return replace(chunk, finish_reason=FinishReason.LENGTH)


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
    plan = schedule("sync", train_steps=1)
    bad = ScriptedGenerator("bad", fault=fault)
    cluster, trainer = await start(store, plan, bad, ScriptedGenerator("good", seconds_per_token=0.001))
    async with running(store, cluster, ScriptedReward(), plan) as run:
        check_batch(await trainer.train(1), plan)
        assert run.value("rollmesh_rollout_calls_ended_total", reason=reason) >= 1
    assert bad.calls <= plan.pool_size


async def test_a_generator_that_hangs_is_given_up_after_the_chunk_timeout(store):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("hangs", hang=True), ScriptedGenerator("works"))
    async with running(store, cluster, ScriptedReward(), plan, chunk_timeout=0.3) as run:
        check_batch(await trainer.train(1), plan)
        assert run.value("rollmesh_rollout_calls_ended_total", reason="hung") >= 1


class PoisonedGenerator(ScriptedGenerator):
    """Breaks whenever it is given one trajectory."""

    async def generate(self, call):
        if call.trajectory_id == "e0-0.0":
            raise EngineError("the kernel died")
        async for chunk in super().generate(call):
            yield chunk


async def test_a_trajectory_that_breaks_every_generator_ends_as_a_dead_letter(store, monkeypatch):
    monkeypatch.setattr("rollmesh.holding.calls.MOST_FAILED_CALLS", 3)
    monkeypatch.setattr("rollmesh.holding.calls.GARBAGE_AVOID_SECONDS", 0.01)
    monkeypatch.setattr("rollmesh.holding.generators.LONGEST_AVOID_SECONDS", 0.02)
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, PoisonedGenerator("a"), PoisonedGenerator("b"), max_attempts=2)
    async with running(store, cluster, ScriptedReward(), plan):
        check_batch(await trainer.train(1), plan)
    letters = await store.dead_letters()
    assert [(letter.trajectory_id, letter.attempts) for letter in letters] == [("e0-0.0", 2)]


async def test_a_trajectory_that_is_let_go_while_the_queue_counts_it_as_ours_is_leased_again(store, monkeypatch):
    """Or its group would never be complete: the session that holds it lives on and has forgotten it."""
    append, refused = store.append, []

    async def refuse_once(session, items):
        results = await append(session, items)
        if not refused:
            refused.append(results[0].trajectory_id)
            return [replace(results[0], status=WriteStatus.REFUSED, saved_token_count=1 << 20), *results[1:]]
        return results

    monkeypatch.setattr(store, "append", refuse_once)
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", seconds_per_token=0.001))
    async with running(store, cluster, ScriptedReward(), plan) as run:
        check_batch(await trainer.train(1), plan)
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="lost") == 1
    assert refused


async def test_trajectories_leased_in_the_moment_in_which_redis_goes_away_are_not_forgotten(store, monkeypatch):
    """It comes back as the same server, so nobody registers anything again."""
    lease, desired, away = store.lease, store.desired, []

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

    monkeypatch.setattr(store, "lease", lease_and_lose_redis)
    monkeypatch.setattr(store, "desired", desired_once_it_is_back)
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a"))
    async with running(store, cluster, ScriptedReward(), plan):
        check_batch(await trainer.train(1, timeout=15.0), plan)
    assert away == [False, False, False]


async def test_tokens_are_never_joined_to_tokens_that_somebody_else_has_saved(store):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", seconds_per_token=0.03))
    async with running(store, cluster, ScriptedReward(), plan, chunk=16) as run:
        longest = await until(lambda: next((i for i in run.session.held if len(answer_of(i, 40)) > 20), None))
        ids = np.array(answer_of(longest, 40)[:3], np.int32)
        other = Segment(
            token_ids=ids,
            behavior_logprobs=-ids.astype(np.float32),
            policy_version=0,
            kv_min_version=0,
            temperature=0.5,
        )
        item = Append(trajectory_id=longest, token_offset=0, segments=[other])
        assert (await store.append(run.session.current, [item]))[0].status is WriteStatus.SAVED
        batch = await trainer.train(1)
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="lost") == 1
    check_batch(batch, plan)
    first = next(t for g in batch.groups for t in g.trajectories if t.trajectory_id == longest).segments
    assert (len(first[0]), first[0].temperature) == (3, 0.5)
    assert len(first[1]) == 16, "the next call went on after what was saved"


async def test_a_trajectory_never_goes_back_to_an_older_version(store):
    """The new trajectories of sync need the newest policy: a generator that stays behind gets none of them."""
    plan = schedule("sync", train_steps=2)
    slow = ScriptedGenerator("behind")
    cluster, trainer = await start(store, plan, slow, ScriptedGenerator("current", seconds_per_token=0.001))
    async with running(store, cluster, ScriptedReward(), plan):
        check_batch(await trainer.train(1), plan)
        slow.version = 0
        calls = slow.calls
        await cluster.register()
        batch = await trainer.train(2)
        check_batch(batch, plan)
        assert {v for g in batch.groups for t in g.trajectories for v in t.policy_versions} == {1}
        assert slow.calls == calls


async def test_a_lost_session_is_replaced_and_the_trajectories_go_on_where_they_were(store):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", seconds_per_token=0.02))
    async with running(store, cluster, ScriptedReward(), plan, chunk=4) as run:
        await until(lambda: run.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 40)
        first = run.session.current
        await store.close_session(first)
        check_batch(await trainer.train(1), plan)
        assert run.session.current != first
        assert run.value("rollmesh_rollout_sessions_lost_total") == 1
    tokens = sum(len(t.response_ids) for g in trainer.batches[0].groups for t in g.trajectories)
    assert run.value("rollmesh_rollout_sampled_tokens_total", age="0") == tokens


async def test_no_trajectory_runs_twice_while_a_lost_session_is_replaced(store, monkeypatch):
    """The new session may lease only once it has taken along what is running here."""
    reregister, slowly = store.reregister, []

    async def reregister_slowly(session, held, worker=""):
        slowly.append(len(held))
        await asyncio.sleep(0.8)
        return await reregister(session, held, worker)

    monkeypatch.setattr(store, "reregister", reregister_slowly)
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", seconds_per_token=0.05))
    async with running(store, cluster, ScriptedReward(), plan, chunk=4) as run:
        await until(lambda: run.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 24)
        await store.close_session(run.session.current)
        check_batch(await trainer.train(1), plan)
        assert run.value("rollmesh_rollout_leases_total") == plan.pool_size
        tokens = sum(len(t.response_ids) for g in trainer.batches[0].groups for t in g.trajectories)
        assert run.value("rollmesh_rollout_sampled_tokens_total", age="0") == tokens
    assert slowly[0] > 0


async def test_saves_go_on_while_everything_is_registered_with_a_server_that_came_back(store, monkeypatch):
    reregister, saves = store.reregister, []

    async def answer_late(session, held, worker=""):
        answers = await reregister(session, held, worker)
        before = (await store.counts()).totals["saved_tokens_total"]
        await asyncio.sleep(0.5)
        saves.append((await store.counts()).totals["saved_tokens_total"] - before)
        return answers

    monkeypatch.setattr(store, "reregister", answer_late)
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", seconds_per_token=0.05))
    async with running(store, cluster, ScriptedReward(), plan, chunk=4) as run:
        await until(lambda: run.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 24)
        await run.session.recover(run.session.current, "another server")
        check_batch(await trainer.train(1), plan)
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="lost") == 0
        tokens = sum(len(t.response_ids) for g in trainer.batches[0].groups for t in g.trajectories)
        assert run.value("rollmesh_rollout_sampled_tokens_total", age="0") == tokens
    assert saves[0] > 0


async def test_a_pause_parks_everything_and_the_resumed_run_loses_no_token(store):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", seconds_per_token=0.02))
    async with running(store, cluster, ScriptedReward(), plan) as run:
        await until(lambda: run.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 20)
        await store.set_user_paused(True)

        async def at_rest():
            await cluster.register()
            return (await store.view()).leased == 0

        await until(at_rest)
        assert (await store.view()).partial > 0
        assert run.value("rollmesh_rollout_trajectories_parked_total", reason="paused") > 0
        await store.set_user_paused(False)
        check_batch(await trainer.train(1), plan)
        tokens = sum(len(t.response_ids) for g in trainer.batches[0].groups for t in g.trajectories)
        sampled = run.value("rollmesh_rollout_sampled_tokens_total", age="0")
        assert sampled == tokens


async def test_a_drained_worker_leaves_partials_that_another_one_finishes(store):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", seconds_per_token=0.02))
    async with running(store, cluster, ScriptedReward(), plan) as first:
        await until(lambda: first.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 20)
        await first.stop()
        view = await store.view()
        assert view.leased == 0
        assert view.partial > 0
        async with running(store, cluster, ScriptedReward(), plan, index=1) as second:
            check_batch(await trainer.train(1), plan)
            assert second.value("rollmesh_rollout_leases_resumed_total") == view.partial
            sampled = sum(r.value("rollmesh_rollout_sampled_tokens_total", age="0") for r in (first, second))
    assert sampled == sum(len(t.response_ids) for g in trainer.batches[0].groups for t in g.trajectories)


async def test_two_replicas_share_the_pool_and_one_leads(store):
    plan = schedule("copris", train_steps=3)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", seconds_per_token=0.002))
    async with (
        running(store, cluster, ScriptedReward(), plan, concurrency=6) as one,
        running(store, cluster, ScriptedReward(), plan, index=1, concurrency=6) as two,
    ):
        for step in range(1, 4):
            check_batch(await trainer.train(step), plan)
            assert (await store.view()).leased <= plan.pool_size
        assert one.value("rollmesh_rollout_leader") + two.value("rollmesh_rollout_leader") == 1
        assert one.value("rollmesh_rollout_leases_total") > 0
        assert two.value("rollmesh_rollout_leases_total") > 0


async def test_the_lead_passes_on_when_the_leader_resigns(store):
    plan = schedule("copris", train_steps=3)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a"))
    async with running(store, cluster, ScriptedReward(), plan) as one:
        check_batch(await trainer.train(1), plan)
        async with running(store, cluster, ScriptedReward(), plan, index=1) as two:
            await one.stop()
            check_batch(await trainer.train(2), plan)
            check_batch(await trainer.train(3), plan)
            assert two.value("rollmesh_rollout_leader") == 1


async def test_outcomes_without_a_value_follow_the_policy_of_the_run(store):
    broken = RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message="no")

    def outcome(trajectory):
        if trajectory.member_index == 0:
            return broken
        return RewardOutcome(kind=OutcomeKind.SCORED, value=float(trajectory.member_index))

    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a"))
    config = RewardConfig(on_error="fixed", fixed_value=-2.0)
    async with running(store, cluster, ScriptedReward(outcome), plan, reward_config=config):
        batch = await trainer.train(1)
    for group in batch.groups:
        rewards = {t.member_index: t.shaped_reward for t in group.trajectories}
        assert rewards == {0: -2.0, 1: 1.0, 2: 2.0, 3: 3.0}
        assert group.trajectories[0].outcome.kind is OutcomeKind.VERIFIER_ERROR


async def test_an_unscorable_member_is_replaced(store):
    def outcome(trajectory):
        if trajectory.member_index == 0:
            return RewardOutcome(kind=OutcomeKind.TIMED_OUT, message="slow")
        return RewardOutcome(kind=OutcomeKind.SCORED, value=float(trajectory.member_index))

    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a"))
    async with running(store, cluster, ScriptedReward(outcome), plan) as run:
        batch = await trainer.train(1)
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="unscorable") >= 2
    for group in batch.groups:
        assert sorted(t.member_index for t in group.trajectories) == [1, 2, 3, 4]


async def test_an_answer_without_a_value_becomes_a_dead_letter_with_its_tokens_where_the_run_says_so(store):
    def outcome(trajectory):
        if trajectory.member_index == 0:
            return RewardOutcome(kind=OutcomeKind.TIMED_OUT, message="10 s")
        return RewardOutcome(kind=OutcomeKind.SCORED, value=float(trajectory.member_index))

    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a"))
    config = RewardConfig(on_timeout="dead_letter")
    async with running(store, cluster, ScriptedReward(outcome), plan, reward_config=config):
        batch = await trainer.train(1)
    for group in batch.groups:
        assert sorted(t.member_index for t in group.trajectories) == [1, 2, 3, 4]
    letters = [await store.dead_letter(letter.trajectory_id) for letter in await store.dead_letters()]
    assert sorted(letter.trajectory_id for letter in letters) == ["e0-0.0", "e0-1.0"]
    for letter in letters:
        assert letter.reason == "timed_out: 10 s"
        assert letter.trajectory.response_ids.tolist() == answer_of(letter.trajectory_id, 40)


async def test_a_reward_service_that_is_away_is_waited_for_and_bad_metadata_is_no_reward(store):
    class Away(ScriptedReward):
        calls = 0

        async def score(self, trajectories):
            self.calls += 1
            if self.calls <= 3:
                raise RewardUnavailable("nobody there")
            if trajectories[0].member_index == 0:
                raise DataError("metadata.answer: cannot travel")
            return await super().score(trajectories)

    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a"))
    config = RewardConfig(on_error="fixed", fixed_value=-1.0)
    async with running(store, cluster, Away(), plan, reward_config=config):
        batch = await trainer.train(1)
    first = [t for g in batch.groups for t in g.trajectories if t.member_index == 0]
    assert {t.outcome.message for t in first} == {"metadata.answer: cannot travel"}
    assert {t.shaped_reward for t in first} == {-1.0}


class BadPrompts(ScriptedPrompts):
    def prompt(self, epoch, index):
        if index >= 3:
            raise DataError("data.jsonl line 4: no field 'prompt'")
        return super().prompt(epoch, index)


async def test_a_bad_row_fails_the_run_with_its_place_and_stops_the_mesh(store):
    plan = schedule("copris", train_steps=3)
    cluster, _ = await start(store, plan, ScriptedGenerator("a"))
    async with running(store, cluster, ScriptedReward(), plan, prompts=BadPrompts()):
        failure = await until(store.failure)
        assert "index 3" in failure
        assert "line 4: no field 'prompt'" in failure
        await until(lambda: paused(store))
    assert await store.failure() == ""


async def paused(store):
    return (await store.desired()).paused


async def test_an_evaluation_counts_only_answers_of_the_pinned_version_and_leaves_the_pool_alone(store):
    plan = schedule("sync", train_steps=1)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", seconds_per_token=0.001))
    await store.set_user_paused(True)
    config = EvalConfig(prompt_count=12, samples_per_prompt=2)
    async with running(store, cluster, ScriptedReward(), plan, evaluation=config):
        request = EvalRequest(evaluation_id="v0", policy_version=0, prompt_count=12, samples_per_prompt=2)
        await store.request_evaluation(request)

        async def result():
            await cluster.register()
            return (await store.evaluations())[0].result

        done = await until(result)
        assert (done.sample_count, done.discarded_count) == (24, 0)
        assert done.mean == pytest.approx(0.5)
        assert done.standard_error == pytest.approx(np.std([0, 1] * 12, ddof=1) / np.sqrt(24))
        assert (await store.view()).leased == 0
        assert await store.pinned_policy() is None
    assert trainer.batches == []


async def test_a_killed_redis_costs_time_and_nothing_else(own_server):
    plan = schedule("sync", train_steps=2)
    async with await TrajectoryStore.connect(StoreConfig(), run="killed", url=own_server.url, retry_seconds=1) as store:
        cluster, trainer = await start(store, plan, ScriptedGenerator("a", seconds_per_token=0.02))
        async with running(store, cluster, ScriptedReward(), plan, chunk=4) as run:
            await until(lambda: run.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 40)
            own_server.kill()
            await asyncio.sleep(2)
            await asyncio.to_thread(own_server.start)
            for step in (1, 2):
                check_batch(await trainer.train(step), plan)
            assert len(set(all_groups(trainer))) == 4
            sampled = sum(run.value("rollmesh_rollout_sampled_tokens_total", age=str(age)) for age in range(3))
        tokens = sum(len(t.response_ids) for b in trainer.batches for g in b.groups for t in g.trajectories)
        assert sampled == tokens


async def test_an_evaluation_waits_for_the_pin_of_a_person_and_takes_back_only_its_own(store):
    plan = schedule("sync", train_steps=2)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a"))
    async with running(store, cluster, ScriptedReward(), plan):
        await trainer.train(1)
        await store.pin_policy(0)
        await store.request_evaluation(EvalRequest(evaluation_id="v1", policy_version=1, prompt_count=2))

        async def claimed():
            return (await store.evaluations())[0].claimed

        async def result():
            await cluster.register()
            return (await store.evaluations())[0].result

        await until(claimed)
        assert await store.pinned_policy() == 0
        await store.pin_policy(None)
        assert (await until(result)).sample_count == 2
        assert await store.pinned_policy() is None
        await store.pin_policy(1)
        await store.request_evaluation(EvalRequest(evaluation_id="again", policy_version=1, prompt_count=2))
        await until(lambda: evaluated(store, "again"))
        assert await store.pinned_policy() == 1


async def evaluated(store, evaluation_id):
    return any(r.request.evaluation_id == evaluation_id and r.result for r in await store.evaluations())


async def test_an_evaluation_of_a_version_that_does_not_exist_ends_without_scores(store):
    plan = schedule("sync", train_steps=1)
    cluster, _ = await start(store, plan, ScriptedGenerator("a"))
    async with running(store, cluster, ScriptedReward(), plan):
        await store.request_evaluation(EvalRequest(evaluation_id="v9", policy_version=9, prompt_count=2))
        await until(lambda: evaluated(store, "v9"))
    assert (await store.evaluations())[0].result.sample_count == 0


async def test_versions_swapped_under_running_calls_continue_the_same_call(store):
    plan = schedule("copris", train_steps=4)
    generators = [ScriptedGenerator(name, seconds_per_token=0.01, keep_kv=True) for name in ("a", "b")]
    cluster, trainer = await start(store, plan, *generators)
    async with running(store, cluster, ScriptedReward(), plan) as run:
        for step in range(1, 5):
            check_batch(await trainer.train(step), plan)
        assert run.value("rollmesh_rollout_calls_ended_total", reason="interrupted") == 0
    spans = [len(t.policy_versions) for b in trainer.batches for g in b.groups for t in g.trajectories]
    assert max(spans) > 1


async def test_a_generator_that_ignores_the_interrupt_is_cut_off_and_the_pause_happens(store):
    plan = schedule("sync", train_steps=1)
    stuck = ScriptedGenerator("stuck", hang=True)
    cluster, trainer = await start(store, plan, stuck)
    async with running(store, cluster, ScriptedReward(), plan, chunk_timeout=60) as run:
        await until(lambda: len(stuck.running) == plan.pool_size)
        await store.set_user_paused(True)

        async def at_rest():
            await cluster.register()
            return (await store.view()).leased == 0

        await until(at_rest)
        assert run.value("rollmesh_rollout_calls_ended_total", reason="cut_off") == plan.pool_size
        stuck.hang = False
        await store.set_user_paused(False)
        check_batch(await trainer.train(1), plan)
