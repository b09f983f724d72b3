"""kill -9 between any two steps of the trainer's protocol: nothing lost, nothing trained twice, no version reused."""

import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollmesh.store import EmbeddedServer
from rollmesh.trainer.service.step_summaries import reported
from rollmesh.types import PolicyRecord

from ...kit.ledger import read_ledger
from .trainer_run import Runs, TrainerRun

pytestmark = pytest.mark.slow

Moment = Callable[[TrainerRun, int], bool | Awaitable[bool]]


def _exists(pattern: str) -> Moment:
    return lambda run, step: any(run.checkpoints.root.glob(pattern.format(step=step)))


async def _confirmed(run: TrainerRun, step: int) -> bool:
    connection = run.store.connection
    return await connection.command("HGET", connection.keys.of("batch", str(step)), "digest") is not None


async def _trained(run: TrainerRun, step: int) -> bool:
    return (await run.store.training.state()).trained_step >= step


async def _committed(run: TrainerRun, step: int) -> bool:
    return (await run.store.training.state()).committed_step >= step


MOMENTS: list[tuple[str, Moment]] = [
    ("the batch file is complete", _exists("batches/{step:08d}.pb")),
    ("the state is being saved", _exists("states/{step:08d}-*")),
    ("the batch is reported as trained", _trained),
    ("the state is committed", _exists("states/{step:08d}-*/COMMITTED")),
    ("the policy folder is begun", _exists("policies/{step:08d}-*")),
    ("the commit is reported", _committed),
    ("the manifest is written", _exists("policies/{step:08d}-*/manifest.json")),
    ("the policy is announced", TrainerRun.announced),
]
FLEETING: list[tuple[str, Moment, Moment]] = [
    ("the batch file is being written", _exists("batches/.{step:08d}.pb.*"), _exists("batches/{step:08d}.pb")),
    ("the batch is confirmed", _confirmed, _trained),
]
"""Moments that leave nothing behind, and what is true once they are over. A test that was kept from its core for some
milliseconds has missed one, and looks out for the same moment of the next step."""
STEPS = len(MOMENTS) + len(FLEETING) + 6
ALGORITHM = {"loss": "decoupled_ppo", "old_logprobs": "ewma", "old_logprobs_options": {"reset_below": 0}}
REPLAY = {"share": 0.5, "batches": 2, "by": "reward"}
TRAINER = {"train_steps": STEPS, "algorithm": ALGORITHM, "optimizer": "adamw_8bit", "replay": REPLAY}
"""Everything that a trainer carries from step to step: moments, an average of the weights, draws of earlier groups."""


async def _met(run: TrainerRun, step: int, name: str, moment: Moment, over: Moment) -> bool:
    """Wait for a fleeting moment of a step; False if it passed unseen."""
    seen = False

    async def met_or_missed() -> bool:
        nonlocal seen
        seen = await _holds(moment, run, step)
        return seen or await _holds(over, run, step)

    await run.until(f"step {step}: {name}", met_or_missed)
    return seen


async def _holds(moment: Moment, run: TrainerRun, step: int) -> bool:
    holds = moment(run, step)
    return holds if isinstance(holds, bool) else await holds


async def assert_every_batch_counts_once(
    run: TrainerRun, seen: dict[int, PolicyRecord], *, one_at_a_time: bool = True
) -> None:
    """Ledger, registry, folders and metrics agree that every step happened once.

    Of two trainers, the file may have a line of the older one, which no fence can stop between asking and writing; the
    queue has the newer one's report of that step, with the same loss.
    """
    steps = run.config.trainer.train_steps
    ledger = read_ledger(run.checkpoints)
    assert (ledger.committed_step, ledger.damaged, ledger.trained_twice) == (steps, {}, {})
    assert read_ledger(run.checkpoints).groups == {s: run.cuts[s - 1] for s in range(1, steps + 1)}
    records = await run.store.policies.announced()
    assert [(r.policy_version, r.train_step) for r in records] == [(v, v) for v in range(steps + 1)]
    for record in records:
        assert seen.get(record.policy_version, record) == record
        run.checkpoints.open(record)
    lines = run.lines()
    assert [m["train_step"] for m in lines] == list(range(1, steps + 1))
    assert [m["policy_version"] for m in lines] == list(range(1, steps + 1))
    reports, expected = await run.store.step_reports.read(0, steps + 1), [reported(line) for line in lines]
    assert [(r["train_step"], r["loss"]) for r in reports] == [(e["train_step"], e["loss"]) for e in expected]
    if one_at_a_time:
        assert reports == expected


def draws(run: TrainerRun) -> list[list[tuple[int, str]]]:
    """Return the groups that each batch has from earlier ones."""
    footers = [run.checkpoints.batch_footer(step) for step in run.checkpoints.batch_steps()]
    return [footer.replay.groups for footer in footers if footer.replay is not None]


async def _start_again(run: TrainerRun, seen: dict[int, PolicyRecord]) -> None:
    """Kill the trainer and start it; no version that was ever seen may be another one now."""
    run.kill()
    for record in await run.store.policies.announced():
        assert seen.setdefault(record.policy_version, record) == record
    run.start()


@pytest.mark.alone
@pytest.mark.timeout(600)
async def test_a_trainer_killed_at_every_moment_ends_where_an_uninterrupted_one_does(runs: Runs) -> None:
    sections = {"trainer": TRAINER, "checkpoints": {"state_every_steps": 2}}
    async with runs("calm", **sections) as run:
        await run.train(STEPS)
        expected, drawn = await run.last_weights(), draws(run)
    seen: dict[int, PolicyRecord] = {}
    async with runs("killed", **sections) as run:
        run.start()
        async with run.fed(STEPS):
            for step, (name, moment) in enumerate(MOMENTS, start=1):
                await run.until(f"step {step}: {name}", lambda m=moment, s=step: m(run, s))
                await _start_again(run, seen)
            for name, moment, over in FLEETING:
                step += 1
                while not await _met(run, step, name, moment, over):
                    step += 1
                    assert step < STEPS, f"{name}: never seen"
                await _start_again(run, seen)
            await run.until_finished()
        await assert_every_batch_counts_once(run, seen)
        assert (await run.last_weights(), draws(run)) == (expected, drawn)


@pytest.mark.parametrize("trainer_dies", [False, True])
async def test_a_redis_that_forgot_the_newest_writes_is_told_what_was_trained(
    runs: Runs, server: EmbeddedServer, trainer_dies: bool
) -> None:
    async with runs(trainer={"train_steps": 6}) as run:
        run.start()
        async with run.fed(6):
            await run.until("step 1", lambda: _trained(run, 1), pause=0.01)
            before = _aof(server).stat().st_size
            await run.until_version(4)
            seen, trained = await run.seen(), (await run.store.training.state()).trained_step
            if trainer_dies:
                run.kill()
            server.kill()
            os.truncate(_aof(server), before)
            server.start()
            if trainer_dies:
                run.start()
            await run.until("the re-assertion", lambda: _trained(run, trained), pause=0.05)
            await run.until_finished()
        await assert_every_batch_counts_once(run, seen)
        assert "training_reasserted" in run.log()


async def test_a_redis_that_lost_everything_learns_what_was_trained_and_published(
    runs: Runs, server: EmbeddedServer
) -> None:
    async with runs(trainer={"train_steps": 9}) as run:
        run.start()
        async with run.fed(3):
            await run.until_version(3)
            records = await run.store.policies.announced()
            server.kill()
            shutil.rmtree(server.folder / "appendonlydir")
            server.start()
            await run.until("the re-assertion", lambda: run.announced(3), pause=0.05)
        assert await run.store.policies.announced() == records
        state = await run.store.training.state()
        assert (state.trained_step, state.cut_step, state.committed_step) == (3, 3, 3)


async def test_redis_may_be_unreachable_for_a_while_and_the_trainer_waits(runs: Runs, server: EmbeddedServer) -> None:
    async with runs() as run:
        run.start()
        async with run.fed(4):
            await run.until("step 1", lambda: _trained(run, 1), pause=0.01)
            server.stop()
            await run.until("a note that Redis is away", lambda: "waiting_for_redis" in run.log(), pause=0.05)
            server.start()
            await run.until_finished()
        await assert_every_batch_counts_once(run, {})


async def test_the_older_of_two_trainers_stops_and_says_why(runs: Runs) -> None:
    async with runs() as run:
        older = run.start()
        async with run.fed(4):
            await run.until("step 1", lambda: _trained(run, 1), pause=0.01)
            os.kill(older.pid, signal.SIGSTOP)
            run.start()
            await run.until_version(3)
            os.kill(older.pid, signal.SIGCONT)
            assert older.wait(120) == 1
            await run.until_finished()
        assert "two trainers on one run" in run.log()
        await assert_every_batch_counts_once(run, {}, one_at_a_time=False)


def _aof(server: EmbeddedServer) -> Path:
    """The newest incremental append-only file."""
    return max(server.folder.glob("appendonlydir/*.incr.aof"), key=lambda p: p.stat().st_mtime)
