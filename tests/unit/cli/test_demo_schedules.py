"""Settings with which ``rollmesh demo-schedules`` runs each preset."""

import pytest
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config import load_run_config
from rollmesh.config.recipes import recipe_file
from rollmesh.scheduling import Schedule
from rollmesh.scheduling.companions import companion_settings
from rollmesh.scheduling.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_the_settings_that_go_with_a_preset_make_a_valid_run_of_the_demo(name: str) -> None:
    overrides = ["schedule.pool_size=null", "schedule.max_staleness=null", f"schedule.preset={name}"]
    overrides += companion_settings(PRESETS[name])
    config = load_run_config(recipe_file("countdown", "demo.yaml"), overrides, environ={})
    assert Schedule.from_config(config).preset == name


def test_companion_settings_are_overrides_of_single_fields() -> None:
    assert companion_settings(PRESETS["dart"]) == [
        "generator.reload_at_once=1",
        'trainer.algorithm.loss="tis"',
        'trainer.algorithm.old_logprobs="recompute"',
    ]
    assert companion_settings(PRESETS["sync"]) == []


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(app, ["demo-schedules", "--preset", "copris2"])
    assert done.exit_code == 2
    assert "--preset copris2: not a preset; known: sync, " in " ".join(done.output.split())
