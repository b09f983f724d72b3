"""Rollbacks of the queue to an older policy, on a real server."""

import itertools

import pytest

from rollmesh.errors import Conflict
from rollmesh.mesh import Cursor, Desired
from rollmesh.store import TrajectoryStore

from .store_mesh import Mesh, limits, policy
from .stored_keys import read_truth


async def test_no_leader_cuts_the_abandoned_branch_between_two_slices_of_a_rollback(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=6, completed=True)
    await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    # The first calls of a rollback whose trainer dies: it takes the cut back, then drops a group.
    for answer in ([0, 1], [1, 1]):
        assert await store.connection.run("roll_back", mesh.trainer, 1, "first") == answer
        view = await store.mesh.view()
        assert (view.cut_step, view.ready) == (0, ())
        assert (await read_truth(store)).problems == [], "the groups of the cut are ready with their tokens"
        with pytest.raises(Conflict, match="abandons"):
            await store.leadership.cut(mesh.leader, 1, ["e0-1", "e0-2"])
    restarted = await store.training.open_session("restarted")
    await store.training.reassert(restarted, 0, 0, [], [policy(0)], Cursor())
    assert (await store.mesh.counts()).drops == {"rolled_back": 6}
    await mesh.admit(2)
    await mesh.complete_all()
    await store.leadership.cut(mesh.leader, 1, ["e0-6", "e0-7"])
    assert await store.training.claim(restarted, 1, 1.0) is not None


async def test_two_rollbacks_at_once_both_come_to_an_end(store: TrajectoryStore) -> None:
    """The trainer re-asserts what a restored Redis has forgotten while it carries out a request."""
    mesh = await Mesh.start(store, groups=6)
    left = {"first": 1, "second": 1}
    for nonce in itertools.islice(itertools.cycle(left), 40):
        if left[nonce]:
            _, left[nonce] = await store.connection.run("roll_back", mesh.trainer, 1, nonce)
    assert left == {"first": 0, "second": 0}
    assert (await store.mesh.counts()).drops == {"rolled_back": 6}


async def test_the_last_call_of_a_rollback_sent_again_drops_nothing(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1)
    assert await store.connection.run("roll_back", mesh.trainer, 8, "once") == [1, 0]
    await mesh.admit(2)
    await mesh.complete_all()
    assert await store.connection.run("roll_back", mesh.trainer, 8, "once") == [0, 0]
    await store.leadership.cut(mesh.leader, 1, ["e0-1", "e0-2"])


async def test_no_leader_can_lower_the_floor_that_a_rollback_sets(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    for version, train_step in ((1, 1), (2, 2)):
        await store.policies.announce(mesh.trainer, policy(version, train_step))
    assert (await store.leadership.desired()).start_at_version == 0
    await store.policies.announce(mesh.trainer, policy(3, train_step=2))
    assert (await store.leadership.desired()).start_at_version == 3
    # A leader that looked at the mesh before the rollback.
    await store.leadership.set_desired(mesh.leader, Desired(pool_size=8, start_at_version=1))
    assert (await store.leadership.desired()).start_at_version == 3
    await store.policies.announce(mesh.trainer, policy(4, train_step=3))
    assert (await store.leadership.desired()).start_at_version == 3
    await store.leadership.set_desired(mesh.leader, Desired(pool_size=8, start_at_version=4))
    assert (await store.leadership.desired()).start_at_version == 4


async def test_a_rollback_off_an_unpublished_step_sets_the_floor(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await store.policies.announce(mesh.trainer, policy(1))
    # Steps 2 and 3 were trained and reported, but their policies were not finite.
    await store.policies.announce(mesh.trainer, policy(2, train_step=3, rollbacks=1))
    assert (await store.leadership.desired()).start_at_version == 2
    assert (await store.policies.outlook()).required_version == 2
    await store.policies.announce(mesh.trainer, policy(3, train_step=4, rollbacks=1))
    assert (await store.leadership.desired()).start_at_version == 2
    await store.policies.announce(mesh.trainer, policy(4, train_step=6, rollbacks=2))
    assert (await store.leadership.desired()).start_at_version == 4


@pytest.mark.parametrize("announced", [0, 1])
async def test_a_redis_without_a_rollback_off_an_unpublished_step_drops_the_abandoned_work(
    store: TrajectoryStore, announced: int
) -> None:
    mesh = await Mesh.start(store)
    policies = [policy(0), policy(1), policy(2, train_step=3, rollbacks=1), policy(3, train_step=4, rollbacks=1)]
    for record in policies[1 : announced + 1]:
        await store.policies.announce(mesh.trainer, record)
    await mesh.admit(3)
    # The trainer has pruned version 1.
    await store.training.reassert(mesh.trainer, 0, 0, [], [policies[0], *policies[announced + 1 :]], Cursor())
    assert (await store.mesh.counts()).drops == {"rolled_back": 3}
    assert (await store.leadership.desired()).start_at_version == 2
    await mesh.admit(1)
    await store.training.reassert(mesh.trainer, 0, 0, [], policies, Cursor())
    assert (await store.mesh.counts()).drops == {"rolled_back": 3}


@pytest.mark.parametrize(("kept", "dropped"), [((0, 5, 6), 0), ((0, 4, 5), 1)])
async def test_an_empty_redis_drops_work_only_near_a_rollback(
    store: TrajectoryStore, kept: tuple[int, ...], dropped: int
) -> None:
    """Version 5 is the first one after a rollback; the trainer keeps the newest policies and version 0."""
    await store.limits.init_run(limits())
    trainer = await store.training.open_session("trainer")
    leader = await store.leadership.acquire("rollout")
    assert leader is not None
    mesh = Mesh(store, leader=leader, trainer=trainer, session=await store.sessions.open("worker"))
    await mesh.admit(1)
    policies = [policy(version, version + (version > 4), rollbacks=int(version > 4)) for version in kept]
    await store.training.reassert(trainer, 0, 0, [], policies, Cursor())
    assert (await store.mesh.counts()).drops.get("rolled_back", 0) == dropped
