"""Record of every prompt and totals of every domain, with their copies in batch files, on a real server."""

from dataclasses import replace

import pytest

from rollmesh.mesh import Cursor
from rollmesh.prompt_history import DomainTotals, PromptOutcome, PromptRecord
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import Score
from rollmesh.types import OutcomeKind, RewardOutcome, WriteStatus

from .store_mesh import Mesh, copy_of_keys, group, limits, policy, put_back, scored


async def history(store: TrajectoryStore) -> dict[str, PromptRecord]:
    return await store.prompt_records.read(["0", "1", "2", "3"])


async def admit(mesh: Mesh, *positions: tuple[int, int]) -> None:
    """Open groups at (epoch, index); prompt ``index`` has the same id in every epoch."""
    for epoch, index in positions:
        before = await mesh.store.leadership.cursor()
        after = Cursor(epoch=epoch, index=index + 1)
        assert await mesh.store.leadership.admit(mesh.leader, [group(index, epoch=epoch)], before, after) == 1
    await mesh.lease_all()


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


async def reassert(mesh: Mesh, files: list[tuple[list[str], list[PromptOutcome]]], cursor: int = 0) -> None:
    """State the batch files of steps 1, 2, ..., groups and outcomes, as a trainer does after a restart of Redis."""
    await mesh.store.training.reassert(
        mesh.trainer,
        committed_step=len(files),
        trained_step=len(files),
        batches=[(step, groups) for step, (groups, _) in enumerate(files, 1)],
        policies=[policy(0)],
        cursor=Cursor(index=cursor),
        outcomes=[outcomes for _, outcomes in files],
    )


async def forget_everything(store: TrajectoryStore) -> None:
    """Redis comes back empty; the first client that knows the limits writes them again."""
    await put_back(store, {})
    await store.limits.init_run(limits(keeps_history=True))


async def test_the_batch_files_restore_the_history_of_an_empty_redis(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, keeps_history=True)
    files: list[tuple[list[str], list[PromptOutcome]]] = []
    await admit(mesh, (0, 0), (0, 1), (1, 0))
    for step, group_id in enumerate(GROUPS, 1):
        await end(mesh, group_id, *GROUPS[group_id])
        files.append(([f"e9-{step}"], await store.prompt_records.unsaved(mesh.trainer, step)))
        await mesh.save_outcomes(step, files[-1][1])
    before = await history(store)
    await forget_everything(store)
    assert await history(store) == {}
    for _ in range(2):
        await reassert(mesh, files)
        assert await history(store) == before
    assert (await store.mesh.counts()).totals["outcomes_restored_total"] == 3


async def test_a_damaged_batch_file_costs_its_own_outcomes_only(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, keeps_history=True)
    await reassert(
        mesh, [([f"e9-{i}"], [PromptOutcome(f"e0-{i}", str(i), 2, 1, 1_000_000, 9, 5, i)]) for i in range(2)]
    )
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


DOMAINS = ("algebra", "code")


async def draw(mesh: Mesh, count: int) -> None:
    """Open groups at the cursor, of every domain in turn, and lease all members."""
    before = await mesh.store.leadership.cursor()
    after = Cursor(index=before.index + count)
    opened = [group(index) for index in range(before.index, after.index)]
    named = [replace(g, prompt=replace(g.prompt, domain=DOMAINS[g.index % 2])) for g in opened]
    await mesh.store.leadership.admit(mesh.leader, named, before, after)
    await mesh.lease_all()


async def solve_half(mesh: Mesh, *group_ids: str) -> None:
    """End groups with two members of 4 and 6 tokens, the first of them right."""
    for group_id in group_ids:
        await end(mesh, group_id, (4, 1.0), (6, 0.0))


async def waiting_replays(mesh: Mesh) -> list[str]:
    connection = mesh.store.connection
    return [key.decode() for key in await connection.command("HKEYS", connection.keys.single("replays"))]


async def open_replay(mesh: Mesh) -> None:
    """Open the replay that waits, and lease its members."""
    assert await mesh.store.leadership.admit_replays(mesh.leader, 8) == 1
    await mesh.lease_all()


def totals(algebra: tuple[int, int], code: tuple[int, int]) -> dict[str, DomainTotals]:
    """Totals from (groups drawn, groups ended) of each domain."""
    return {
        name: DomainTotals(drawn=drawn, completed=2 * ended, solved=ended, tokens=10 * ended)
        for name, (drawn, ended) in zip(DOMAINS, (algebra, code), strict=True)
        if drawn
    }


async def test_a_domain_counts_groups_at_admission_and_trajectories_once_their_group_has_ended(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store, keeps_history=True)
    assert await store.prompt_records.domain_totals() == {}
    await draw(mesh, 3)
    await solve_half(mesh, "e0-0")
    assert await store.prompt_records.domain_totals() == totals((2, 1), (1, 0))


@pytest.mark.parametrize("known", [0, 1, 3, 6])
async def test_a_restored_redis_counts_every_draw_and_every_end_once(store: TrajectoryStore, known: int) -> None:
    """Redis comes back with a state in which ``known`` of six groups were open, and none had ended.

    Three of the six are in batch files. Of the others, those that Redis has lost are drawn and end a second time.
    """
    mesh = await Mesh.start(store, keeps_history=True)
    await draw(mesh, known)
    restored = await copy_of_keys(store)
    await draw(mesh, 6 - known)
    await solve_half(mesh, *(f"e0-{i}" for i in range(6)))
    batches = {1: ["e0-0", "e0-3"], 2: ["e0-1"]}
    files = [(ids, await mesh.train(step, ids)) for step, ids in batches.items()]
    assert await store.prompt_records.domain_totals() == totals((3, 3), (3, 3))
    await put_back(store, restored)
    for _ in range(2):
        await reassert(mesh, files, cursor=6)
    await draw(mesh, 6 - known)
    await solve_half(mesh, "e0-2", "e0-4", "e0-5")
    again = [sum(i >= known and i % 2 == domain for i in (2, 4, 5)) for domain in range(2)]
    algebra, code = (3 + count for count in again)
    assert await store.prompt_records.domain_totals() == totals((algebra, algebra), (code, code))


async def test_an_empty_redis_counts_a_group_that_began_again_as_drawn_once(store: TrajectoryStore) -> None:
    """e0-0 is ready, begins again over the staleness bound after its outcome is in a batch file, and ends again."""
    mesh = await Mesh.start(store, keeps_history=True, max_staleness=0)
    await draw(mesh, 2)
    await solve_half(mesh, "e0-0", "e0-1")
    first = await mesh.train(1, ["e0-1"])
    await store.policies.announce(mesh.trainer, policy(1))
    assert await store.restarted.restart(mesh.leader, ["e0-0"]) == 1
    for item in await store.trajectories.lease(mesh.session, 8):
        await mesh.complete(item, float(item.trajectory.member_index), version=1)
    second = await mesh.train(2, ["e0-0"])
    assert [o.group_id for o in (*first, *second)] == ["e0-0", "e0-1", "e0-0~0"]
    before = await store.prompt_records.domain_totals()
    assert (before["algebra"].drawn, before["algebra"].completed) == (1, 4)
    await forget_everything(store)
    await reassert(mesh, [(["e0-1"], first), (["e0-0"], second)], cursor=2)
    assert await store.prompt_records.domain_totals() == before


@pytest.mark.parametrize("is_trained", [True, False])
async def test_a_replay_that_waits_in_the_restored_redis_is_drawn_once_and_ends_once(
    store: TrajectoryStore, is_trained: bool
) -> None:
    """The outcome of the replay is in a file, its group in a batch or in none."""
    mesh = await Mesh.start(store, keeps_history=True, max_attempts=1, max_staleness=4)
    await draw(mesh, 3)
    await store.trajectories.fail(mesh.session, [("e0-0.0", "broke")])
    replay = await store.dead_letters.replay("e0-0.0")
    assert await waiting_replays(mesh) == [replay]
    assert (await store.prompt_records.domain_totals())["algebra"].drawn == 3
    waiting = await copy_of_keys(store)
    await solve_half(mesh, "e0-1")
    first = await mesh.train(1, ["e0-1"])
    await open_replay(mesh)
    await solve_half(mesh, replay)
    await solve_half(mesh, "e0-2")
    batch = [replay if is_trained else "e0-2"]
    second = await mesh.train(2, batch)
    assert sorted(o.group_id for o in second) == [replay, "e0-2"]
    before = await store.prompt_records.domain_totals()
    assert (before["algebra"].drawn, before["algebra"].completed) == (3, 4)
    await put_back(store, waiting)
    await reassert(mesh, [(["e0-1"], first), (batch, second)], cursor=2)
    assert await waiting_replays(mesh) == ([] if is_trained else [replay])
    if is_trained:
        await solve_half(mesh, "e0-2")
    else:
        await open_replay(mesh)
        await solve_half(mesh, replay)
        assert replay not in [o.group_id for o in await store.prompt_records.unsaved(mesh.trainer, 3)]
    assert await store.prompt_records.domain_totals() == before


async def test_a_group_that_ends_again_after_a_restore_is_drawn_once_by_the_next_restore(
    store: TrajectoryStore,
) -> None:
    """e0-0 is open in the restored state and its first outcome in file 1; it ends again and is in file 2."""
    mesh = await Mesh.start(store, keeps_history=True)
    await draw(mesh, 2)
    opened = await copy_of_keys(store)
    await solve_half(mesh, "e0-0", "e0-1")
    first = await mesh.train(1, ["e0-1"])
    assert [o.group_id for o in first] == ["e0-0", "e0-1"]
    await put_back(store, opened)
    await reassert(mesh, [(["e0-1"], first)], cursor=2)
    await solve_half(mesh, "e0-0")
    second = await mesh.train(2, ["e0-0"])
    assert [o.group_id for o in second] == ["e0-0~0"]
    before = await store.prompt_records.domain_totals()
    assert before == totals((1, 1), (1, 1))
    await forget_everything(store)
    await reassert(mesh, [(["e0-1"], first), (["e0-0"], second)], cursor=2)
    after = await store.prompt_records.domain_totals()
    assert {name: found.drawn for name, found in after.items()} == {name: 1 for name in DOMAINS}


async def test_a_replayed_dead_letter_counts_as_drawn_once_through_a_restore(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, keeps_history=True, max_attempts=1)
    await draw(mesh, 1)
    await store.trajectories.fail(mesh.session, [("e0-0.0", "broke")])
    unasked = await copy_of_keys(store)
    replay = await store.dead_letters.replay("e0-0.0")
    await open_replay(mesh)
    replayed = await copy_of_keys(store)
    await solve_half(mesh, replay)
    file = [([replay], await mesh.train(1, [replay]))]
    before = await store.prompt_records.domain_totals()
    assert before["algebra"].drawn == 2
    for restored in (unasked, replayed):
        await put_back(store, restored)
        await reassert(mesh, file, cursor=1)
        assert await store.prompt_records.domain_totals() == before
