"""Gradients before the cut, and groups of earlier batches: the same training and the same draw, after a kill too."""

import json
import re
from datetime import datetime

import httpx
import pytest

from rollmesh.report.ledger_check import StalenessRule, Trained, read_batches
from rollmesh.runtime.endpoints import read_endpoints

from .test_kills import REPLAY, draws
from .trainer_process import PART_SECONDS
from .trainer_run import GROUPS, Runs, TrainerRun

SCHEDULE = {"preset": "one_step_off", "max_staleness": 1, "part_groups": 1}


async def begun(run: TrainerRun, steps: int, ranks: int = 1, fault: str = "") -> None:
    """The trainer waits for a cut, and the groups of these steps are ready."""
    run.start(ranks, fault=fault)
    await run.until_version(0)
    await run.feed(steps)


async def accumulated(run: TrainerRun, times: int = 1) -> None:
    """All groups of the next batch are in parts, for the ``times``-th time."""

    def logged() -> bool:
        events = run.events("part_accumulated")
        return sum(event["groups"] == GROUPS for event in events) >= times

    await run.until("the parts", logged, pause=0.02)


def logged_at(run: TrainerRun, event: str) -> datetime:
    """Time of an event in the log of the trainer."""
    (line,) = [line for line in run.log().splitlines() if f'"{event}"' in line]
    return datetime.fromisoformat(json.loads(line)["timestamp"])


async def trained(run: TrainerRun, step: int) -> None:
    async def reported() -> bool:
        return (await run.store.training.state()).committed_step == step

    await run.until(f"train step {step}", reported, pause=0.02)


@pytest.mark.parametrize(("ranks", "kill"), [(1, False), (1, True), (2, True)])
async def test_parts_before_the_cut_train_the_batch_once_and_like_a_whole_batch(
    runs: Runs, ranks: int, kill: bool
) -> None:
    """The whole batch is trained by one rank."""
    async with runs("parts", schedule=SCHEDULE, trainer={"train_steps": 2}) as run:
        await begun(run, 1, ranks=ranks)
        await accumulated(run)
        if kill:
            run.kill()
            run.start(ranks)
            await accumulated(run, 2)
        assert run.checkpoints.batch_steps() == []
        await run.store.leadership.cut(run.leader, 1, run.cuts[0])
        await trained(run, 1)
        assert run.checkpoints.batch_steps() == [1]
        ours = run.lines()
    async with runs("whole", schedule=SCHEDULE | {"part_groups": 0}, trainer={"train_steps": 2}) as run:
        await begun(run, 1)
        await run.store.leadership.cut(run.leader, 1, run.cuts[0])
        await trained(run, 1)
        theirs = run.lines()
    assert [line["groups_before_cut"] for line in (*ours, *theirs)] == [GROUPS, 0]
    for name in ("loss", "grad_norm"):
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("parts", [1, 0])
async def test_an_outage_never_changes_what_a_step_reads_of_earlier_versions(runs: Runs, parts: int) -> None:
    async with runs(
        schedule=SCHEDULE | {"part_groups": parts},
        trainer={"train_steps": 3, "algorithm": {"old_logprobs": "snapshot"}},
    ) as run:
        await begun(run, 2, fault="unreachable")
        if parts:
            await accumulated(run)
        await run.store.leadership.cut(run.leader, 1, run.cuts[0])
        await trained(run, 1)
        if parts:
            await accumulated(run, 2)
        await run.store.leadership.cut(run.leader, 2, run.cuts[1])
        await trained(run, 2)
        events = [json.loads(line) for line in run.log().splitlines() if '"open: the store is unreachable"' in line]
        assert [(event["event"], event.get("what")) for event in events] == [
            ("part_waits", None) if parts else ("unreachable", "train")
        ]
        assert run.lines()[1]["groups_before_cut"] == parts * GROUPS
        assert run.lines()[1]["policy"]["old_logprob_fallbacks"] == {}


async def test_the_trainer_does_not_wait_while_it_computes_parts(runs: Runs) -> None:
    async with runs(schedule=SCHEDULE, trainer={"train_steps": 2}) as run, httpx.AsyncClient(timeout=60.0) as client:
        await begun(run, 1, fault="slow parts")
        await accumulated(run)
        await run.store.leadership.cut(run.leader, 1, run.cuts[0])
        await run.until("the end of the step", lambda: '"step_trained"' in run.log(), pause=0.02)
        passed = (logged_at(run, "step_trained") - logged_at(run, "trainer_takes_over")).total_seconds()
        (step,) = run.lines()
        assert 0 < step["wait_seconds"] <= passed - GROUPS * PART_SECONDS
        (endpoint,) = read_endpoints(run.folder, "trainer")
        exposition = (await client.get(f"http://{endpoint.admin}/metrics")).text
        phases = re.findall(r'rollmesh_trainer_phase_seconds_count\{.*phase="(wait|write_batch)".*\} (\S+)', exposition)
        assert dict(phases) == {"wait": "1.0", "write_batch": "1.0"}


async def test_a_batch_with_other_groups_than_the_parts_is_trained_whole(runs: Runs) -> None:
    async with runs(schedule=SCHEDULE, trainer={"train_steps": 2}) as run:
        await begun(run, 2)
        await accumulated(run)
        await run.store.leadership.cut(run.leader, 1, run.cuts[1])
        await trained(run, 1)
        assert run.checkpoints.batch_footer(1).group_ids == run.cuts[1]
        assert [line["groups_before_cut"] for line in run.lines()] == [0]


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
                await trained(run, step)
            first_lines.append(run.lines()[1])
    ours, theirs = first_lines
    assert (ours["groups_before_cut"], theirs["groups_before_cut"]) == (GROUPS, 0)
    assert ours["replayed_share"] == theirs["replayed_share"] == 0.5
    for name in ("loss", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7)


async def _committed(run: TrainerRun, step: int) -> bool:
    return (await run.store.training.state()).committed_step == step
