"""The trajectory queue in plain Python: every state and every transition of the store's scripts, without I/O.

The simulator, the property tests of the scheduler and the GPU bench run on it. The state machine of the store's tests
compares it with a real server after every step (``tests/integration/store/queue_machine.py``), so it is what the
scripts do. It models one server that loses nothing: nonces, dead letters' payload, replays, evaluations, the registry
of generators and the recovery of a restored server are the store's alone.
"""

from rollmesh.sim.queue_model.queue import QueueModel
from rollmesh.sim.queue_model.records import (
    DroppedGroup,
    GroupState,
    HeldSaves,
    ModelGroup,
    ModelMember,
    Save,
)

__all__ = ["DroppedGroup", "GroupState", "HeldSaves", "ModelGroup", "ModelMember", "QueueModel", "Save"]
