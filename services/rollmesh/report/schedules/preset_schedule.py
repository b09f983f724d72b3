"""Schedule of a preset on the demo's task, with the settings that go with it."""

from __future__ import annotations

from rollmesh.config import load_run_config
from rollmesh.config.recipes import recipe_file
from rollmesh.scheduling import Schedule
from rollmesh.scheduling.companions import companion_settings
from rollmesh.scheduling.presets import PRESETS


def preset_schedule(preset: str, *overrides: str) -> Schedule:
    """Return the schedule of the demo's run file under a preset, with its own numbers and then ``overrides``."""
    settings = ["schedule.pool_size=null", "schedule.max_staleness=null", f"schedule.preset={preset}"]
    settings += [*companion_settings(PRESETS[preset]), *overrides]
    return Schedule.from_config(load_run_config(recipe_file("countdown", "demo.yaml"), settings, environ={}))
