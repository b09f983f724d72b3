"""The run files of the comparison of real runs with the simulator, and arms that it refuses."""

from pathlib import Path

import pytest

from benchmarks.processes import write_run_file
from benchmarks.sim_check import ARMS, CELLS, run, run_file
from rollmesh.errors import ConfigError


@pytest.mark.parametrize("arm", ["sync", *ARMS])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_arm_has_a_run_file_that_is_read_back(tmp_path: Path, arm: str, cell) -> None:
    config = write_run_file(tmp_path / "run.yaml", run_file(arm, cell, 3, 8, tmp_path / "run"))
    assert (config.schedule.preset, config.seed, config.trainer.train_steps) == (arm, 3, 9)
    assert (config.generator.pace is not None) == cell.is_paced
    assert (config.generator.on_new_version == "keep_kv") == (arm == "pipeline")
    assert (config.trainer.algorithm.loss == "decoupled_ppo") == (arm == "areal")


@pytest.mark.parametrize(("arm", "reason"), [("nosuch", "known are .*copris"), ("sync", "calibrated")])
def test_an_arm_that_cannot_be_predicted_is_refused_before_the_first_run(tmp_path: Path, arm: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--arm {arm}: .*{reason}"):
        run(arm=["copris", arm], output=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
