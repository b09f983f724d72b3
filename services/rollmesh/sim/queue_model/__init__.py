"""The trajectory queue in plain Python: states and transitions of the store's scripts, without I/O.

The simulator, the property tests of the scheduler and the GPU bench run on it. The state machine of the store's tests
compares it with a real server after every step (``tests/integration/store/queue_machine.py``), so it is what the
scripts do. Those tests add the transitions that no simulated mesh takes: of workers that fail, fork or return, and a
rollback (``tests/kit/whole_queue_model.py``). Nonces, dead letters' payload, replays, evaluations, the registry of
generators and the recovery of a restored server are the store's alone.
"""

from rollmesh.sim.queue_model.queue import QueueModel
from rollmesh.sim.queue_model.records import (
    DroppedGroup,
    GroupState,
    ModelGroup,
    ModelMember,
    Save,
)

__all__ = ["DroppedGroup", "GroupState", "ModelGroup", "ModelMember", "QueueModel", "Save"]
