"""A killed trainer continues the average of the weights and 8-bit moments bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.store import EmbeddedServer

from .test_kills import MOMENTS, assert_every_batch_counts_once, last_weights
from .trainer_run import opened_run, write_run_file

pytestmark = pytest.mark.slow

STEPS = len(MOMENTS) + 2
ALGORITHM = {"loss": "decoupled_ppo", "old_logprobs": "ewma", "old_logprobs_options": {"reset_below": 0}}
TRAINER = {"train_steps": STEPS, "algorithm": ALGORITHM, "optimizer": "adamw_8bit"}


@pytest.mark.timeout(600)
async def test_a_trainer_with_ewma_and_8_bit_moments_killed_at_every_moment_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer
) -> None:
    states = {"state_every_steps": 2}
    calm = write_run_file(tmp_path / "calm", tiny_model, server, trainer=TRAINER, checkpoints=states)
    async with opened_run(calm) as run:
        run.start()
        async with run.fed(STEPS):
            await run.until_finished()
        expected = await last_weights(run)
    killed = write_run_file(tmp_path / "killed", tiny_model, server, trainer=TRAINER, checkpoints=states)
    async with opened_run(killed) as run:
        run.start()
        async with run.fed(STEPS):
            for step, (name, moment) in enumerate(MOMENTS, start=1):
                await run.until(f"step {step}: {name}", lambda m=moment, s=step: m(run, s))
                run.kill()
                run.start()
            await run.until_finished()
        await assert_every_batch_counts_once(run, {})
        assert await last_weights(run) == expected
