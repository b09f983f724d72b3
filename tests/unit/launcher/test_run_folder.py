from pathlib import Path

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.curriculum import CurriculumConfig
from rollmesh.config.data import CountdownSource, DataConfig
from rollmesh.config.store import CheckpointConfig, StoreConfig
from rollmesh.errors import ConfigError
from rollmesh.launcher.run_folder import RunFolder, locked_run_folder

from ...kit.run_files import made_run


def config(folder: Path, **trainer: object) -> RunConfig:
    return made_run(folder, trainer=trainer)


def start(run: RunConfig) -> RunFolder:
    with locked_run_folder(run) as folder:
        return folder


def train(folder: Path) -> None:
    """Leave the batch file of a first train step."""
    (folder / "checkpoints" / "batches").mkdir(parents=True)
    (folder / "checkpoints" / "batches" / "00000001.pb").touch()


def test_a_second_start_with_the_same_settings_continues_and_may_train_longer(tmp_path: Path) -> None:
    start(config(tmp_path, train_steps=3))
    folder = start(config(tmp_path, train_steps=5))
    assert load_run_config(folder.config_file, environ={}).trainer.train_steps == 5


def test_a_continued_run_may_change_its_sampler_and_says_so(tmp_path: Path) -> None:
    """Another option of the same sampler is a change too; the same sampler again is none."""
    samplers: list[CurriculumConfig] = [
        CurriculumConfig(),
        CurriculumConfig(sampler="band", sampler_options={"unseen": 0.25}),
        CurriculumConfig(sampler="band", sampler_options={"unseen": 0.75}),
        CurriculumConfig(sampler="band", sampler_options={"unseen": 0.75}),
    ]
    puzzles = DataConfig(source=CountdownSource(puzzles=64))
    changes = []
    for curriculum in samplers:
        run = config(tmp_path).model_copy(update={"curriculum": curriculum, "data": puzzles})
        with locked_run_folder(run) as folder:
            changes.append([change.partition(":")[0] for change in folder.changes])
            if not (tmp_path / "checkpoints").exists():
                train(tmp_path)
    assert changes[0] == changes[3] == []
    assert {name.partition(".")[2].partition(".")[0] for name in changes[1]} == {"sampler", "sampler_options"}
    assert changes[2] == ["curriculum.sampler_options.unseen"]


def test_another_learning_rate_of_a_continued_run_is_announced(tmp_path: Path) -> None:
    first = config(tmp_path)
    with locked_run_folder(first):
        train(tmp_path)
    trainer = first.trainer.model_copy(update={"learning_rate": 5e-5})
    store = StoreConfig(password=SecretStr("ours"))
    with capture_logs() as logs:
        folder = start(first.model_copy(update={"trainer": trainer, "store": store}))
        assert folder.changes == (f"trainer.learning_rate: {first.trainer.learning_rate} -> 5e-05",)
    assert [log["field"] for log in logs if log["event"] == "setting_changed"] == ["trainer.learning_rate"]


def test_a_folder_of_a_run_with_other_settings_is_refused_with_field_values_and_remedy(tmp_path: Path) -> None:
    with locked_run_folder(config(tmp_path, max_grad_norm=1.0)):
        train(tmp_path)
    problem = rf"max_grad_norm: it defines a train step.* \(recorded 1.0, now 2.0\).* --folder {tmp_path}-2"
    with pytest.raises(ConfigError, match=problem):
        start(config(tmp_path, max_grad_norm=2.0))


def test_a_run_that_has_cut_no_batch_may_change_every_setting_and_its_files_are_set_aside(tmp_path: Path) -> None:
    with locked_run_folder(config(tmp_path, max_grad_norm=1.0)):
        (tmp_path / "redis").mkdir()
        (tmp_path / "checkpoints" / "policies").mkdir(parents=True)
        (tmp_path / "evaluations.jsonl").write_text("{}\n")
    folder = start(config(tmp_path, max_grad_norm=2.0))
    assert load_run_config(folder.config_file, environ={}).trainer.max_grad_norm == 2.0
    assert {path.name for path in (tmp_path / "untrained-1").iterdir()} == {"redis", "checkpoints", "evaluations.jsonl"}
    assert not (tmp_path / "checkpoints").exists()


def test_an_untrained_run_is_kept_where_its_queue_or_its_checkpoints_are_not_in_the_folder(tmp_path: Path) -> None:
    elsewhere = config(tmp_path).model_copy(update={"checkpoints": CheckpointConfig(folder=str(tmp_path / "shared"))})
    start(elsewhere)
    other = elsewhere.model_copy(update={"seed": 9})
    with pytest.raises(ConfigError, match=r"seed: .* \(recorded 0, now 9\)"):
        start(other)
