"""The trajectory queue in plain Python: states and transitions of the store's scripts, without I/O.

The simulator, the property tests of the scheduler and the GPU bench run on it. The state machine of the store's tests
compares it with a real server after every step (``tests/integration/store/queue_machine.py``), so it is what the
scripts do. Those tests add what no simulated mesh has (``tests/kit/whole_queue_model.py``): workers that fail, fork or
return, a rollback, and large groups that are reset and deleted in slices. Nonces, dead letters' payload, replays,
evaluations, the registry of generators and the recovery of a restored server are the store's alone.
"""

from rollmesh.sim.queue_model.queue import QueueModel
from rollmesh.sim.queue_model.records import GroupState, ModelGroup, ModelMember, Save

__all__ = ["GroupState", "ModelGroup", "ModelMember", "QueueModel", "Save"]
