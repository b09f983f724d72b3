"""The trajectory queue: every state change is one idempotent Lua script on a real Redis.

trajectory: pending -> leased -> finished -> scored | unscorable        leased -> partial | pending -> leased
                                                                        leased -> resting -> partial
            finished without its worker -> scoring queue                any before the cut -> evicted | dead
                                                                        any without an outcome -> surplus
group:      open -> ready | filtered | dead -> cut(s) -> consumed(s)    open, ready -> evicted
            open -> undecided -> open | ready (rounds)                  open, ready -> open (restarted)
                                                                        open, ready -> aside -> open

Every service but the reward service calls it; no other package talks to Redis. It must not decide when something
happens: a script checks that a change is allowed, and applies it.
"""

from rollmesh.store.embedded import EmbeddedOptions, EmbeddedServer
from rollmesh.store.payload import TokenDigest
from rollmesh.store.queue_types import (
    Append,
    EvalRequest,
    EvalResult,
    Finish,
    FirstToken,
    HeldTokens,
    LeasedTrajectory,
    NewGroup,
    ReleaseReason,
    ReRegistered,
    RollbackRequest,
    Score,
    StoreCounts,
)
from rollmesh.store.training import KEPT_REPORTS
from rollmesh.store.trajectory_store import TrajectoryStore
from rollmesh.store.unclaimed import SavedTokens
from rollmesh.types import WriteStatus

__all__ = [
    "KEPT_REPORTS",
    "Append",
    "EmbeddedOptions",
    "EmbeddedServer",
    "EvalRequest",
    "EvalResult",
    "Finish",
    "FirstToken",
    "HeldTokens",
    "LeasedTrajectory",
    "NewGroup",
    "ReRegistered",
    "ReleaseReason",
    "RollbackRequest",
    "SavedTokens",
    "Score",
    "StoreCounts",
    "TokenDigest",
    "TrajectoryStore",
    "WriteStatus",
]
