"""What an operator reads about a trajectory: restarts, waits for a long round, rests, cut-off and drop."""

from __future__ import annotations

from rollmesh.store import ReleaseReason, TrajectoryStore

from .store_mesh import Mesh, policy
from .test_restarted_groups import train_one_step


async def sentences(store: TrajectoryStore, trajectory_id: str) -> list[str]:
    inspected = await store.inspection.inspect(trajectory_id)
    assert inspected is not None
    return list(inspected.history.sentences())


async def test_a_trajectory_tells_how_often_its_group_and_its_worker_restarted_it(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_staleness=0)
    await train_one_step(mesh)
    await mesh.admit(1)
    assert await sentences(store, "e0-2.0") == []
    for _ in range(2):
        await store.trajectories.lease(mesh.session, 2)
        await mesh.append("e0-2.0", 0, 3)
        await store.restarted.restart(mesh.leader, ["e0-2"])
    again = ["restarted 2 times with its group, which exceeded the staleness bound"]
    assert await sentences(store, "e0-2.0") == again
    await store.trajectories.lease(mesh.session, 2)
    await mesh.append("e0-2.1", 0, 3)
    await store.trajectories.restart(mesh.session, ["e0-2.1"])
    assert await sentences(store, "e0-2.1") == [*again, "restarted once by its worker"]
    await mesh.append("e0-2.1", 0, 3)
    await store.restarted.set_aside(mesh.leader, ["e0-2"])
    aside = "set aside once with its group, which exceeded the staleness bound"
    assert await sentences(store, "e0-2.1") == [*again, f"{aside}: it waits for a long round"]
    await store.restarted.recall(mesh.leader, 2, 1)
    assert await sentences(store, "e0-2.1") == [*again, aside]


async def test_a_rest_and_a_cut_off_are_told_and_a_cut_off_trajectory_has_no_tokens(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await store.policies.announce(mesh.trainer, policy(1))
    await mesh.admit(1, spare=1)
    first, second, third = await store.trajectories.lease(mesh.session, 3)
    spare = third.trajectory.trajectory_id
    await mesh.append(spare, 0, 4, version=1)
    await store.trajectories.release(mesh.session, [spare], ReleaseReason.RESTED)
    resting = "resting since train step 1: it continues under a newer policy, or when nothing else can run"
    assert await sentences(store, spare) == [resting]
    assert (await store.mesh.counts()).oldest_rest_step == 1
    await mesh.complete(first, 1.0)
    await mesh.complete(second, 0.0)
    surplus = "surplus: cut off unfinished, because enough other members of its group were scored"
    assert await sentences(store, spare) == [surplus]
    found = await store.inspection.inspect(spare)
    assert found is not None and found.trajectory is not None
    assert (found.mark.token_count, found.trajectory.response_token_count) == (4, 0)
    assert (await store.mesh.counts()).oldest_rest_step is None


async def test_the_newest_drop_of_a_group_is_found_on_any_page_of_the_ledger(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(5)
    for index, reason in enumerate(["stale", "straggler_timeout", "stale", "run_complete"]):
        await store.leadership.evict(mesh.leader, [f"e0-{index}"], reason)
    drops = [await store.ledger.newest_drop(f"e0-{index}", page=2) for index in range(5)]
    assert [drop.reason if drop else None for drop in drops] == [
        "stale",
        "straggler_timeout",
        "stale",
        "run_complete",
        None,
    ]
