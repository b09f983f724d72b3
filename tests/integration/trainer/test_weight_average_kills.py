"""A killed trainer continues the average of the weights and 8-bit moments bit by bit."""

from __future__ import annotations

import pytest

from .test_kills import MOMENTS, assert_every_batch_counts_once, kill_at_every_moment
from .trainer_run import Runs

pytestmark = pytest.mark.slow

STEPS = len(MOMENTS) + 2
ALGORITHM = {"loss": "decoupled_ppo", "old_logprobs": "ewma", "old_logprobs_options": {"reset_below": 0}}
TRAINER = {"train_steps": STEPS, "algorithm": ALGORITHM, "optimizer": "adamw_8bit"}


@pytest.mark.timeout(600)
async def test_a_trainer_with_ewma_and_8_bit_moments_killed_at_every_moment_ends_where_an_uninterrupted_one_does(
    runs: Runs,
) -> None:
    states = {"state_every_steps": 2}
    async with runs("calm", trainer=TRAINER, checkpoints=states) as run:
        await run.train(STEPS)
        expected = await run.last_weights()
    async with runs("killed", trainer=TRAINER, checkpoints=states) as run:
        run.start()
        async with run.fed(STEPS):
            await kill_at_every_moment(run)
            await run.until_finished()
        await assert_every_batch_counts_once(run, {})
        assert await run.last_weights() == expected
