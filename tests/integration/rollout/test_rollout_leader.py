"""A leader over a real store: what it does when Redis comes back as an earlier state, and while prompts are opened."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from structlog.testing import capture_logs

from rollmesh.config.rollout import EvalConfig
from rollmesh.launcher.run_up import queue_account
from rollmesh.mesh import Cursor, MeshView
from rollmesh.report.ledger_check import lost_groups
from rollmesh.rollout.leader import MeshLeader
from rollmesh.rollout.leader_parts import PeriodicEvaluations
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.scheduling import Schedule
from rollmesh.store import EvalRequest, TrajectoryStore
from rollmesh.tasks.sources.source_protocol import OnChecked, PromptSource

from ...kit.waiting import reached
from .replicas import limits, schedule
from .scenes import start
from .scripted import ScriptedGenerator, ScriptedPrompts, ScriptedTrainer


@asynccontextmanager
async def leading(
    store: TrajectoryStore,
    plan: Schedule,
    evaluation: EvalConfig | None = None,
    open_prompts: Callable[..., PromptSource] = lambda *_: ScriptedPrompts(),
    health: Health | None = None,
    tokenizer: str = "",
    scoring_problem: str = "",
) -> AsyncIterator[ScriptedTrainer]:
    """One leader without workers, and the trainer of its run."""
    _, trainer = await start(store, plan, ScriptedGenerator("a"))
    leader = MeshLeader(
        store,
        plan,
        open_prompts,
        PeriodicEvaluations(store.evaluations, evaluation or EvalConfig(), keep_last=6),
        candidate="only",
        renew_seconds=0.5,
        metrics=RolloutMetrics(Metrics("rollout")),
        health=health or Health(),
        tokenizer=tokenizer,
        scoring_problem=lambda: scoring_problem,
    )
    shutdown = asyncio.Event()
    task = asyncio.create_task(leader.run(shutdown))
    try:
        yield trainer
    finally:
        shutdown.set()
        await task


async def at_once(store: TrajectoryStore, *commands: Sequence[str | int]) -> None:
    """Run commands in one transaction, so that the leader, which looks several times a second, sees all or none."""
    await store.connection.commands([("MULTI",), *commands, ("EXEC",)])


async def test_a_desired_state_that_redis_has_forgotten_is_written_again(store) -> None:
    """The lead survives in the restored state, so nothing else would make the leader write."""
    plan = schedule("copris")

    async def working() -> bool:
        desired = await store.leadership.desired()
        return desired.pool_size == plan.pool_size and not desired.paused

    async with leading(store, plan):
        await reached(working)
        keys = store.connection.keys
        await at_once(
            store,
            ("HSET", keys.single("desired"), "paused", 1, "reason", "from before"),
            ("HSET", keys.single("meta"), "run_id", "another"),
        )
        await reached(working)


async def test_an_automatic_pool_falls_to_what_the_generators_report_that_their_caches_hold(store) -> None:
    """The caches hold less than one group, which is the least."""
    plan = schedule("copris", pool_size="auto")
    small = replace(ScriptedGenerator("a").record, kv_token_capacity=1)

    async def one_group() -> bool:
        desired = await store.leadership.desired()
        return desired.cache_pool is not None and desired.pool_size == plan.group_size

    async with leading(store, plan):
        await store.generators.register(small, 3600)
        await reached(one_group)


async def test_a_failure_that_redis_has_forgotten_is_reported_again(store) -> None:
    plan = schedule("copris", max_filtered_in_a_row=1)
    keys, command = store.connection.keys, store.connection.command

    async def failed() -> bool:
        return "groups in a row" in await store.leadership.failure()

    async with leading(store, plan):
        await command("HSET", keys.single("meta"), "filtered_in_a_row", 1)
        await reached(failed)
        await command("HSET", keys.single("meta"), "failure", "")
        await reached(failed)


async def test_a_run_without_scores_ends_with_the_reasons_of_the_dead_letters_and_of_the_verifier(store) -> None:
    plan = schedule("copris", max_filtered_in_a_row=1)
    reason = "the generator refuses the call: sampling.stop_token_ids: {} is outside the vocabulary of 64 tokens"

    async def failed() -> bool:
        return "groups in a row" in await store.leadership.failure()

    async with leading(store, plan, scoring_problem="my_task.py, line 3: KeyError: 'answer'"):
        session = await store.sessions.open("worker")

        async def all_die() -> bool:
            for number, item in enumerate(await store.trajectories.lease(session, 64)):
                text = reason.format(number) if number % 3 else "the worker was killed"
                await store.trajectories.fail(session, [(item.trajectory.trajectory_id, text)])
            return await failed()

        await reached(all_die)
        failure = await store.leadership.failure()
    assert "generation, the verifier, its judge or the environment fails for every answer" in failure
    assert "dead letters: the generator refuses the call: sampling.stop_token_ids" in failure
    assert failure.endswith("; the newest answer without a reward: my_task.py, line 3: KeyError: 'answer'")


async def test_the_leader_reads_the_mesh_at_most_ten_times_a_second_and_groups_only_for_a_decision(
    store, monkeypatch
) -> None:
    looks: list[tuple[float, bool]] = []
    view = store.mesh.view

    async def counted(**options: bool) -> MeshView:
        looks.append((time.monotonic(), options.get("groups", True)))
        return await view(**options)

    monkeypatch.setattr(store.mesh, "view", counted)
    keys, command = store.connection.keys, store.connection.command
    async with leading(store, schedule("copris")):
        for number in range(15):  # something changes between any two looks
            await command("HSET", keys.single("counts"), "finished", number)
            seen = len(looks)
            await reached(lambda seen=seen: len(looks) > seen)
    assert not any(groups for _, groups in looks)
    assert looks[10][0] - looks[0][0] >= 0.9


async def test_an_evaluation_that_redis_has_forgotten_is_asked_for_again(store) -> None:
    async def asked() -> bool:
        return [r.request.evaluation_id for r in await store.evaluations.all()] == ["version-1"]

    async with leading(store, schedule("copris"), EvalConfig(every_versions=1)) as trainer:
        await trainer.announce(1)
        await reached(asked)
        keys = store.connection.keys
        await at_once(
            store,
            ("DEL", keys.single("evaluations"), keys.of("evaluation", "version-1")),
            ("HSET", keys.single("meta"), "run_id", "another"),
        )
        await reached(asked)


class Rows(ScriptedPrompts):
    """Prompts of a table; ``content`` stands for its rows."""

    def __init__(self, content: str, epoch_size: int = 5) -> None:
        self.content, self.epoch_size = content, epoch_size


async def test_rows_that_changed_since_the_run_began_end_it_with_both_numbers(store) -> None:
    async def begun() -> bool:
        return await store.leadership.cursor() != Cursor(epoch=0, index=0)

    async with leading(store, schedule("copris"), open_prompts=lambda _: Rows("5 rows aa")):
        await reached(begun)
    cursor, groups = await store.leadership.cursor(), (await store.mesh.view()).open_groups
    async with leading(store, schedule("copris"), open_prompts=lambda _: Rows("47 rows bb", 47)):
        failure = await reached(store.leadership.failure)
    assert failure == (
        "data.source: the files have changed since the run began: 5 rows aa then, 47 rows bb now (digests); restore "
        "them, or start another run in another folder"
    )
    assert (await store.leadership.cursor(), (await store.mesh.view()).open_groups) == (cursor, groups)
    account = await queue_account(store)
    assert account.epoch_size == 5, "the audit counts the prompts that the run had"
    in_queue = {*account.live, *account.dropped}
    assert lost_groups(account, ()) == () and len(in_queue) == cursor.epoch * 5 + cursor.index

    async def withdrawn() -> bool:
        return not await store.leadership.failure()

    async with leading(store, schedule("copris"), open_prompts=lambda _: Rows("5 rows aa")):
        await reached(withdrawn)


async def test_a_tokenizer_that_changed_since_the_run_began_ends_it(store) -> None:
    async def begun() -> bool:
        return await store.leadership.cursor() != Cursor(epoch=0, index=0)

    async with leading(store, schedule("copris"), tokenizer="tokenizer aa, chat template bb"):
        await reached(begun)
    async with leading(store, schedule("copris"), tokenizer="tokenizer aa, chat template cc"):
        failure = await reached(store.leadership.failure)
    assert failure.startswith("model.path: the files have changed since the run began: tokenizer aa, chat template bb")


async def test_rows_may_change_until_the_first_prompt_or_evaluation(store) -> None:
    await store.limits.init_run(limits(schedule("copris")))
    record = store.leadership.record_content
    assert await record("data.source", "5 rows aa", 5) == "5 rows aa"
    assert await record("data.source", "47 rows bb", 47) == "47 rows bb"
    assert await store.leadership.epoch_size() == 47
    await store.evaluations.request(
        EvalRequest(evaluation_id="v0", policy_version=0, prompt_count=1, samples_per_prompt=1)
    )
    assert await record("data.evaluation_source", "9 rows cc") == "9 rows cc"
    assert await record("data.evaluation_source", "8 rows dd") == "9 rows cc"
    assert await record("data.source", "5 rows aa", 5) == "47 rows bb"
    assert await store.leadership.epoch_size() == 47


async def test_opening_a_large_table_neither_stops_the_health_beat_nor_holds_the_lead(store) -> None:
    now, opening, opened = 0.0, threading.Event(), threading.Event()
    health = Health(clock=lambda: now)

    def open_prompts(*_: object) -> PromptSource:
        opening.set()
        assert opened.wait(60.0)
        return ScriptedPrompts()

    async def admitted() -> bool:
        return (await store.mesh.view()).open_groups > 0

    async with leading(store, schedule("copris"), open_prompts=open_prompts, health=health):
        try:
            await reached(opening.is_set)
            for _ in range(3):
                now += 1000.0
                assert "leader" in health.stalled(), "no beat since the clock has moved"
                await reached(lambda: not health.stalled())
            other = await store.leadership.acquire("another replica")
            assert other is not None
            await store.leadership.resign(other)
        finally:
            opened.set()
        await reached(admitted)


async def test_a_replica_that_is_stopped_while_it_opens_its_prompts_ends_the_opening(store) -> None:
    checked, ended = threading.Event(), threading.Event()

    def open_prompts(on_checked: OnChecked) -> PromptSource:
        try:
            for row in range(10**9):
                on_checked(row, 10**9)
                checked.set()
        finally:
            ended.set()
        raise AssertionError("unreachable")

    async with leading(store, schedule("copris"), open_prompts=open_prompts):
        await reached(checked.is_set)
    await reached(ended.is_set)


async def test_a_cut_that_waits_long_for_the_same_thing_says_so(store, monkeypatch) -> None:
    monkeypatch.setattr("rollmesh.rollout.leader._EXPLAIN_SECONDS", 0.3)
    with capture_logs() as logs:
        async with leading(store, schedule("copris")):
            await reached(lambda: sum(line["event"] == "cut_waits" for line in logs) >= 2)
            view = await store.mesh.view(groups=False)
            assert (
                view.desired.waiting_for == (await store.leadership.desired()).waiting_for == "2 more ready groups of 2"
            )
    said = [line for line in logs if line["event"] == "cut_waits"]
    assert said[0]["waiting_for"] == "2 more ready groups of 2"


async def test_a_replay_that_waits_for_room_comes_before_new_prompts(store) -> None:
    async with leading(store, schedule("sync")) as trainer:
        del trainer
        session = await store.sessions.open("worker")

        async def fail_one() -> bool:
            """Fail what the first group has; its members are replaced a few times, then it is dropped."""
            leased = [item.trajectory for item in await store.trajectories.lease(session, 64)]
            ids = [t.trajectory_id for t in leased if t.group_id == "e0-0"]
            await store.trajectories.fail(session, [(i, "broke") for i in ids])
            return bool(ids)

        await reached(fail_one)
        assert sorted(await store.mesh.live_groups()) == ["e0-0", "e0-1"], "as many as the bound allows"
        group_id = await store.dead_letters.replay("e0-0.0")
        assert (await store.mesh.view()).open_groups == 2

        async def dropped() -> bool:
            await fail_one()
            return "e0-0" not in await store.mesh.live_groups()

        await reached(dropped)

        async def opened() -> bool:
            return (await store.mesh.view()).open_groups == 2

        await reached(opened)
        assert sorted(await store.mesh.live_groups()) == sorted(["e0-1", group_id])
