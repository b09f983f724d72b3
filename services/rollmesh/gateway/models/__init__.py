"""What the REST API answers. Times are Unix seconds, durations seconds, sizes bytes; null means not known.

Identifiers and versions are those of the run: a policy version is an integer, a trajectory id is
``<group>.<member>``.
"""

from __future__ import annotations

from rollmesh.gateway.models.base import About, ErrorBody, Model
from rollmesh.gateway.models.live import (
    Drop,
    EvaluationPoint,
    GeneratorView,
    Memory,
    Overview,
    Rates,
    RolloutSpan,
    RunState,
    Series,
    SeriesAnswer,
    ServiceScale,
    SnapshotEvent,
    Staleness,
    StalenessBin,
    StepReport,
    TickEvent,
    Timeline,
    TimelineDelta,
    VersionInterval,
)
from rollmesh.gateway.models.records import (
    DeadLetterList,
    DeadLetterView,
    Done,
    GeneratorList,
    ListState,
    Outcome,
    PolicyList,
    PolicyView,
    ScaleRequest,
    TokenRun,
    TrajectoryDetail,
    TrajectoryPage,
    TrajectorySummary,
)

__all__ = [
    "About",
    "DeadLetterList",
    "DeadLetterView",
    "Done",
    "Drop",
    "ErrorBody",
    "EvaluationPoint",
    "GeneratorList",
    "GeneratorView",
    "ListState",
    "Memory",
    "Model",
    "Outcome",
    "Overview",
    "PolicyList",
    "PolicyView",
    "Rates",
    "RolloutSpan",
    "RunState",
    "ScaleRequest",
    "Series",
    "SeriesAnswer",
    "ServiceScale",
    "SnapshotEvent",
    "Staleness",
    "StalenessBin",
    "StepReport",
    "TickEvent",
    "Timeline",
    "TimelineDelta",
    "TokenRun",
    "TrajectoryDetail",
    "TrajectoryPage",
    "TrajectorySummary",
    "VersionInterval",
]
