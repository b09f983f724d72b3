"""Load of the generators for an automatic pool."""

from dataclasses import replace

from rollmesh.mesh import EngineLoad
from rollmesh.rollout.evidence import engine_load
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


def test_generators_that_serve_or_load_hold_trajectories() -> None:
    idle = replace(RECORD, instance_id="b", waiting_count=0, kv_tokens_used=0, preemption_total=1)
    refuses = replace(RECORD, instance_id="c", serving=False, preemption_total=0)
    load = engine_load([RECORD, idle, refuses])
    assert load == EngineLoad(slots=8, waiting=2, kv_tokens_used=600, kv_token_capacity=2000, preemptions=4)
    assert engine_load([refuses]) is None


def test_a_generator_that_drains_for_a_reload_changes_neither_capacity_nor_preemptions() -> None:
    other = replace(RECORD, instance_id="b")
    drains = replace(RECORD, serving=False, loading_version=1)
    assert engine_load([drains, other]) == engine_load([RECORD, other])


def test_a_generator_that_is_out_of_service_for_a_moment_looks_like_no_new_preemptions() -> None:
    other, away = replace(RECORD, instance_id="b"), replace(RECORD, serving=False)
    loads = [engine_load(records) for records in ([RECORD, other], [away, other], [RECORD, other])]
    assert [load.preemptions for load in loads if load is not None] == [6, 6, 6]
