"""One publication in flight while the next step trains: in order, and safe wherever the trainer is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.runtime.lifecycle import EXIT_UNFINISHED
from rollmesh.store import EmbeddedServer

from .test_kills import assert_every_batch_counts_once, last_weights
from .trainer_run import TrainerRun, opened_run, write_run_file

pytestmark = pytest.mark.slow

STEPS = 5
IN_BACKGROUND = (
    "before the canary",
    "before the manifest",
    "before the announcement",
    "before the marker",
    "before the pruning",
)


@asynccontextmanager
async def held_run(
    folder: Path,
    model: Path,
    server: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    *,
    at: str,
    step: int,
    fed: int = STEPS,
    ranks: int = 1,
    **sections: dict[str, Any],
) -> AsyncIterator[TrainerRun]:
    """A run whose trainer is stopped at a point of the publication of ``step``; only its state of step 2 is saved."""
    config = write_run_file(
        folder, model, server, **{"trainer": {"train_steps": STEPS}, "checkpoints": {"state_every_steps": 2}} | sections
    )
    monkeypatch.setenv("HELD_AT", at)
    monkeypatch.setenv("HELD_STEP", str(step))
    os.mkfifo(folder / "release")
    async with opened_run(config) as run:
        run.start(ranks, script="held_process")
        async with run.fed(fed):
            await run.until(at, (folder / "held").exists, pause=0.01)
            yield run


def release(run: TrainerRun) -> None:
    (run.folder / "release").write_bytes(b"")


def waits(run: TrainerRun, version: int) -> bool:
    """The training loop waits for the publication of this version."""
    lines = [json.loads(line) for line in run.log().splitlines() if '"training_waits_for_publication"' in line]
    return any(line["policy_version"] == version for line in lines)


async def versions(run: TrainerRun) -> list[int]:
    return [record.policy_version for record in await run.store.policies.announced()]


@pytest.fixture(scope="module")
def calm_weights() -> dict[str, bytes]:
    """Last weights of an uninterrupted run, computed by the first test that needs them."""
    return {}


async def uninterrupted(calm: dict[str, bytes], folder: Path, model: Path, server: EmbeddedServer) -> bytes:
    if "weights" not in calm:
        config = write_run_file(
            folder, model, server, trainer={"train_steps": STEPS}, checkpoints={"state_every_steps": 2}
        )
        async with opened_run(config) as run:
            run.start()
            async with run.fed(STEPS):
                await run.until_finished()
            calm["weights"] = await last_weights(run)
    return calm["weights"]


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("at", [*IN_BACKGROUND, "before the confirmation"])
async def test_a_trainer_killed_with_a_publication_in_flight_publishes_the_same_weights_once(
    tmp_path: Path,
    tiny_model: Path,
    server: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    calm_weights: dict[str, bytes],
    at: str,
    step: int,
) -> None:
    expected = await uninterrupted(calm_weights, tmp_path / "calm", tiny_model, server)
    async with held_run(tmp_path / "killed", tiny_model, server, monkeypatch, at=at, step=step) as run:
        if at in IN_BACKGROUND:
            await run.until("the next step to be trained", lambda: waits(run, step), pause=0.01)
            state = await run.store.training.state()
            assert (state.trained_step, state.committed_step) == (step, 2), "nothing of the next step is reported"
            assert run.checkpoints.batch_steps()[-1] == step + 1
            assert (await versions(run))[-1] == step - (IN_BACKGROUND.index(at) < 3)
        seen = {record.policy_version: record for record in await run.store.policies.announced()}
        run.kill()
        run.start()
        await run.until_finished()
        await assert_every_batch_counts_once(run, seen)
        assert await last_weights(run) == expected


async def test_the_next_version_waits_for_the_one_in_flight(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with held_run(tmp_path / "run", tiny_model, server, monkeypatch, at="before the manifest", step=2) as run:
        await run.until("the next step to be trained", lambda: waits(run, 2), pause=0.01)
        assert await versions(run) == [0, 1]
        assert not list(run.checkpoints.root.glob("policies/00000003-*"))
        release(run)
        await run.until_finished()
        await assert_every_batch_counts_once(run, {})
        announced = [json.loads(line) for line in run.log().splitlines() if '"policy_announced"' in line]
        assert [line["policy_version"] for line in announced] == list(range(STEPS + 1))


async def test_a_trainer_that_is_stopped_announces_what_it_has_trained(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with held_run(
        tmp_path / "run", tiny_model, server, monkeypatch, at="before the announcement", step=2, fed=2
    ) as run:
        process = run.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        await run.until("the end to wait for the announcement", lambda: waits(run, 2), pause=0.01)
        assert await versions(run) == [0, 1]
        release(run)
        assert await run.until_failed() == EXIT_UNFINISHED
        assert await versions(run) == [0, 1, 2]


@pytest.mark.parametrize("at", ["before the canary", "before the manifest"])
async def test_a_trainer_that_must_end_at_once_leaves_a_whole_folder_or_none(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    async with held_run(tmp_path / "run", tiny_model, server, monkeypatch, at=at, step=2, fed=2) as run:
        process = run.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        await run.until("the end to wait for the announcement", lambda: waits(run, 2), pause=0.01)
        process.send_signal(signal.SIGTERM)
        await run.until("the cancellation", lambda: '"cancelled_after_grace"' in run.log(), pause=0.01)
        release(run)
        assert await asyncio.to_thread(process.wait, 120) == 1
        left = list(run.checkpoints.root.glob("policies/00000002-*"))
        assert await versions(run) == [0, 1]
        assert [record.train_step for record in run.checkpoints.complete_policies()][2:] == [2] * len(left)
        assert len(left) == (at == "before the manifest"), "nothing is written after a cancelled canary"
        run.start()
        await run.until("version 2", lambda: _announced(run, 2), pause=0.02)
        assert not left or run.checkpoints.root / (await run.store.policies.announced())[2].path == left[0]


async def _announced(run: TrainerRun, version: int) -> bool:
    return version in await versions(run)


async def test_a_rollback_waits_for_the_publication_in_flight(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with held_run(
        tmp_path / "run", tiny_model, server, monkeypatch, at="before the folder", step=2, fed=2
    ) as run:
        await run.store.rollbacks.request(1)
        await run.until("the rollback to wait", lambda: waits(run, 2), pause=0.01)
        release(run)

        async def done() -> bool:
            return await run.store.rollbacks.pending() is None

        await run.until("the end of the rollback", done, pause=0.01)
        records = await run.store.policies.announced()
        assert [(r.policy_version, r.train_step) for r in records] == [(0, 0), (1, 1), (2, 2), (3, 2)]
        assert [run.checkpoints.open(r).manifest.parent for r in records] == [None, 0, 1, 1]


async def test_a_step_that_fails_ends_the_trainer_after_the_version_in_flight_is_announced(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXT_STEP_FAILS", "1")
    async with held_run(tmp_path / "run", tiny_model, server, monkeypatch, at="before the manifest", step=2) as run:
        await run.until("the error to wait for the publication", lambda: waits(run, 2), pause=0.01)
        assert await versions(run) == [0, 1]
        release(run)
        process = run.process
        assert process is not None
        assert await asyncio.to_thread(process.wait, 120) == 1
        assert "the test lets this step fail" in run.log()
        assert await versions(run) == [0, 1, 2]


async def test_a_publication_that_fails_ends_a_trainer_that_waits_for_a_batch(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_run_file(tmp_path / "run", tiny_model, server)
    monkeypatch.setenv("HELD_AT", "before the announcement")
    monkeypatch.setenv("HELD_STEP", "2")
    monkeypatch.setenv("HELD_FAILS", "1")
    async with opened_run(config) as run:
        process = run.start(script="held_process")
        async with run.fed(2):
            assert await asyncio.to_thread(process.wait, 120) == 1
            assert "the test lets this fail" in run.log()
            assert await versions(run) == [0, 1]
