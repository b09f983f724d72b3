"""Leadership, admission, failures of the leader and the registry, on a real server."""

import asyncio

import pytest

from rollmesh.errors import Conflict, SessionLost
from rollmesh.mesh import Cursor, Desired
from rollmesh.store import EvalRequest, EvalResult, TrajectoryStore
from rollmesh.store.policy_registry import HeldPin

from .store_mesh import Mesh, group, policy
from .stored_keys import read_truth


async def expire(store: TrajectoryStore, session: str) -> None:
    """Let a session's time run out, and the grace of a new leader."""
    keys = store.connection.keys
    await store.connection.command("ZADD", keys.single("sessions"), "XX", 1, session)
    await store.connection.command("HSET", keys.single("meta"), "leader_since", 1)


async def test_one_leader_at_a_time_and_a_former_one_is_refused(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    assert await store.leadership.acquire("other") is None
    assert await store.leadership.renew(mesh.leader)
    await store.leadership.resign(mesh.leader)
    second = await store.leadership.acquire("other")
    assert second is not None
    assert not await store.leadership.renew(mesh.leader)
    with pytest.raises(SessionLost):
        await mesh.admit(1)
    with pytest.raises(SessionLost):
        await store.leadership.set_desired(mesh.leader, Desired(pool_size=1))
    with pytest.raises(SessionLost):
        await store.leadership.reap(mesh.leader)


async def test_a_retried_admission_is_counted_once(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    words = ("e0-0", 2, 2, 0, 0, b"prompt", "", "", "", "", "")
    once = await store.connection.run("admit", mesh.leader, "n", 0, 0, 0, 1, 1, *words)
    twice = await store.connection.run("admit", mesh.leader, "n", 0, 0, 0, 1, 1, *words)
    assert (once, twice) == (1, 1)
    assert (await store.mesh.view()).open_groups == 1


async def test_a_queue_serves_the_checkpoint_store_that_it_was_filled_for_and_no_other(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    first = await store.training.open_session("first", lineage="a" * 64)
    with pytest.raises(Conflict, match="another checkpoint store"):
        await store.training.open_session("stranger", lineage="b" * 64)
    await store.policies.announce(first, policy(0))
    again = await store.training.open_session("first", lineage="a" * 64)
    await store.policies.announce(again, policy(1))
    for fenced in (
        lambda: store.policies.announce(mesh.trainer, policy(2)),
        lambda: store.training.claim(mesh.trainer, 1, 0.01),
        lambda: store.training.report_trained(mesh.trainer, 1),
    ):
        with pytest.raises(SessionLost):
            await fenced()


async def test_versions_are_announced_in_order_and_once(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await store.policies.announce(mesh.trainer, policy(0))
    with pytest.raises(Conflict, match="the next one is 1"):
        await store.policies.announce(mesh.trainer, policy(2))
    with pytest.raises(Conflict, match="exists already"):
        await store.policies.announce(mesh.trainer, policy(0, train_step=3))
    waiting = asyncio.create_task(store.policies.wait(0, 60.0))
    await asyncio.sleep(0)
    await store.policies.announce(mesh.trainer, policy(1))
    assert await waiting == policy(1)
    assert await store.policies.wait(1, 0.02) is None
    assert await store.policies.announced() == [policy(0), policy(1)]
    assert await store.policies.latest() == policy(1)
    assert await store.policies.get(0) == policy(0)
    assert await store.policies.get(7) is None
    await store.policies.pin(0)
    assert (await store.policies.pinned(), (await store.policies.outlook()).pinned) == (0, policy(0))
    with pytest.raises(Conflict):
        await store.policies.pin(9)
    assert await store.policies.held_pin() == HeldPin(policy_version=0, owner="")
    await store.policies.pin(None)
    assert await store.policies.held_pin() is None
    await store.policies.pin(0, "evaluation-1")
    assert await store.policies.held_pin() == HeldPin(policy_version=0, owner="evaluation-1")
    await store.policies.pin(None)
    outlook = await store.policies.outlook()
    assert (outlook.pinned, outlook.newest) == (None, policy(1))


async def test_expired_sessions_are_reaped_after_the_grace_of_a_new_leader(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=2, leased=4)
    await mesh.append("e0-0.0", 0, 4)
    await mesh.finish("e0-0.1", 0, 4)
    await store.connection.command("ZADD", store.connection.keys.single("sessions"), "XX", 1, mesh.session)
    assert await store.leadership.reap(mesh.leader) == 0, "a new leader waits one TTL"
    await expire(store, mesh.session)
    assert await store.leadership.reap(mesh.leader) == 4
    assert await store.leadership.reap(mesh.leader) == 0
    view = await store.mesh.view()
    assert (view.leased, view.partial, view.pending, view.finished) == (0, 1, 2, 1)
    assert await mesh.append("e0-0.0", 4, 2) == 4, "late results of a dead session are refused"


async def test_the_view_has_the_pin_and_its_only_generator(store: TrajectoryStore) -> None:
    await Mesh.start(store)

    async def pin() -> tuple[int | None, str]:
        seen = await store.mesh.view(groups=False)
        return seen.pinned_version, seen.pinned_instance

    assert await pin() == (None, "")
    await store.policies.pin(0, "evaluation-1", "generator-1")
    assert await pin() == (None, ""), "a generator that is not registered pins none"
    expiry = store.connection.keys.single("generator_expiry")
    await store.connection.command("ZADD", expiry, 1, "generator-1")
    assert await pin() == (None, ""), "nor does one that has died"
    await store.connection.command("ZADD", expiry, 1 << 52, "generator-1")
    assert await pin() == (0, "generator-1")
    await store.policies.pin(0)
    assert await pin() == (0, "")
    await store.policies.pin(None)
    assert await pin() == (None, "")


async def test_blocked_since_restarts_with_another_set_and_is_cleared(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    keys, desired = store.connection.keys, Desired(pool_size=1)

    async def blocked() -> tuple[str, float | None]:
        seen = await store.mesh.view(groups=False)
        return seen.blocked_by, seen.blocked_since

    await store.leadership.set_desired(mesh.leader, desired, "due 1")
    name, since = await blocked()
    assert name == "due 1"
    assert since is not None
    earlier = f"{int(since * 1000) - 5000} due 1"
    await store.connection.command("HSET", keys.single("meta"), "blocked_since", earlier)
    await store.leadership.set_desired(mesh.leader, desired, "due 1")
    assert await blocked() == ("due 1", pytest.approx(since - 5, abs=0.002))
    await store.leadership.set_desired(mesh.leader, desired, "due 2")
    name, renewed = await blocked()
    assert name == "due 2"
    assert renewed is not None
    assert renewed >= since
    await store.leadership.set_desired(mesh.leader, desired)
    assert await blocked() == ("", None)


async def test_a_leader_that_renews_an_expired_lease_waits_one_ttl_before_it_reaps(store: TrajectoryStore) -> None:
    """Its workers lost Redis with it, and have not sent a heartbeat yet."""
    mesh = await Mesh.start(store, groups=2, leased=4)
    await expire(store, mesh.session)
    await store.connection.command("HSET", store.connection.keys.single("meta"), "leader_until", 1)
    assert await store.leadership.renew(mesh.leader)
    assert await store.leadership.reap(mesh.leader) == 0
    await expire(store, mesh.session)
    assert await store.leadership.reap(mesh.leader) == 4


@pytest.mark.parametrize("gap", ["resigned", "expired", "expired and renewed"])
async def test_the_straggler_time_starts_again_after_a_time_without_a_leader(store: TrajectoryStore, gap: str) -> None:
    mesh = await Mesh.start(store)
    meta, command = store.connection.keys.single("meta"), store.connection.command
    await store.leadership.set_desired(mesh.leader, Desired(pool_size=1), "due 1")
    since = (await store.mesh.view()).blocked_since
    assert since is not None
    an_hour_ago = int(since * 1000) - 3_600_000
    await command("HSET", meta, "blocked_since", f"{an_hour_ago} due 1")
    assert await store.leadership.renew(mesh.leader)
    assert (await store.mesh.view()).blocked_since == pytest.approx(an_hour_ago / 1000), "it has led all the time"

    leader: str | None = mesh.leader
    if gap == "resigned":
        await store.leadership.resign(mesh.leader)
    else:
        await command("HSET", meta, "leader_until", 1)
    if gap == "expired and renewed":
        assert await store.leadership.renew(mesh.leader)
    else:
        leader = await store.leadership.acquire("other")
    assert leader is not None
    assert (await store.mesh.view()).blocked_since is None
    await store.leadership.set_desired(leader, Desired(pool_size=1), "due 1")
    renewed = (await store.mesh.view()).blocked_since
    assert renewed is not None
    assert renewed >= since


async def test_blocked_since_from_before_the_clock_was_set_back_is_void(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await store.leadership.set_desired(mesh.leader, Desired(pool_size=1), "due 1")
    ahead = f"{int((await store.mesh.view()).now * 1000) + 3_600_000} due 1"
    await store.connection.command("HSET", store.connection.keys.single("meta"), "blocked_since", ahead)
    assert (await store.mesh.view()).blocked_since is None
    await store.leadership.set_desired(mesh.leader, Desired(pool_size=1), "due 1")
    seen = await store.mesh.view()
    assert seen.blocked_since is not None
    assert seen.blocked_since <= seen.now


async def test_who_leads_after_a_failure_counts_from_zero(store: TrajectoryStore) -> None:
    """Or a run that ended for its filtered groups could never be continued, whatever was mended."""
    mesh = await Mesh.start(store, filter_zero_variance=True, groups=1)
    for leased in await store.trajectories.lease(mesh.session, 2):
        await mesh.complete(leased, 1.0)
    await store.leadership.resign(mesh.leader)
    leader = await store.leadership.acquire("takes over")
    assert leader is not None
    assert (await store.mesh.view()).filtered_in_a_row == 1, "a change of the leader alone changes nothing"
    await store.leadership.report_failure(leader, "1 groups filtered in a row")
    assert await store.leadership.failure() == "1 groups filtered in a row"
    await store.leadership.resign(leader)
    assert await store.leadership.acquire("second start") is not None
    assert (await store.mesh.view()).filtered_in_a_row == 0
    assert await store.leadership.failure() == "", "it counts while its reporter leads"


async def test_an_evaluation_is_done_once_even_if_its_worker_dies(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    request = EvalRequest(evaluation_id="before", policy_version=0, prompt_count=16)
    for _ in range(2):
        await store.evaluations.request(request)
    with pytest.raises(Conflict):
        await store.evaluations.request(EvalRequest(evaluation_id="before", policy_version=1, prompt_count=16))
    assert await store.evaluations.claim(mesh.session) == request
    assert await store.evaluations.claim(mesh.session) == request
    other = await store.sessions.open("other")
    assert await store.evaluations.claim(other) is None
    await store.sessions.close(mesh.session)
    assert await store.evaluations.claim(other) == request
    result = EvalResult(mean=0.5, standard_error=0.1, sample_count=16)
    with pytest.raises(SessionLost):
        await store.evaluations.finish(mesh.session, "before", result)
    for _ in range(2):
        await store.evaluations.finish(other, "before", result)
    record = (await store.evaluations.all())[0]
    assert (record.request, record.result, record.claimed) == (request, result, False)
    assert await store.evaluations.claim(other) is None


async def test_tombstones_become_a_floor_below_which_nothing_is_admitted_again(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_staleness=1000, groups=4, completed=True)
    for step in range(1, 4):
        await mesh.train(step, [f"e0-{step - 1}"], tombstone_steps=1)
    assert (await read_truth(store)).tombstones == {"e0-1", "e0-2"}
    await store.connection.command("HSET", store.connection.keys.single("meta"), "cursor_index", 0)
    groups = [group(i) for i in range(6)]
    assert await store.leadership.admit(mesh.leader, groups, Cursor(), Cursor(index=6)) == 2
    assert sorted(await store.mesh.live_groups()) == ["e0-3", "e0-4", "e0-5"]


async def test_a_tombstone_past_a_restored_cursor_moves_no_floor(store: TrajectoryStore) -> None:
    """Redis lost everything: batch files name e0-3 and e0-4, and e0-0 to e0-2 were in flight."""
    mesh = await Mesh.start(store)
    batches = [(1, ["e0-3"]), (2, ["e0-4"])]
    await store.training.reassert(mesh.trainer, 1, 1, batches, [], Cursor(index=5))
    await store.training.confirm_batch_file(mesh.trainer, 2, "d", ["e0-4"])
    # Keep the tombstones of no step before this one.
    await store.connection.run("report_trained", mesh.trainer, 2, 0)
    groups = [group(i) for i in range(5)]
    assert await store.leadership.admit(mesh.leader, groups, Cursor(), Cursor(index=5)) == 3
    assert sorted(await store.mesh.live_groups()) == ["e0-0", "e0-1", "e0-2"]


async def test_admission_moves_the_cursor_once(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    assert await store.leadership.admit(mesh.leader, [group(0), group(1)], Cursor(), Cursor(index=2)) == 2
    with pytest.raises(Conflict, match="cursor"):
        await store.leadership.admit(mesh.leader, [group(0)], Cursor(), Cursor(index=1))
    assert (
        await store.leadership.admit(
            mesh.leader, [group(1), group(0, epoch=1)], Cursor(index=2), Cursor(epoch=1, index=1)
        )
        == 1
    )
    assert await store.leadership.cursor() == Cursor(epoch=1, index=1)
    assert (await store.mesh.view()).open_groups == 3
