"""The table of schedules names the numbers that the presets resolve to."""

from typer.testing import CliRunner

from rollmesh.cli.configuration import numbers
from rollmesh.cli.main import app
from rollmesh.scheduling.presets import PRESETS


def test_every_preset_is_printed_with_its_source_deviation_and_companions() -> None:
    printed = CliRunner().invoke(app, ["config", "schedules"]).output
    for name, preset in PRESETS.items():
        for text in (name, preset.source, preset.deviation, preset.goes_with):
            assert text in printed


def test_the_numbers_are_fields_of_the_run_file() -> None:
    assert numbers(PRESETS["rollpacker"]) == [
        "admission wave",
        "max_staleness 0",
        "window_groups 1.25 B",
        "pool_size 1.25 B * 1.25 n",
        "on_stale set_aside",
        "wave_batches 1",
        "spare_groups 0.25 B",
        "spare_members 0.25 n",
        "barrier",
    ]
    assert "pool_size 2 B * n" in numbers(PRESETS["pipeline"])
