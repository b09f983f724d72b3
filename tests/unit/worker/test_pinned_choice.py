from rollmesh.types import GeneratorRecord
from rollmesh.worker.routing import choose_pinned


def record(name: str, version: int, running: int = 0, serving: bool = True) -> GeneratorRecord:
    return GeneratorRecord(
        instance_id=name,
        address=f"{name}:1",
        policy_version=version,
        running_count=running,
        waiting_count=0,
        slot_count=8,
        kv_token_capacity=100,
        serving=serving,
    )


def test_a_generator_that_serves_the_version_is_held_back_before_an_idle_one_that_must_load_it() -> None:
    assert choose_pinned([record("a", 4), record("b", 3, running=8)], 3).instance_id == "b"


def test_among_equals_the_least_busy_one_is_held_back() -> None:
    assert choose_pinned([record("a", 3, running=5), record("b", 3, running=1)], 3).instance_id == "b"


def test_the_choice_stays_while_the_generator_is_registered_even_while_it_loads() -> None:
    records = [record("a", 3), record("b", 4, running=8, serving=False)]
    assert choose_pinned(records, 3, current="b").instance_id == "b"
    assert choose_pinned(records[:1], 3, current="b").instance_id == "a"


def test_without_a_serving_generator_no_call_is_restricted() -> None:
    assert choose_pinned([record("a", 3, serving=False)], 3) is None
