"""Settings of the train step that change when a run is continued: what was trained is trained again as it was."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.runtime.lifecycle import EXIT_CONFIG
from rollmesh.trainer.learner.policy_state import learning_rate

from .trainer_run import GROUPS, Runs

DECAYING: dict[str, Any] = {"lr_schedule": "cosine"}


def kl(reference: int) -> dict[str, Any]:
    return {"algorithm": {"kl_coefficient": 0.1, "kl_reference_version": reference}}


async def test_a_continued_run_takes_new_settings_from_its_first_new_batch_on(runs: Runs) -> None:
    async with runs(trainer={"train_steps": 6, **DECAYING, **kl(0)}, checkpoints={"state_every_steps": 10}) as run:
        run.start()
        async with run.fed(8):
            await run.until_version(3, pause=0.001)
            run.kill()
            written = run.checkpoints.batch_steps()[-1]
            assert run.checkpoints.latest_committed() is None, "all steps will be trained again"
            now = runs.file(
                trainer={"train_steps": 8, "minibatches": GROUPS, **DECAYING, **kl(2)},
                checkpoints={"state_every_steps": 10, "keep_last": 2},
            )
            run.start()
            await run.until_finished()
        lines = run.lines()
        assert [line["replayed"] for line in lines] == [step <= written for step in range(1, 9)]
        sections = [(run.config if step <= written else now).trainer for step in range(1, 9)]
        rates = [learning_rate(section, step, section.train_steps) for step, section in enumerate(sections, 1)]
        assert [line["learning_rate"] for line in lines] == rates
        assert [line["updates"] for line in lines] == [1 if step <= written else GROUPS for step in range(1, 9)]
        assert '"minibatches": "1 -> 2"' in run.log()
        # The first step is trained by the weights of version 0, the third by those of version 2.
        assert lines[0]["policy"]["kl_reference"] == pytest.approx(0, abs=1e-9)
        assert lines[2]["policy"]["kl_reference"] > 0
        assert lines[7]["policy"]["kl_reference"] > 0
        kept = [path.name.partition("-")[0] for path in sorted(run.checkpoints.root.glob("policies/*"))]
        assert kept == ["00000000", "00000002", "00000007", "00000008"], "the reference is not pruned"


async def test_a_kl_reference_that_does_not_exist_is_refused_before_anything_is_trained(runs: Runs) -> None:
    async with runs(trainer={"train_steps": 1, **kl(2)}) as run:
        assert run.start().wait(120) == EXIT_CONFIG
        assert "trainer.algorithm.kl_reference_version=2: this policy version is not published yet" in run.log()
        assert run.checkpoints.batch_steps() == []
        runs.file(trainer={"train_steps": 1, **kl(0)})
        await run.train(1)


async def test_a_kl_reference_that_is_pruned_is_refused_with_what_is_kept(runs: Runs) -> None:
    options = {"checkpoints": {"keep_last": 2}}
    async with runs(trainer={"train_steps": 3, **kl(0)}, **options) as run:
        await run.train(3)
        runs.file(trainer={"train_steps": 4, **kl(1)}, **options)
        assert run.start().wait(120) == EXIT_CONFIG
        assert "trainer.algorithm.kl_reference_version=1: " in run.log()
        assert "the kept versions are version 0, the newest versions (checkpoints.keep_last)" in run.log()
