"""Load of the generators for an automatic pool."""

from dataclasses import replace

from rollmesh.mesh import EngineLoad
from rollmesh.rollout.pool_evidence import engine_load
from rollmesh.types import GeneratorRecord

RECORD = GeneratorRecord(
    instance_id="a",
    address="a:1",
    policy_version=0,
    running_count=4,
    waiting_count=2,
    slot_count=4,
    kv_token_capacity=1000,
    serving=True,
    kv_tokens_used=600,
    preemption_total=3,
)


def test_only_generators_that_serve_hold_trajectories() -> None:
    idle = replace(RECORD, instance_id="b", waiting_count=0, kv_tokens_used=0, preemption_total=1)
    load = engine_load([RECORD, idle, replace(RECORD, instance_id="c", serving=False)])
    assert load == EngineLoad(slots=8, waiting=2, kv_tokens_used=600, kv_token_capacity=2000, preemptions=4)
    assert engine_load([replace(RECORD, serving=False)]) is None
