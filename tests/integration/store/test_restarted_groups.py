"""Groups that begin again: restarted, set aside and recalled; stale workers, crashes and the end of the run."""

import pytest

from rollmesh.mesh import Cursor
from rollmesh.prompt_history import PromptOutcome
from rollmesh.store import Append, EmbeddedServer, TokenDigest, TrajectoryStore, WriteStatus
from rollmesh.store.scripts import MAX_KEYS_PER_SCRIPT

from .store_mesh import Mesh, policy, segment
from .stored_keys import read_truth
from .test_script_keys import most_keys


async def train_one_step(mesh: Mesh) -> None:
    """Train a batch of two groups, so that tokens of version 0 exceed a bound of 0 steps."""
    store = mesh.store
    first = (await store.leadership.cursor()).index
    await mesh.admit(2)
    await mesh.complete_all()
    await mesh.train(1, [f"e0-{first}", f"e0-{first + 1}"])
    await store.policies.announce(mesh.trainer, policy(1))


async def truth_of(store: TrajectoryStore) -> dict[str, str]:
    truth = await read_truth(store)
    assert truth.problems == []
    return truth.groups


async def test_a_member_that_takes_an_earlier_members_id_refuses_its_late_saves(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_staleness=0)
    await train_one_step(mesh)
    await mesh.admit(1)
    await store.trajectories.lease(mesh.session, 2)
    await store.trajectories.fork(mesh.session, "e0-2.0", "nonce")
    await mesh.append("e0-2.0", 0, 3)
    await store.restarted.set_aside(mesh.leader, ["e0-2"])  # a recall brings two members, so the third has gone
    assert await store.restarted.recall(mesh.leader, 2, 1) == 1
    assert len(await store.trajectories.lease(mesh.session, 4)) == 2
    fork = await store.trajectories.fork(mesh.session, "e0-2.0", "nonce")
    assert (fork.leased.trajectory.trajectory_id, fork.leased.incarnation) == ("e0-2.2", 1)
    late = Append(trajectory_id="e0-2.2", token_offset=0, segments=[segment(4)], digest=TokenDigest())
    assert (await store.trajectories.append(mesh.session, [late]))[0].status is WriteStatus.REFUSED
    await store.trajectories.fail(mesh.session, [("e0-2.1", "broke")])
    replacement = [i for i in await store.trajectories.lease(mesh.session, 4)]
    assert [(i.trajectory.trajectory_id, i.incarnation) for i in replacement] == [("e0-2.3", 1)]


@pytest.mark.parametrize("members", [4, 150])
async def test_a_group_that_is_evicted_during_its_reset_counts_as_drawn_whatever_its_size(
    store: TrajectoryStore, members: int
) -> None:
    """A group of more than 100 members is reset in several steps; its leader dies after the first one."""
    mesh = await Mesh.start(store, max_staleness=0, keeps_history=True, group_size=members, pool_size=10_000)
    await train_one_step(mesh)
    await mesh.admit(1, needed=members)
    await mesh.lease_all()
    await mesh.append("e0-2.0", 0, 7)
    _, unfinished = await store.connection.run("restart_groups", mesh.leader, "e0-2")
    assert len(unfinished) == (members > 100)
    assert await store.prompt_records.read(["2"]) == {}
    assert await store.leadership.evict(mesh.leader, ["e0-2"], "stale") == 1
    record = (await store.prompt_records.read(["2"]))["2"]
    assert (record.groups, record.members, record.token_sum) == (1, 0, 0)
    assert await store.leadership.evict(mesh.leader, ["e0-2"], "stale") == 0, "a retry counts nothing again"


async def test_a_batch_file_takes_its_group_out_of_what_is_aside(store: TrajectoryStore) -> None:
    """Redis came back from before the recall: the trainer has trained the group that the queue has aside."""
    mesh = await Mesh.start(store, max_staleness=0)
    await train_one_step(mesh)
    await mesh.admit(2)
    await store.trajectories.lease(mesh.session, 4)
    await mesh.append("e0-2.0", 0, 2)
    await mesh.append("e0-3.0", 0, 2)
    await store.restarted.set_aside(mesh.leader, ["e0-2", "e0-3"])
    await store.connection.command("HSET", store.connection.keys.single("meta"), "run_id", "another")
    await store.sessions.reregister(mesh.session, [])
    policies = [policy(version) for version in range(3)]
    await store.training.reassert(mesh.trainer, 2, 2, [(2, ["e0-2"])], policies, Cursor(index=4), digests=["digest"])
    assert await truth_of(store) == {"e0-3": "aside"}
    await store.connection.command("HSET", store.connection.keys.single("meta"), "recovering_until", 1)
    groups = await store.restarted.recall(mesh.leader, 3, 2)
    assert (groups, (await store.mesh.view()).open_groups) == (1, 1)


LARGE = 150


async def large_group(store: TrajectoryStore, **changes: object) -> Mesh:
    """A group of 150 members: one is dead, two have tokens, the others are leased or pending."""
    mesh = await Mesh.start(store, pool_size=10_000, group_size=LARGE, max_staleness=0, **changes)
    await train_one_step(mesh)
    await mesh.admit(1, needed=LARGE)
    await store.trajectories.lease(mesh.session, 64)
    await store.trajectories.lease(mesh.session, 64)
    await mesh.append("e0-2.3", 0, 5)
    await mesh.append("e0-2.100", 0, 7)
    await store.trajectories.fail(mesh.session, [("e0-2.20", "broke")])
    return mesh


async def test_a_large_group_begins_again_in_slices_that_keep_to_the_bound(
    server: EmbeddedServer, store: TrajectoryStore
) -> None:
    mesh = await large_group(store)

    async def restart() -> None:
        assert await store.restarted.restart(mesh.leader, ["e0-2"]) == 1

    assert 0 < await most_keys(server, store, restart) <= MAX_KEYS_PER_SCRIPT
    assert await truth_of(store) == {"e0-2": "open"}
    view = await store.mesh.view()
    assert (view.pending, view.leased, view.unclaimed_by_step) == (LARGE, 0, ())
    assert (await store.mesh.counts()).dropped_tokens == {"restarted": 12, "dead": 0}
    assert await mesh.complete_all(version=1) == LARGE
    assert (await store.mesh.view()).ready_groups == 1


async def test_the_next_leader_completes_a_large_group_that_the_last_one_left_half_reset(
    store: TrajectoryStore,
) -> None:
    mesh = await large_group(store)
    begun, unfinished = await store.connection.run("set_aside", mesh.leader, "e0-2")
    assert (begun, unfinished) == (1, [b"e0-2"])
    assert await store.connection.run("sweep_returning", "e0-2", 40) == 1
    assert await truth_of(store) == {"e0-2": "aside"}
    assert await store.restarted.recall(mesh.leader, 2, 1) == 0, "it is not complete"
    # A worker that has not heard of it goes on with its members.
    assert await mesh.append("e0-2.3", 5, 2) is WriteStatus.SAVED
    assert await mesh.finish("e0-2.4", 0, 2) is WriteStatus.SAVED
    assert await mesh.score("e0-2.4", 1.0) is WriteStatus.LOST
    await store.trajectories.release(mesh.session, ["e0-2.5"])
    assert await truth_of(store) == {"e0-2": "aside"}
    await store.leadership.resign(mesh.leader)
    leader = await store.leadership.acquire("next")
    await store.leadership.reap(leader)
    assert (await store.mesh.counts()).dropped_tokens == {"set_aside": 16, "dead": 0}
    assert await store.restarted.recall(leader, 2, 1) == 1
    assert await truth_of(store) == {"e0-2": "open"}
    assert (await store.mesh.view()).pending == LARGE


async def test_a_large_group_that_is_half_reset_in_a_restored_redis_ends_again_under_another_name(
    store: TrajectoryStore,
) -> None:
    """A batch file has the outcome of a group whose reset is not complete in the restored state."""
    mesh = await large_group(store, keeps_history=True)
    await store.connection.run("restart_groups", mesh.leader, "e0-2")
    file = [PromptOutcome("e0-2", "2", LARGE, 0, 0, 9, 7, 1)]
    await store.training.reassert(mesh.trainer, 2, 2, [(2, ["e9-9"])], [policy(1)], Cursor(), outcomes=[file])
    await store.leadership.reap(mesh.leader)
    await mesh.complete_all(version=1)
    assert [o.group_id for o in await store.prompt_records.unsaved(mesh.trainer, 3)] == ["e0-2~0"]
    assert (await store.prompt_records.read(["2"]))["2"].groups == 1


async def test_a_large_group_that_is_evicted_while_it_is_reset_is_dropped_once(store: TrajectoryStore) -> None:
    mesh = await large_group(store)
    await store.connection.run("set_aside", mesh.leader, "e0-2")
    await store.connection.run("sweep_returning", "e0-2", 100)
    assert [await store.leadership.evict(mesh.leader, ["e0-2"], "run_complete") for _ in range(2)] == [1, 0]
    await store.leadership.reap(mesh.leader)
    assert await truth_of(store) == {}
    assert (await store.mesh.counts()).dropped_tokens == {"set_aside": 7, "run_complete": 5, "dead": 0}
    assert await store.ledger.dropped_groups() == {"e0-2": "run_complete"}
    assert await store.mesh.live_groups() == []
    keys = await store.connection.command("KEYS", store.connection.keys.of("trajectory", "*").replace("{", "\\{"))
    assert keys == []
