"""A gang as ``rollmesh up`` starts it ends with the status of a wrong setting only when a setting is wrong."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from rollmesh.config import write_run_config
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.service_specs import child_environment, service_spec
from rollmesh.runtime.lifecycle import EXIT_CONFIG

from .trainer_run import START_SECONDS, Runs, TrainerRun
from .two_ranks import run_two_ranks


def start_ranks(run: TrainerRun) -> subprocess.Popen[bytes]:
    """Start two ranks by the launcher's command."""
    launcher = run.config.launcher.model_copy(update={"trainer_processes": 2, "torch_threads": 1})
    config = run.config.model_copy(update={"launcher": launcher})
    environment = child_environment(config, str(config.store.url))
    folder = RunFolder(run.folder)
    write_run_config(config, folder.config_file)
    spec = service_spec(config, folder, environment, "trainer", 0)
    with (run.folder / "trainer.log").open("ab") as log:
        run.process = subprocess.Popen(spec.command, stdout=log, stderr=log, env=os.environ | spec.environment)
    return run.process


async def test_a_setting_that_only_the_leading_rank_can_refuse_is_the_exit_status_of_all_ranks(runs: Runs) -> None:
    async with runs() as run:
        await run.store.training.open_session("another run of this name", lineage="of other checkpoints")

        ranks = start_ranks(run)

        assert ranks.wait(START_SECONDS) == EXIT_CONFIG, run.log()[-4000:]
        assert "choose another name" in run.log()


async def test_moments_that_cannot_be_split_are_refused_whoever_starts_the_ranks(runs: Runs) -> None:
    """On Kubernetes the number of ranks is not in the run file."""
    async with runs(trainer={"optimizer": "adamw_8bit"}) as run:
        ranks = run.start(ranks=2)

        assert ranks.wait(START_SECONDS) == EXIT_CONFIG, run.log()[-4000:]
        assert "trainer.optimizer=adamw_8bit with 2 trainer processes" in run.log()


async def test_a_rank_that_is_killed_leaves_a_status_that_is_worth_another_try(runs: Runs) -> None:
    async with runs() as run:
        ranks = start_ranks(run)
        await run.until("two ranks", lambda: len(run.ranks()) == 2, START_SECONDS, pause=0.01)

        run.ranks()[1].kill()

        assert ranks.wait(120) == 1, run.log()[-4000:]


def test_the_wait_for_an_order_outlasts_the_limit_of_collective_calls_and_ends_with_the_leader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "waited")
    _, follower = run_two_ranks("wait", tmp_path)
    assert re.search(r"^training: .*[Tt]imed out", follower, re.MULTILINE), follower
    assert re.search(r"^order: late$", follower, re.MULTILINE), follower
    assert re.search(r"^leader: .*(closed|reset)", follower, re.MULTILINE), follower
