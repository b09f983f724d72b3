"""Schedule of a preset on the demo's task, with the settings that go with it."""

from __future__ import annotations

from rollmesh.config import load_run_config
from rollmesh.config.recipes import recipe_file
from rollmesh.scheduling import Schedule
from rollmesh.scheduling.companions import companion_settings
from rollmesh.scheduling.presets import PRESETS

PICTURED_BATCH, PICTURED_GROUP = 4, 2
"""Groups per batch and trajectories per group of a picture."""
PICTURED_TOKENS = 24
"""Most tokens of a trajectory in a picture, of which a segment is a share."""


def pictured_schedule(preset: str, *overrides: str) -> Schedule:
    """Return the schedule of a preset at the size of a picture, in which every token is saved at once."""
    size = (f"schedule.groups_per_batch={PICTURED_BATCH}", f"schedule.group_size={PICTURED_GROUP}")
    lengths = (f"rollout.max_new_tokens={PICTURED_TOKENS}", "rollout.partial_save_tokens=1")
    return preset_schedule(preset, *size, *lengths, *overrides)


def preset_schedule(preset: str, *overrides: str) -> Schedule:
    """Return the schedule of the demo's run file under a preset, with its own numbers and then ``overrides``."""
    settings = ["schedule.pool_size=null", "schedule.max_staleness=null", f"schedule.preset={preset}"]
    settings += [*companion_settings(PRESETS[preset]), *overrides]
    return Schedule.from_config(load_run_config(recipe_file("countdown", "demo.yaml"), settings, environ={}))
