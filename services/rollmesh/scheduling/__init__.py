"""Pure scheduling: the leader's decisions for one view of the mesh. No I/O, no clock, no asyncio.

The leader calls ``decide`` with a view of the queue; simulator and property tests with views of ``queue_model``.
It must not remember anything between two calls.
"""

from rollmesh.scheduling.axes import AdmissionRule, CutOrder, OnStale, StartOrder
from rollmesh.scheduling.decide import decide, needs_groups
from rollmesh.scheduling.resolved_schedule import Schedule, run_limits

__all__ = ["AdmissionRule", "CutOrder", "OnStale", "Schedule", "StartOrder", "decide", "needs_groups", "run_limits"]
