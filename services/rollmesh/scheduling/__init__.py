"""Pure scheduling: the leader's decisions for one view of the mesh. No I/O, no clock, no asyncio.

The leader calls ``decide`` with a view of the queue; the simulator of the tests calls the same function. It must not
remember anything between two calls.
"""

from rollmesh.scheduling.decide import decide, needs_groups
from rollmesh.scheduling.presets import expected_staleness, resolve_schedule
from rollmesh.scheduling.resolved_schedule import AdmissionRule, OnStale, Schedule
from rollmesh.scheduling.run_limits import run_limits

__all__ = [
    "AdmissionRule",
    "OnStale",
    "Schedule",
    "decide",
    "expected_staleness",
    "needs_groups",
    "resolve_schedule",
    "run_limits",
]
