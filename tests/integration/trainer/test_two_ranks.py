"""Two ranks under torchrun: one claims and commits, both train, and the loss of one costs nothing but time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from rollmesh.store import EmbeddedServer

from .test_kills import assert_every_batch_counts_once, last_weights
from .trainer_run import START_SECONDS, TrainerRun, opened_run, write_run_file

pytestmark = pytest.mark.slow

STEPS = 4


async def test_two_ranks_train_like_one_even_when_one_of_them_is_killed(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer
) -> None:
    async with opened_run(write_run_file(tmp_path / "alone", tiny_model, server)) as run:
        run.start()
        async with run.fed(STEPS):
            await run.until_finished()
        expected = load(await last_weights(run))
    async with opened_run(write_run_file(tmp_path / "ranks", tiny_model, server)) as run:
        ranks = run.start(ranks=2, fresh=True)
        async with run.fed(STEPS):
            await run.until("step 2", lambda: _announced(run, 2), pause=0.01)
            _, follower = run.ranks()
            follower.kill()
            run.process = None
            assert ranks.wait(120) == 1, "a crash is worth another try"
            run.start(ranks=2, fresh=True)
            await run.until_finished(START_SECONDS)
        await assert_every_batch_counts_once(run, {})
        found = load(await last_weights(run))
    for name, weights in expected.items():
        assert np.abs(found[name] - weights).max() < 2e-4, name


async def _announced(run: TrainerRun, step: int) -> bool:
    latest = await run.store.policies.latest()
    return latest is not None and latest.train_step >= step
