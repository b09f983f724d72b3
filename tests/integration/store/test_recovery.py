"""Recovery after Redis comes back as another server, step by step."""

import asyncio
import time

import pytest

from rollmesh.config.store import StoreConfig
from rollmesh.errors import Conflict, SessionLost, StoreUnavailable
from rollmesh.mesh import Cursor, Desired
from rollmesh.store import EmbeddedServer, EvalRequest, TrajectoryStore, WriteStatus

from .store_mesh import Mesh, earlier_state, group, held, limits, policy, segment
from .stored_keys import read_truth

TTL = 60.0
"""Of sessions, and so of a recovery: tests let it pass by hand, and a machine that stalls does not."""


async def other_server(store: TrajectoryStore) -> None:
    """Let the queue believe that its server was another one: what a restart looks like to the scripts."""
    await store.connection.command("HSET", store.connection.keys.single("meta"), "run_id", "another")


async def ends_one_ttl_after(store: TrajectoryStore, field: str, earliest: float, latest: float) -> None:
    """A period of the queue ends one TTL after a moment between these two; from here on it is over."""
    meta = store.connection.keys.single("meta")
    end = int(await store.connection.command("HGET", meta, field)) / 1000 - TTL
    assert earliest - 0.01 <= end <= latest + 0.01, "the server's clock counts milliseconds"
    await store.connection.command("HSET", meta, field, 1)


async def test_a_restart_stops_admission_cuts_and_leases_until_the_trainer_has_re_asserted(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store, session_ttl_seconds=TTL, groups=3)
    leased = await store.trajectories.lease(mesh.session, 4)
    for item in leased:
        await mesh.complete(item, float(item.trajectory.member_index))
    before = await store.sessions.heartbeat(mesh.session)
    await other_server(store)
    found = time.time()
    with pytest.raises(StoreUnavailable, match="re-registered"):
        await mesh.admit(1)
    noted = time.time()
    with pytest.raises(StoreUnavailable):
        await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    assert await store.trajectories.lease(mesh.session, 2) == []
    assert (await store.mesh.view()).recovering
    assert await store.sessions.heartbeat(mesh.session) == before, "the run_id of the server as it is"
    state = await store.training.reassert(mesh.trainer, 0, 0, [], [policy(0)], Cursor())
    assert state.recovering, "one TTL has to pass"
    assert not await store.recovery.waits_for_trainer()
    await ends_one_ttl_after(store, "recovering_until", found, noted)
    assert not (await store.mesh.view()).recovering
    assert await mesh.admit(1) == 1
    await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])


async def test_a_recovery_waits_for_the_trainer_unless_it_has_left(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, session_ttl_seconds=0.01)
    await other_server(store)
    assert await store.recovery.begin()
    await asyncio.sleep(0.05)
    assert await store.recovery.begin()
    assert await store.recovery.waits_for_trainer()
    await store.training.close_session(mesh.trainer)
    assert not await store.recovery.begin()


async def test_nothing_is_reaped_within_one_ttl_of_a_recovery(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, session_ttl_seconds=TTL, groups=1, leased=2)
    await other_server(store)
    await store.training.reassert(mesh.trainer, 0, 0, [], [], Cursor())
    keys = store.connection.keys
    await store.connection.command("ZADD", keys.single("sessions"), 1, mesh.session)
    await store.connection.command("HSET", keys.single("meta"), "leader_since", 1)
    assert await store.leadership.reap(mesh.leader) == 0
    await store.connection.command("HSET", keys.single("meta"), "recovering_until", 1)
    before = time.time()
    assert not (await store.mesh.view()).recovering
    after = time.time()
    assert await store.leadership.reap(mesh.leader) == 0
    await ends_one_ttl_after(store, "quiet_until", before, after)
    assert await store.leadership.reap(mesh.leader) == 2


async def test_a_forgotten_session_is_opened_again_during_a_recovery_only(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1)
    with pytest.raises(SessionLost):
        await store.sessions.reregister("f" * 32, [held("e0-0.0")])
    await other_server(store)
    assert (await store.sessions.reregister("f" * 32, [held("e0-0.0", segment(3))], "worker"))[0].kept
    mesh.session = "f" * 32
    assert await mesh.append("e0-0.0", 0, 3) == WriteStatus.SAVED


async def test_a_pool_that_shrank_after_a_restart_costs_no_tokens_of_those_leased_before(
    durable_server: EmbeddedServer, durable_store: TrajectoryStore
) -> None:
    store = durable_store
    mesh = await Mesh.start(store, pool_size=4, groups=2, session_ttl_seconds=TTL)
    come_back = earlier_state(durable_server)
    held_by_worker = []
    for item in await store.trajectories.lease(mesh.session, 4):
        assert await mesh.append(item.trajectory.trajectory_id, 0, 3) == WriteStatus.SAVED
        held_by_worker.append(held(item.trajectory.trajectory_id, segment(3)))
    come_back()
    assert (await store.mesh.view()).leased == 0, "the leases are in the lost part"
    await store.leadership.set_desired(mesh.leader, Desired(pool_size=2))
    answers = await store.sessions.reregister(mesh.session, held_by_worker, "worker")
    assert [answer.kept for answer in answers] == [True] * 4
    assert (await store.mesh.view()).leased == 4
    await store.training.reassert(mesh.trainer, 0, 0, [], [policy(0)], Cursor())
    await store.connection.command("HSET", store.connection.keys.single("meta"), "recovering_until", 1)
    assert await store.trajectories.lease(mesh.session, 1) == [], "the pool is full until three have ended"
    await store.trajectories.release(mesh.session, [item.trajectory_id for item in held_by_worker[:1]], "drained")
    answers = await store.sessions.reregister(mesh.session, held_by_worker, "worker")
    assert [answer.kept for answer in answers] == [False, True, True, True], "others may have its place by now"


async def test_a_redis_that_forgot_a_rollback_drops_the_abandoned_work_again(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await store.policies.announce(mesh.trainer, policy(1))
    await mesh.admit(3)
    await mesh.complete_all(version=1)
    await other_server(store)
    policies = [policy(0), policy(1), policy(2, train_step=1)]
    await store.training.reassert(mesh.trainer, 0, 0, [], policies, Cursor())
    assert (await store.mesh.counts()).drops == {"rolled_back": 3}
    assert (await store.leadership.desired()).start_at_version == 2
    await store.training.reassert(mesh.trainer, 0, 0, [], policies, Cursor())
    assert (await store.mesh.counts()).drops == {"rolled_back": 3}


@pytest.mark.parametrize("restored", ["unknown", "open", "ready", "cut"])
async def test_batch_files_win_over_whatever_redis_restored(store: TrajectoryStore, restored: str) -> None:
    mesh = await Mesh.start(store)
    if restored != "unknown":
        await mesh.admit(4)
        await store.trajectories.lease(mesh.session, 1)
    if restored in ("ready", "cut"):
        await store.trajectories.release(mesh.session, ["e0-0.0"], "drained")
        await mesh.complete_all()
    if restored == "cut":
        await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-3"])
    await other_server(store)
    batches = [(1, ["e0-0", "e0-1"]), (2, ["e0-2"])]
    policies = [policy(v) for v in range(3)]
    for _ in range(2):
        state = await store.training.reassert(mesh.trainer, 1, 1, batches, policies, Cursor(index=4))
        assert (state.trained_step, state.cut_step, state.committed_step) == (1, 2, 1)
    truth = await read_truth(store)
    assert truth.problems == []
    assert truth.tombstones == {"e0-0", "e0-1"}
    assert truth.groups["e0-2"] == "cut"
    if restored == "cut":
        assert truth.groups["e0-3"] == "ready", "the cut gave way to the batch file"
    assert (await store.policies.latest()) == policy(2)
    # The replay of step 2 is the one training of its groups.
    await store.training.confirm_batch_file(mesh.trainer, 2, "digest of the file")
    await store.training.report_trained(mesh.trainer, 2)
    assert (await read_truth(store)).tombstones == {"e0-0", "e0-1", "e0-2"}
    assert (await store.mesh.view()).trained_step == 2


async def test_no_leader_finds_groups_of_a_batch_file_while_it_is_re_asserted(store: TrajectoryStore) -> None:
    """A trainer that died between its batch file and the confirmation starts again: no recovery holds leaders off."""
    mesh = await Mesh.start(store, max_staleness=0, groups=3, completed=True)
    ids = ["e0-0", "e0-1"]
    await store.leadership.cut(mesh.leader, 1, ids)
    trainer = await store.training.open_session("restarted")
    await store.connection.run("reassert_groups", trainer, 1, "digest", 0, *ids)
    assert [g.group_id for g in (await store.mesh.view()).ready] == ["e0-2"]
    assert await store.leadership.evict(mesh.leader, ids, "stale") == 0
    await store.training.reassert(trainer, 0, 0, [(1, ids)], [policy(0)], Cursor(index=3), digests=["digest"])
    truth = await read_truth(store)
    assert (truth.problems, truth.groups) == ([], {"e0-0": "cut", "e0-1": "cut", "e0-2": "ready"})
    await store.training.report_trained(trainer, 1)
    assert (await store.mesh.counts()).drops == {}


async def test_a_redis_that_forgets_steps_while_it_is_told_of_later_ones_only_is_told_again(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store, groups=2)
    await store.training.reassert(mesh.trainer, 1, 1, [(1, ["e0-0", "e0-1"])], [], Cursor(index=2))
    known = (await store.training.state()).trained_step
    later = [(2, ["e0-2", "e0-3"])]
    await store.training.reassert(mesh.trainer, 1, 2, later, [], Cursor(index=4), known_step=known)
    assert (await store.training.state()).trained_step == 2
    await store.connection.command("HSET", store.connection.keys.single("meta"), "trained_step", 0)
    with pytest.raises(StoreUnavailable, match="its trained step was 1 and is now 0"):
        await store.training.reassert(mesh.trainer, 1, 2, later, [], Cursor(index=4), known_step=known)


async def test_a_batch_file_wins_over_an_eviction_that_came_first(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=2, completed=True)
    assert await store.leadership.evict(mesh.leader, ["e0-0"], "stale") == 1
    for _ in range(2):
        await store.training.reassert(mesh.trainer, 0, 0, [(1, ["e0-0", "e0-1"])], [policy(0)], Cursor(index=2))
    truth = await read_truth(store)
    assert (truth.problems, truth.groups) == ([], {"e0-0": "cut", "e0-1": "cut"})
    await store.training.report_trained(mesh.trainer, 1)
    assert await store.leadership.evict(mesh.leader, ["e0-0", "e0-1"], "late") == 0
    assert (await read_truth(store)).tombstones == {"e0-0", "e0-1"}


async def test_a_batch_file_that_was_written_after_another_cut_is_refused(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=4, completed=True)
    await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    await store.training.claim(mesh.trainer, 1, 1.0)
    # Redis came back without the cut, and the leader has cut other groups since.
    meta = store.connection.keys.single("meta")
    await store.connection.run("roll_back", mesh.trainer, 1, "takes the cut back")
    await store.connection.command("HDEL", meta, "abandoned_to")
    await store.leadership.cut(mesh.leader, 1, ["e0-2", "e0-3"])
    with pytest.raises(RuntimeError, match="other groups"):
        await store.training.confirm_batch_file(mesh.trainer, 1, "digest")
    # The file is on disk, so it counts.
    await store.training.reassert(mesh.trainer, 0, 0, [(1, ["e0-0", "e0-1"])], [], Cursor(index=4))
    truth = await read_truth(store)
    assert truth.groups == {"e0-0": "cut", "e0-1": "cut", "e0-2": "ready", "e0-3": "ready"}
    await store.training.confirm_batch_file(mesh.trainer, 1, "digest")
    await store.training.report_trained(mesh.trainer, 1)


async def test_a_trainer_session_that_was_lost_is_adopted_and_a_fenced_one_is_not(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    newest = "a" * 32
    with pytest.raises(SessionLost):
        await store.training.reassert(newest, 0, 0, [], [], Cursor())
    await other_server(store)
    await store.training.reassert(newest, 0, 0, [], [], Cursor())
    with pytest.raises(SessionLost):
        await store.training.reassert(mesh.trainer, 0, 0, [], [], Cursor())


async def test_a_clean_stop_needs_no_recovery_and_keeps_everything(
    durable_server: EmbeddedServer, durable_store: TrajectoryStore
) -> None:
    await Mesh.start(durable_store, groups=2, completed=True)
    await durable_store.recovery.mark_clean_shutdown()
    before = await durable_store.recovery.server_run_id()
    durable_server.stop()
    durable_server.start()
    assert await durable_store.recovery.server_run_id() != before
    view = await durable_store.mesh.view()
    assert (view.recovering, view.ready_groups) == (False, 2)
    # The mark holds for one start.
    durable_server.kill()
    durable_server.start()
    assert (await durable_store.mesh.view()).recovering


async def test_an_announced_stop_has_no_effect_once_a_trainer_works_again(
    durable_server: EmbeddedServer, durable_store: TrajectoryStore
) -> None:
    mesh = await Mesh.start(durable_store)
    await durable_store.recovery.mark_clean_shutdown()
    await durable_store.sessions.heartbeat(mesh.session)
    await mesh.admit(1)
    durable_server.kill()
    durable_server.start()
    assert (await durable_store.mesh.view()).recovering


async def test_a_call_waits_for_an_unreachable_server_and_finds_its_work(
    durable_server: EmbeddedServer, durable_store: TrajectoryStore
) -> None:
    mesh = await Mesh.start(durable_store, groups=1, leased=2)
    await asyncio.to_thread(durable_server.kill)
    waiting = asyncio.create_task(mesh.append("e0-0.0", 0, 4))
    claiming = asyncio.create_task(durable_store.training.claim(mesh.trainer, 1, 1.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await asyncio.to_thread(durable_server.start)
    assert await waiting in (WriteStatus.SAVED, WriteStatus.LOST)
    assert await claiming is None


async def test_redis_reaching_maxmemory_loses_nothing(
    durable_server: EmbeddedServer, durable_store: TrajectoryStore
) -> None:
    mesh = await Mesh.start(durable_store, groups=3)
    leased = await durable_store.trajectories.lease(mesh.session, 4)
    await mesh.complete(leased[0], 0.0)
    await mesh.append("e0-0.1", 0, 4)
    await mesh.finish("e0-0.1", 4, 0)
    await mesh.append("e0-1.0", 0, 4)
    await durable_store.connection.command("CONFIG", "SET", "maxmemory", "1mb")
    for refused in (
        durable_store.leadership.admit(mesh.leader, [group(3)], Cursor(index=3), Cursor(index=4)),
        durable_store.trajectories.lease(mesh.session, 1),
        mesh.append("e0-1.0", 4, 2),
        mesh.finish("e0-1.1", 0, 2),
    ):
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            await refused
    assert (await durable_store.mesh.view()).memory_ratio > 1
    # What frees memory still works.
    assert await durable_store.trajectories.release(mesh.session, ["e0-0.1"]) == 1
    assert len(await durable_store.trajectories.lease_scoring(mesh.session, 1)) == 1
    assert await mesh.score("e0-0.1", 1.0) == WriteStatus.SAVED
    await durable_store.sessions.heartbeat(mesh.session)
    await durable_store.leadership.set_desired(mesh.leader, Desired(pool_size=1, paused=True))
    await durable_store.leadership.cut(mesh.leader, 1, ["e0-0"])
    assert await durable_store.training.claim(mesh.trainer, 1, 1.0) is not None
    await durable_store.training.confirm_batch_file(mesh.trainer, 1, "d")
    await durable_store.training.report_trained(mesh.trainer, 1)
    assert await durable_store.leadership.evict(mesh.leader, ["e0-2"], "straggler") == 1
    await durable_store.connection.command("CONFIG", "SET", "maxmemory", "64mb")
    assert await mesh.append("e0-1.0", 4, 2) == WriteStatus.SAVED
    assert (await read_truth(durable_store)).problems == []


async def test_every_service_can_restart_while_redis_is_full_and_the_trainer_then_frees_memory(
    durable_server: EmbeddedServer, durable_store: TrajectoryStore
) -> None:
    mesh = await Mesh.start(durable_store, groups=4, completed=True)
    await durable_store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    await durable_store.training.claim(mesh.trainer, 1, 1.0)
    await durable_store.training.confirm_batch_file(mesh.trainer, 1, "d1")
    await durable_store.connection.command("CONFIG", "SET", "maxmemory", "1mb")
    run = durable_store.connection.keys.run
    async with await TrajectoryStore.connect(StoreConfig(), run=run, url=durable_server.url) as fresh:
        await fresh.limits.init_run(limits())
        with pytest.raises(Conflict, match="group_size"):
            await fresh.limits.init_run(limits(group_size=3))
        worker = await fresh.sessions.open("restarted")
        await fresh.sessions.heartbeat(worker)
        await durable_store.leadership.resign(mesh.leader)
        leader = await fresh.leadership.acquire("restarted")
        assert leader is not None
        await fresh.leadership.set_desired(leader, Desired(pool_size=1))
        await fresh.evaluations.request(EvalRequest(evaluation_id="end", policy_version=0, prompt_count=1))
        trainer = await fresh.training.open_session("restarted", lineage="checkpoints")
        batches = [(1, ["e0-0", "e0-1"])]
        await fresh.training.reassert(trainer, 0, 0, batches, [policy(0)], Cursor(), digests=["d1"])
        await fresh.training.report_trained(trainer, 1)
        await fresh.policies.announce(trainer, policy(1))
        await fresh.leadership.cut(leader, 2, ["e0-2", "e0-3"])
        assert await fresh.training.claim(trainer, 2, 1.0) is not None
        await fresh.training.confirm_batch_file(trainer, 2, "d2")
        await fresh.training.report_trained(trainer, 2)
    truth = await read_truth(durable_store)
    assert (truth.problems, truth.members) == ([], {}), "nothing is left of what was trained"
