import os
from pathlib import Path

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.curriculum import CurriculumConfig
from rollmesh.config.data import CountdownSource, DataConfig
from rollmesh.config.rollout import EvalConfig
from rollmesh.config.store import CheckpointConfig, StoreConfig
from rollmesh.errors import ConfigError
from rollmesh.launcher.run_folder import locked_run_folder


def config(folder: Path, evaluation: dict[str, object] | None = None, **trainer: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "trial",
            "folder": str(folder),
            "model": {"path": "models/tiny"},
            "trainer": trainer,
            "evaluation": evaluation or {},
        }
    )


def train(folder: Path) -> None:
    """Leave the batch file of a first train step."""
    (folder / "checkpoints" / "batches").mkdir(parents=True)
    (folder / "checkpoints" / "batches" / "00000001.pb").touch()


def test_a_second_launcher_on_the_same_folder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with locked_run_folder(config(tmp_path)), pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        with locked_run_folder(config(tmp_path)):
            pass


def test_a_folder_that_cannot_be_created_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"folder=.*file/run: cannot be created: .*Not a directory"):
        with locked_run_folder(config(tmp_path / "file" / "run")):
            pass


def test_a_second_start_with_the_same_settings_continues_and_may_train_longer(tmp_path: Path) -> None:
    with locked_run_folder(config(tmp_path, train_steps=3)):
        pass
    with locked_run_folder(config(tmp_path, train_steps=5)) as folder:
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
    with (
        capture_logs() as logs,
        locked_run_folder(
            first.model_copy(update={"trainer": trainer, "store": StoreConfig(password=SecretStr("ours"))})
        ) as folder,
    ):
        assert folder.changes == (f"trainer.learning_rate: {first.trainer.learning_rate} -> 5e-05",)
    assert [log["field"] for log in logs if log["event"] == "setting_changed"] == ["trainer.learning_rate"]


@pytest.mark.parametrize(
    ("field", "value", "options"), [("planner", "spare", {}), ("group_shaper", "dot", {"alpha": 1.5})]
)
def test_a_continued_run_keeps_its_planner_and_group_shaper(
    tmp_path: Path, field: str, value: str, options: dict[str, float]
) -> None:
    with locked_run_folder(config(tmp_path)):
        train(tmp_path)
    curriculum = CurriculumConfig.model_validate({field: value, f"{field}_options": options})
    other = config(tmp_path).model_copy(update={"curriculum": curriculum})
    with pytest.raises(ConfigError, match=rf"curriculum\.{field}: .*recorded .*, now \"{value}\""):
        with locked_run_folder(other):
            pass


def test_a_run_with_a_key_of_its_own_is_continued(tmp_path: Path) -> None:
    keyed = config(tmp_path).model_copy(
        update={"checkpoints": CheckpointConfig(secret=SecretStr("from the environment"))}
    )
    for _ in range(2):
        with locked_run_folder(keyed) as folder:
            assert "from the environment" not in folder.config_file.read_text()


def test_a_folder_of_a_run_with_other_settings_is_refused_with_field_values_and_remedy(tmp_path: Path) -> None:
    with locked_run_folder(config(tmp_path, max_grad_norm=1.0)):
        train(tmp_path)
    with (
        pytest.raises(
            ConfigError,
            match=rf"max_grad_norm: it defines a train step.* \(recorded 1.0, now 2.0\).* --folder {tmp_path}-2",
        ),
        locked_run_folder(config(tmp_path, max_grad_norm=2.0)),
    ):
        pass


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt_count", 32), ("samples_per_prompt", 2), ("temperature", 0.0), ("top_p", 0.9), ("top_k", 5), ("seed", 7)],
)
def test_a_continued_run_cannot_compare_other_questions_or_other_answers(
    tmp_path: Path, field: str, value: object
) -> None:
    with locked_run_folder(config(tmp_path)):
        train(tmp_path)
    with pytest.raises(ConfigError, match=f"evaluation.{field}"), locked_run_folder(config(tmp_path, {field: value})):
        pass


def test_a_continued_run_may_be_evaluated_more_or_less_often(tmp_path: Path) -> None:
    assert set(EvalConfig.model_fields) == {
        *("every_versions", "before_and_after"),
        *("prompt_count", "samples_per_prompt", "temperature", "top_p", "top_k", "seed"),
    }, "a new field of the evaluation is either when or what: decide"
    with locked_run_folder(config(tmp_path)):
        pass
    changed = {"every_versions": 5, "before_and_after": False}
    with locked_run_folder(config(tmp_path, changed)) as folder:
        assert load_run_config(folder.config_file, environ={}).evaluation.every_versions == 5


def test_a_run_that_has_cut_no_batch_may_change_every_setting_and_its_files_are_set_aside(tmp_path: Path) -> None:
    with locked_run_folder(config(tmp_path, max_grad_norm=1.0)):
        (tmp_path / "redis").mkdir()
        (tmp_path / "checkpoints" / "policies").mkdir(parents=True)
        (tmp_path / "evaluations.jsonl").write_text("{}\n")
    with locked_run_folder(config(tmp_path, max_grad_norm=2.0)) as folder:
        assert load_run_config(folder.config_file, environ={}).trainer.max_grad_norm == 2.0
    assert {path.name for path in (tmp_path / "untrained-1").iterdir()} == {"redis", "checkpoints", "evaluations.jsonl"}
    assert not (tmp_path / "checkpoints").exists()


def test_an_untrained_run_is_kept_where_its_queue_or_its_checkpoints_are_not_in_the_folder(tmp_path: Path) -> None:
    elsewhere = config(tmp_path).model_copy(update={"checkpoints": CheckpointConfig(folder=str(tmp_path / "shared"))})
    with locked_run_folder(elsewhere):
        pass
    other = elsewhere.model_copy(update={"seed": 9})
    with pytest.raises(ConfigError, match=r"seed: .* \(recorded 0, now 9\)"), locked_run_folder(other):
        pass
