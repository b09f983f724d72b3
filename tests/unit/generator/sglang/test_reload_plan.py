"""Effects of a load on running requests."""

from __future__ import annotations

import pytest

from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.sglang.server import nothing_changed, plan_reload

INTERRUPT, KEEP_KV, DRAIN = OnNewVersion.INTERRUPT, OnNewVersion.KEEP_KV, OnNewVersion.DRAIN


@pytest.mark.parametrize(
    ("mode", "interrupt", "version", "on_trial", "expected"),
    [
        (INTERRUPT, "retract", 5, None, (False, "retract", True)),
        (INTERRUPT, "abort", 5, None, (True, "retract", True)),
        (KEEP_KV, "retract", 5, None, (False, "in_place", False)),
        (KEEP_KV, "abort", 5, None, (False, "in_place", False)),
        (DRAIN, "abort", 5, None, (False, "retract", True)),
        # A pin below the version in service: no call may go on with an older policy.
        (INTERRUPT, "retract", 3, None, (True, "retract", True)),
        (KEEP_KV, "retract", 3, None, (True, "retract", True)),
        # Back from a version that failed its trial: its cache must go, its calls may stay.
        (INTERRUPT, "retract", 4, 5, (False, "retract", True)),
        (INTERRUPT, "abort", 4, 5, (False, "retract", True)),
        (KEEP_KV, "retract", 4, 5, (False, "retract", True)),
    ],
)
def test_the_plan_of_a_load(mode, interrupt, version, on_trial, expected):
    plan = plan_reload(mode, interrupt=interrupt, version=version, in_service=4, on_trial=on_trial)
    assert (plan.end_running, plan.pause_mode, plan.flush) == expected


@pytest.mark.parametrize(
    ("message", "reported", "unchanged"),
    [
        ("Failed to get weights iterator: no such file.", "4", True),
        ("Failed to get weights iterator: no such file.", "5", False),
        ("Failed to update weights: bad shape.\nRolling back to original weights.", "4", False),
        ("Weights were updated, but the cache was not flushed because requests are still running", "4", False),
    ],
)
def test_only_an_update_that_wrote_nothing_leaves_the_old_weights(message, reported, unchanged):
    assert nothing_changed(message, reported, 4) is unchanged
