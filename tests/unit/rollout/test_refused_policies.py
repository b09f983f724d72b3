"""Conditions under which refused policies end a run."""

from __future__ import annotations

from rollmesh.errors import PoliciesRefused
from rollmesh.rollout.run_failures import RefusedPolicies, refused_by_all
from rollmesh.types import GeneratorRecord


def generator(refused: int | None, count: int = 1) -> GeneratorRecord:
    return GeneratorRecord(
        instance_id=f"{refused}-{count}",
        address="127.0.0.1:1",
        policy_version=0,
        running_count=0,
        waiting_count=0,
        slot_count=4,
        kv_token_capacity=64,
        serving=True,
        refused_version=refused,
        refused_count=count,
        refused_reason="canary: nan",
    )


def test_versions_that_every_generator_refuses_in_a_row_end_the_run_at_the_stated_number() -> None:
    refusals = RefusedPolicies(version_limit=3, seconds=300.0)
    assert refusals.judge(0.0, 1, [generator(1), generator(1)]) is None
    assert refusals.judge(1.0, 3, [generator(3, 3), generator(3, 2)]) is None
    error = refusals.judge(2.0, 4, [generator(4, 4), generator(4, 3)])
    assert isinstance(error, PoliciesRefused) and error.final
    assert "version 4 and has refused 3 versions in a row (generator.refused_versions_limit=3): canary" in str(error)


def test_one_version_that_every_generator_refuses_ends_the_run_after_a_time() -> None:
    """With a staleness bound of 0 no other version ever follows."""
    refusals = RefusedPolicies(version_limit=3, seconds=300.0)
    assert refusals.judge(0.0, 1, [generator(1)]) is None
    assert refusals.judge(299.0, 1, [generator(1)]) is None
    error = refusals.judge(300.0, 1, [generator(1)])
    assert "has refused it for 300 s (launcher.start_timeout_seconds)" in str(error)


def test_the_initial_model_is_not_blamed_on_the_learning_rate() -> None:
    error = RefusedPolicies(version_limit=1, seconds=300.0).judge(0.0, 0, [generator(0)])
    assert "model.path" in str(error) and "learning_rate" not in str(error)


def test_a_generator_that_serves_or_has_not_answered_yet_keeps_the_run_going() -> None:
    refusals = RefusedPolicies(version_limit=1, seconds=1.0)
    for generators in ([], [generator(2), generator(None)], [generator(2), generator(1)]):
        assert refusals.judge(0.0, 2, generators) is None
        assert refusals.judge(9.0, 2, generators) is None
        assert refused_by_all(2, generators) is None
