"""Prediction of ``rollmesh config validate --simulate``: one line with the figures and all that they assume."""

from pathlib import Path

from typer.testing import CliRunner

from rollmesh.cli.main import app

RUN = Path(__file__).parents[3] / "examples" / "countdown-cpu.yaml"


def validate(*options):
    return CliRunner().invoke(app, ["config", "validate", str(RUN), *options])


def test_the_last_line_has_the_figures_and_what_they_assume():
    sets = (
        "schedule.preset=sync",
        "schedule.max_staleness=null",
        "schedule.pool_size=null",
        "trainer.train_steps=1000",
    )
    result = validate(*(item for each in sets for item in ("--set", each)), "--simulate", "--with", "gpu=H200")
    assert result.exit_code == 0, result.output
    line = result.stdout.splitlines()[-1]
    assert line.startswith("simulated, 20 train steps: ")
    for text in (
        " updates/s, staleness 0.00 (at most 0), the trainer waits ",
        "assumed: gpu=H200, model=",
        "compute=0.4",
    ):
        assert text in line
    assert "countdown" in line.partition("model=")[2].partition(",")[0]


def test_without_the_option_nothing_is_simulated():
    result = validate()
    assert result.exit_code == 0 and "simulated" not in result.stdout


def test_a_setting_without_the_simulation_is_refused():
    result = validate("--with", "gpu=H200")
    assert result.exit_code == 2 and "--with gpu=H200: a setting of the simulation; add --simulate" in result.stderr
