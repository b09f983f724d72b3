"""Conditions under which refused policies end a run."""

from dataclasses import replace

import pytest

from rollmesh.errors import PoliciesRefused
from rollmesh.mesh import CachePool, Desired, EngineLoad, MeshView
from rollmesh.rollout.leader_parts import RefusedPolicies, engine_load
from rollmesh.rollout.rollout_metrics import MeshMetrics, unclaimed_staleness
from rollmesh.runtime.metrics import Metrics
from rollmesh.scheduling import Schedule
from rollmesh.types import GeneratorRecord
from rollmesh.worker.routing import refused_by_all

from ...kit.records import generator_record, store_counts
from ...kit.run_files import made_run


def generator(refused: int | None, count: int = 1) -> GeneratorRecord:
    return generator_record(
        f"{refused}-{count}", slot_count=4, refused_version=refused, refused_count=count, refused_reason="canary: nan"
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


RECORD = generator_record(
    "a", running_count=4, waiting_count=2, slot_count=4, kv_token_capacity=1000, kv_tokens_used=600, preemption_total=3
)


def test_generators_that_serve_or_load_hold_trajectories() -> None:
    idle = replace(RECORD, instance_id="b", waiting_count=0, kv_tokens_used=0, preemption_total=1)
    refuses = replace(RECORD, instance_id="c", serving=False, preemption_total=0)
    load = engine_load([RECORD, idle, refuses])
    assert load == EngineLoad(slots=8, waiting=2, kv_token_capacity=2000, preemptions=4)
    assert engine_load([refuses]) is None


def test_a_generator_that_drains_for_a_reload_changes_neither_capacity_nor_preemptions() -> None:
    other, drains = replace(RECORD, instance_id="b"), replace(RECORD, serving=False, loading_version=1)
    assert engine_load([drains, other]) == engine_load([RECORD, other])


def test_a_generator_that_is_out_of_service_for_a_moment_looks_like_no_new_preemptions() -> None:
    other, away = replace(RECORD, instance_id="b"), replace(RECORD, serving=False)
    loads = [engine_load(records) for records in ([RECORD, other], [away, other], [RECORD, other])]
    assert [load.preemptions for load in loads if load is not None] == [6, 6, 6]


VIEW = MeshView(
    now=100.0,
    trained_step=6,
    cut_step=7,
    policy_version=6,
    policy_train_step=6,
    admitted_unconsumed=9,
    open_groups=4,
    ready_groups=3,
    ready=(),
    stalest_open=(),
    unclaimed_by_step=((5, 2), (7, 5)),
    ready_by_step=((7, 3),),
    pending=1,
    partial=2,
    leased=3,
    finished=4,
    memory_ratio=0.25,
    filtered_in_a_row=1,
    blocked_since=None,
    registered_generators=1,
    recovering=False,
    user_paused=False,
    is_complete=False,
)


def exported(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"rollmesh_rollout_{name}", labels)


def test_the_oldest_unclaimed_group_says_how_stale_the_next_batch_may_be() -> None:
    assert unclaimed_staleness(VIEW) == 2
    assert unclaimed_staleness(replace(VIEW, unclaimed_by_step=((5, 0), (7, 5)))) == 0
    assert unclaimed_staleness(replace(VIEW, unclaimed_by_step=())) == 0
    # A group that runs on the newest policy while an older batch is still being trained.
    assert unclaimed_staleness(replace(VIEW, unclaimed_by_step=((9, 1),))) == 0


def test_an_automatic_pool_shows_its_size_both_bounds_and_the_times_behind_them() -> None:
    metrics = Metrics("rollout")
    fields = {"groups_per_batch": 4, "group_size": 4, "pool_size": "auto"}
    schedule = Schedule.from_config(made_run(schedule=fields))
    shown = MeshMetrics(metrics)
    shown.limits(schedule)
    assert exported(metrics, "pool_trajectories") == 0, "a replica that does not lead has no pool"
    desired = Desired(pool_size=12, cache_pool=CachePool(size=12, since=0.0, preemptions=0))
    shown.pool(schedule, replace(VIEW, ready_seconds=2.0, update_seconds=4.0), desired)
    assert exported(metrics, "pool_trajectories") == 12
    assert exported(metrics, "auto_pool_bound_trajectories", by="caches") == 12
    # 4 groups for the next batch, 4 * 2 / (4 * 4) and sqrt(4) / 2 more: 5.5, rounded up, of 4 trajectories.
    assert exported(metrics, "auto_pool_bound_trajectories", by="trainer") == 24
    assert exported(metrics, "ready_seconds") == 2
    assert exported(metrics, "update_seconds") == 4


@pytest.mark.parametrize(
    ("view", "desired", "failed", "reasons"),
    [
        (VIEW, False, False, set()),
        (replace(VIEW, user_paused=True), True, False, {"person"}),
        (replace(VIEW, recovering=True), False, False, {"recovery"}),
        (VIEW, True, True, {"failure"}),
        (VIEW, True, False, {"barrier"}),
        (replace(VIEW, user_paused=True), True, True, {"person", "failure"}),
        (replace(VIEW, is_complete=True), True, False, set()),
    ],
)
def test_a_pause_names_its_reason(view: MeshView, desired: bool, failed: bool, reasons: set[str]) -> None:
    metrics = Metrics("rollout")
    MeshMetrics(metrics).paused(view, desired=desired, failed=failed)
    shown = {by for by in ("person", "failure", "recovery", "barrier") if exported(metrics, "paused", by=by)}
    assert shown == reasons


@pytest.mark.parametrize(("rests_since", "steps"), [(None, 0), (7, 0), (5, 2)])
def test_a_rest_is_as_old_as_the_policies_that_were_announced_since(rests_since: int | None, steps: int) -> None:
    metrics = Metrics("rollout")
    MeshMetrics(metrics).counted(store_counts(oldest_rest_step=rests_since), 7)
    assert exported(metrics, "oldest_rest_steps") == steps
