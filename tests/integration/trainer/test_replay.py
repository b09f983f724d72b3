"""A trainer that replays groups of earlier batches, and a ledger that names them; through kills: test_kills.py."""

from __future__ import annotations

import pytest

from rollmesh.report.ledger_check import StalenessRule, Trained, read_batches

from .test_kills import REPLAY, draws
from .test_parts import accumulated, begun
from .test_parts import trained as trained_step
from .trainer_run import GROUPS, Runs, TrainerRun

pytestmark = pytest.mark.slow

STEPS = 4
ALGORITHM = {"loss": "decoupled_ppo", "old_logprobs": "recompute"}
TRAINER = {"train_steps": STEPS, "algorithm": ALGORITHM, "replay": REPLAY}


def ledger(run: TrainerRun) -> Trained:
    rule = StalenessRule(max_staleness=20, mask_old_segments=False)
    committed = run.checkpoints.committed_states()[0].train_step
    counts, damaged = read_batches(run.checkpoints, committed, rule, {0: 0}, lambda: None)
    assert damaged == {}
    return counts


async def test_replayed_groups_are_counted_beside_the_fresh_ones(runs: Runs) -> None:
    async with runs(trainer=TRAINER) as run:
        await run.train(STEPS)
        recorded, counts = run.lines(), ledger(run)
        assert [len(drawn) for drawn in draws(run)] == [0, *[GROUPS] * (STEPS - 1)]
    assert counts.replays.problems == [] and counts.trained_twice() == {} and counts.trajectories_twice == {}
    assert (counts.groups, counts.replays.groups) == (GROUPS * STEPS, GROUPS * (STEPS - 1))
    assert [line["replayed_share"] for line in recorded] == [0.0, *[0.5] * (STEPS - 1)]
    assert all(line["batch"]["groups"] == GROUPS for line in recorded)
    assert recorded[-1]["replay"]["groups"] == GROUPS
    fresh_tokens = sum(line["batch"]["trained_tokens"] for line in recorded)
    assert recorded[-1]["mesh"]["trained_token_total"] == fresh_tokens == counts.loss_tokens


async def test_a_missing_batch_file_is_left_out_of_the_draw_with_a_warning(runs: Runs) -> None:
    async with runs(trainer=TRAINER) as run:
        run.start()
        async with run.fed(3):
            await run.until("step 3", lambda: _committed(run, 3), pause=0.01)
        (run.checkpoints.root / "batches" / "00000002.pb").unlink()
        await run.train(1)
        replay = run.checkpoints.batch_footer(4).replay
        assert replay is not None and set(replay.sources) == {3}
        assert {step for step, _ in replay.groups} == {3}
        assert '"replay_without_batch"' in run.log()


async def test_batches_from_before_a_rollback_are_not_replayed(runs: Runs) -> None:
    async with runs(trainer=TRAINER | {"train_steps": 6}) as run:
        run.start()
        async with run.fed(3):
            await run.until_version(3)
            await run.store.rollbacks.request(1)
            await run.until_rolled_back()
            run.kill()
            run.start()
            await run.feed(3)
            await run.until_finished()
        footers = [run.checkpoints.batch_footer(step).replay for step in range(1, 7)]
        assert [sorted(replay.sources) for replay in footers if replay] == [[], [1], [1, 2], [], [4], [4, 5]]
        assert ledger(run).replays.problems == []


async def test_replayed_groups_join_the_parts_of_their_batch(runs: Runs) -> None:
    first_lines = []
    for name, parts in (("parts", 1), ("whole", 0)):
        async with runs(
            name,
            schedule={"preset": "one_step_off", "max_staleness": 1, "part_groups": parts},
            trainer=TRAINER | {"train_steps": 3},
        ) as run:
            await begun(run, 2)
            for step in (1, 2):
                if parts:
                    await accumulated(run, step)
                await run.store.leadership.cut(run.leader, step, run.cuts[step - 1])
                await trained_step(run, step)
            first_lines.append(run.lines()[1])
    ours, theirs = first_lines
    assert (ours["groups_before_cut"], theirs["groups_before_cut"]) == (GROUPS, 0)
    assert ours["replayed_share"] == theirs["replayed_share"] == 0.5
    for name in ("loss", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7)


async def _committed(run: TrainerRun, step: int) -> bool:
    return (await run.store.training.state()).committed_step == step
