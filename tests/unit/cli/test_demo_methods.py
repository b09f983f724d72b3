"""Settings with which ``rollmesh demo-methods`` runs each method."""

import pytest
from typer.testing import CliRunner

from rollmesh.cli.demo_methods import method_settings
from rollmesh.cli.main import app
from rollmesh.cli.method_table import POINTS
from rollmesh.config import load_run_config
from rollmesh.config.recipes import recipe_file
from rollmesh.scheduling import Schedule

FIELDS = {"budget": "token_budget"}
"""Points with two fields, of which the demo runs one."""


def test_every_method_of_the_registries_has_a_row() -> None:
    every = [f"{FIELDS.get(point, point)}/{name}" for point, methods in POINTS.items() for name in methods]
    assert list(method_settings()) == every


@pytest.mark.parametrize("name", method_settings())
def test_the_settings_that_go_with_a_method_make_a_valid_run_of_the_demo(name: str) -> None:
    overrides = ["schedule.pool_size=null", "schedule.max_staleness=null", *method_settings()[name]]
    config = load_run_config(recipe_file("countdown", "demo.yaml"), overrides, environ={})
    assert Schedule.from_config(config).preset in ("copris", "copris_paper")


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    done = CliRunner().invoke(app, ["demo-methods", "--method", "drpo"])
    assert done.exit_code == 2
    assert "--method drpo: not a method of the demo; known: sampler/order, " in " ".join(done.output.split())
