"""Record of every prompt, and its copy in batch files, on a real server."""

from __future__ import annotations

from rollmesh.mesh import Cursor
from rollmesh.prompt_history import PromptOutcome, PromptRecord
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import Score
from rollmesh.types import OutcomeKind, RewardOutcome, WriteStatus

from .store_mesh import Mesh, group, limits, policy, scored


async def history(store: TrajectoryStore) -> dict[str, PromptRecord]:
    return await store.prompt_records.read(["0", "1", "2", "3"])


async def admit(mesh: Mesh, *positions: tuple[int, int]) -> None:
    """Open groups at (epoch, index); prompt ``index`` has the same id in every epoch."""
    for epoch, index in positions:
        before = await mesh.store.leadership.cursor()
        after = Cursor(epoch=epoch, index=index + 1)
        assert await mesh.store.leadership.admit(mesh.leader, [group(index, epoch=epoch)], before, after) == 1
    while await mesh.store.trajectories.lease(mesh.session, 64):
        pass


async def end(mesh: Mesh, group_id: str, *members: tuple[int, float | None]) -> None:
    """Finish and score members as (tokens, reward)."""
    for member, (tokens, reward) in enumerate(members):
        await mesh.finish(f"{group_id}.{member}", 0, tokens)
        assert await mesh.score(f"{group_id}.{member}", reward) == 1


GROUPS = {"e0-0": ((10, 0.1), (30, 0.2)), "e1-0": ((5, 0.0), (7, 0.7)), "e0-1": ((8, 1.0), (9, 1.0))}
"""The last one is filtered; 0.1 + 0.2 + 0.7 depends on the order in floating point."""


async def test_a_member_is_solved_by_its_outcome_and_without_one_by_its_reward(store: TrajectoryStore) -> None:
    """A right answer with a penalty above its reward, a wrong one with a bonus, and one whose reward is assigned."""
    mesh = await Mesh.start(store, keeps_history=True)
    await admit(mesh, (0, 0), (0, 1))
    timed_out = RewardOutcome(kind=OutcomeKind.TIMED_OUT, message="no answer")
    scores = {
        "e0-0.0": Score(trajectory_id="e0-0.0", outcome=scored(1.0), shaped_reward=-0.5),
        "e0-0.1": Score(trajectory_id="e0-0.1", outcome=scored(0.0), shaped_reward=0.25),
        "e0-1.0": Score(trajectory_id="e0-1.0", outcome=timed_out, shaped_reward=0.5, assigned=True),
        "e0-1.1": Score(trajectory_id="e0-1.1", outcome=scored(0.0), shaped_reward=0.0),
    }
    for trajectory_id, score in scores.items():
        await mesh.finish(trajectory_id, 0, 4)
        assert (await store.trajectories.score(mesh.session, [score]))[0].status == WriteStatus.SAVED
    assert {i: (r.solved, r.reward_sum) for i, r in (await history(store)).items()} == {"0": (1, -0.25), "1": (1, 0.5)}


async def test_a_run_that_does_not_ask_keeps_no_history(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await admit(mesh, (0, 0))
    await end(mesh, "e0-0", *GROUPS["e0-0"])
    assert await history(store) == {}
    assert await store.prompt_records.unsaved(mesh.trainer, 1) == []
    keys = [store.connection.keys.single(name) for name in ("history", "outcomes")]
    assert await store.connection.command("EXISTS", *keys) == 0


async def reassert(mesh: Mesh, outcomes: list[list[PromptOutcome]]) -> None:
    """State batch files without groups, of steps 1, 2, ..., as a trainer does after a restart of Redis."""
    steps = range(1, len(outcomes) + 1)
    await mesh.store.training.reassert(
        mesh.trainer,
        committed_step=len(outcomes),
        trained_step=len(outcomes),
        batches=[(step, [f"e9-{step}"]) for step in steps],
        policies=[policy(0)],
        cursor=Cursor(),
        outcomes=outcomes,
    )


async def forget_everything(store: TrajectoryStore) -> None:
    """Redis comes back empty; the first client that knows the limits writes them again."""
    pattern = store.connection.keys.prefix.replace("{", "\\{").replace("}", "\\}") + "*"
    await store.connection.command("UNLINK", *await store.connection.command("KEYS", pattern))
    await store.limits.init_run(limits(keeps_history=True))


async def test_the_batch_files_restore_the_history_of_an_empty_redis(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, keeps_history=True)
    files: list[list[PromptOutcome]] = []
    await admit(mesh, (0, 0), (0, 1), (1, 0))
    for step, group_id in enumerate(GROUPS, 1):
        await end(mesh, group_id, *GROUPS[group_id])
        files.append(await store.prompt_records.unsaved(mesh.trainer, step))
        await mesh.save_outcomes(step, files[-1])
    before = await history(store)
    await forget_everything(store)
    assert await history(store) == {}
    for _ in range(2):
        await reassert(mesh, files)
        assert await history(store) == before
    assert (await store.mesh.counts()).totals["outcomes_restored_total"] == 3


async def test_a_damaged_batch_file_costs_its_own_outcomes_only(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, keeps_history=True)
    outcomes = [[PromptOutcome(f"e0-{i}", str(i), 2, 1, 1_000_000, 9, 5, i)] for i in range(2)]
    await reassert(mesh, outcomes)
    await store.training.reassert(
        mesh.trainer, committed_step=4, trained_step=4, batches=[], policies=[policy(0)], cursor=Cursor()
    )
    assert set(await history(store)) == {"0", "1"}
    assert await store.prompt_records.unsaved(mesh.trainer, 5) == []


async def test_a_trainer_that_dies_between_two_slices_of_a_file_loses_and_doubles_nothing(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store, keeps_history=True)
    file = [PromptOutcome(f"e0-{i}", str(i), 2, 1, 500_000, 10, 6, 0) for i in range(1100)]
    words = [word for o in file[:600] for word in (o.group_id, f"2 1 500000 10 6 0 {o.prompt_id}")]
    run_id = await store.recovery.server_run_id()
    assert await store.connection.run("save_outcomes", mesh.trainer, 1, 0, 0, run_id, *words) == 600
    for _ in range(2):
        await mesh.save_outcomes(1, file)
    records = await store.prompt_records.read([str(i) for i in range(1100)])
    assert len(records) == 1100 and {r.groups for r in records.values()} == {1}
    assert await store.prompt_records.unsaved(mesh.trainer, 2) == []


async def test_the_history_is_bounded_and_a_record_takes_about_100_bytes(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, keeps_history=True)
    key = store.connection.keys.single("history")
    fill = """for at = ARGV[1], ARGV[1] + 8191 do
      redis.call('HSET', KEYS[1], 'prompt-' .. at, '12 96 41 43500000 ' .. (100000 + at) .. ' 2048 317')
    end"""
    for first in range(0, 1_048_576, 8_192):
        await store.connection.command("EVAL", fill, 1, key, first)
    assert await store.connection.command("MEMORY", "USAGE", key, "SAMPLES", 1000) / 1_048_576 < 128
    await admit(mesh, (0, 0))
    await end(mesh, "e0-0", *GROUPS["e0-0"])
    assert await store.prompt_records.size() == 1_048_576
    assert (await store.mesh.counts()).totals["history_full_total"] == 1
    await store.connection.command("HDEL", key, "prompt-7")
    await admit(mesh, (1, 0))
    await end(mesh, "e1-0", *GROUPS["e1-0"])
    assert (await history(store))["0"].groups == 1
    await store.connection.command("UNLINK", key)
