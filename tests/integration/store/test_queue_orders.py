"""Start order of groups and resume order of partial trajectories, as the leases show them."""

from dataclasses import replace

import pytest

from rollmesh.config import RunConfig
from rollmesh.mesh import Cursor, ResumeOrder
from rollmesh.rollout.leader_parts import StartRanking
from rollmesh.rollout.rollout_metrics import MeshMetrics
from rollmesh.runtime.metrics import Metrics
from rollmesh.scheduling import Schedule, run_limits
from rollmesh.store import NewGroup, ReleaseReason, TrajectoryStore

from .store_mesh import Mesh, group


async def admit(mesh: Mesh, groups: list[NewGroup]) -> None:
    before = await mesh.store.leadership.cursor()
    after = Cursor(epoch=groups[-1].epoch, index=groups[-1].index + 1)
    assert await mesh.store.leadership.admit(mesh.leader, groups, before, after) == len(groups)


async def lease(mesh: Mesh, limit: int = 64) -> list[str]:
    return [item.trajectory.trajectory_id for item in await mesh.store.trajectories.lease(mesh.session, limit)]


async def test_a_replayed_dead_letter_takes_its_place_among_ranked_groups(store: TrajectoryStore) -> None:
    """In blocks of 4, with the rank of its first group: eleven groups are admitted before it."""
    mesh = await Mesh.start(store, groups_per_batch=4, max_attempts=1)
    await admit(mesh, [replace(group(0), start_rank=64)])
    first, second = await lease(mesh)
    await store.trajectories.fail(mesh.session, [(first, "broke"), (second, "broke")])
    replay = await store.dead_letters.replay(first)
    ranks = [0, 0, 0, 30, 30, 30, 30, 0, 127, 64]
    await admit(mesh, [replace(group(i + 1), start_rank=rank) for i, rank in enumerate(ranks)])
    assert await store.leadership.admit_replays(mesh.leader, 1) == 1
    order = [i.removesuffix(".0") for i in await lease(mesh) if i.endswith(".0")]
    assert order == [*(f"e0-{i}" for i in (1, 2, 3, 4, 5, 6, 7, 8, 10)), replay, "e0-9"]


async def test_a_trajectory_past_the_length_of_its_siblings_is_not_near_its_end(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, resume_order=ResumeOrder.NEAREST_END)
    await admit(mesh, [group(0), group(1)])
    await lease(mesh)
    for index in (0, 1):
        await mesh.finish(f"e0-{index}.1", 0, 10)
        await mesh.score(f"e0-{index}.1", 1.0)
    await mesh.append("e0-0.0", 0, 11)
    await mesh.append("e0-1.0", 0, 1)
    await store.trajectories.release(mesh.session, ["e0-0.0", "e0-1.0"], ReleaseReason.DRAINED)
    assert await lease(mesh) == ["e0-1.0", "e0-0.0"]


async def test_a_large_group_with_places_by_rank_leaves_every_queue_at_once(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, pool_size=512, group_size=120, resume_order=ResumeOrder.MOST_TOKENS)
    await admit(mesh, [replace(group(0, 120), start_rank=7), replace(group(1, 2), start_rank=9)])
    held = await lease(mesh, 3)
    for tokens, trajectory_id in enumerate(held[:2], 1):
        await mesh.append(trajectory_id, 0, tokens)
    await mesh.finish(held[2], 0, 3)
    await store.trajectories.release(mesh.session, held, ReleaseReason.DRAINED)
    assert await store.leadership.evict(mesh.leader, ["e0-0"], "stale") == 1
    for name, left in (("pending", [b"e0-1.0", b"e0-1.1"]), ("partial", []), ("scoring", [])):
        assert await store.connection.command("ZRANGE", store.connection.keys.single(name), 0, -1) == left


def run_file(**orders: str) -> RunConfig:
    return RunConfig.model_validate(
        {"name": "orders", "folder": "runs/orders", "model": {"path": "model"}, "schedule": orders}
    )


def schedule(start_order: str) -> Schedule:
    return Schedule.from_config(run_file(start_order=start_order))


async def test_the_second_epoch_starts_longest_first_once_the_first_has_proved_to_predict_it(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store, pool_size=512, groups_per_batch=4, keeps_history=True)
    metrics = Metrics("rollout")
    ranking = StartRanking(store, schedule("longest_expected"), MeshMetrics(metrics))

    async def epoch(number: int, count: int) -> None:
        await admit(mesh, await ranking.ranked([group(i, epoch=number) for i in range(count)]))
        for trajectory_id in [*await lease(mesh), *await lease(mesh)]:
            index = int(trajectory_id.partition("-")[2].partition(".")[0])
            await mesh.finish(trajectory_id, 0, 1 + 3 * index)
            await mesh.score(trajectory_id, float(trajectory_id.endswith(".1")))

    await epoch(0, 33)
    await ranking.measure()
    assert metrics.registry.get_sample_value("rollmesh_rollout_longest_first") == 0
    await epoch(1, 33)
    await ranking.measure()
    sample = metrics.registry.get_sample_value
    assert sample("rollmesh_rollout_length_rank_correlation", {"source": "history"}) == pytest.approx(1.0)
    assert sample("rollmesh_rollout_length_rank_correlation", {"source": "siblings"}) == pytest.approx(1.0)
    assert sample("rollmesh_rollout_longest_first") == 1
    assert sample("rollmesh_rollout_history_prompts") == 33
    another = StartRanking(store, schedule("longest_expected"), MeshMetrics(Metrics("rollout")))
    await another.measure()
    ranked = await another.ranked([group(i, epoch=2) for i in (3, 30, 9, 40)])
    assert [g.expected_tokens for g in ranked] == [10, 91, 28, None]
    ranks = [g.start_rank for g in ranked]
    assert ranks[3] == 0 and sorted(ranks, key=lambda r: r or 0) == [ranks[3], ranks[1], ranks[2], ranks[0]]


async def test_the_order_by_the_lengths_of_siblings_measures_how_well_they_predict(store: TrajectoryStore) -> None:
    run = run_file(resume_order="nearest_end")
    limits = run_limits(run)
    mesh = await Mesh.start(store, pool_size=512, resume_order=limits.resume_order, keeps_history=limits.keeps_history)
    metrics = Metrics("rollout")
    ranking = StartRanking(store, Schedule.from_config(run), MeshMetrics(metrics))
    groups = [group(i) for i in range(33)]
    assert await ranking.ranked(groups) == groups, "the start order stays admission"
    await admit(mesh, groups)
    for trajectory_id in [*await lease(mesh), *await lease(mesh)]:
        index = int(trajectory_id.partition("-")[2].partition(".")[0])
        await mesh.finish(trajectory_id, 0, 1 + 3 * index)
        await mesh.score(trajectory_id, float(trajectory_id.endswith(".1")))
    await ranking.measure()
    sample = metrics.registry.get_sample_value
    assert sample("rollmesh_rollout_length_rank_correlation", {"source": "siblings"}) == pytest.approx(1.0)
    assert sample("rollmesh_rollout_longest_first") == 0


async def test_admission_order_reads_and_ranks_nothing(store: TrajectoryStore) -> None:
    await Mesh.start(store)
    ranking = StartRanking(store, schedule("admission"), MeshMetrics(Metrics("rollout")))
    await ranking.measure()
    groups = [group(0), group(1)]
    assert await ranking.ranked(groups) == groups


async def partials(mesh: Mesh) -> None:
    """Groups 0 to 2 in blocks of 2; sibling 1 of groups 0 and 1 has ended after 20 and 9 tokens."""
    await admit(mesh, [group(i) for i in range(3)])
    await lease(mesh)
    for trajectory_id, tokens in (("e0-0.1", 20), ("e0-1.1", 9)):
        await mesh.finish(trajectory_id, 0, tokens)
        await mesh.score(trajectory_id, 1.0)
    for trajectory_id, tokens in (("e0-0.0", 3), ("e0-1.0", 8), ("e0-2.0", 30), ("e0-2.1", 70)):
        await mesh.append(trajectory_id, 0, tokens)
    await mesh.store.trajectories.release(mesh.session, ["e0-2.0", "e0-0.0", "e0-1.0", "e0-2.1"], ReleaseReason.DRAINED)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (ResumeOrder.ADMISSION, ["e0-0.0", "e0-1.0", "e0-2.0", "e0-2.1"]),
        (ResumeOrder.MOST_TOKENS, ["e0-1.0", "e0-0.0", "e0-2.1", "e0-2.0"]),
        (ResumeOrder.NEAREST_END, ["e0-1.0", "e0-0.0", "e0-2.0", "e0-2.1"]),
    ],
)
async def test_partial_trajectories_continue_in_the_resume_order(
    store: TrajectoryStore, order: ResumeOrder, expected: list[str]
) -> None:
    mesh = await Mesh.start(store, resume_order=order)
    await partials(mesh)
    await admit(mesh, [replace(group(3), start_rank=0)])
    assert (await lease(mesh))[:4] == expected, "new trajectories come after all of them"
