"""The overview that follows from one snapshot of the mesh."""

import pytest

from rollmesh.gateway.mesh_snapshot import MeshSnapshot, finished_evaluations, run_state
from rollmesh.mesh import Desired
from rollmesh.prompt_history import DomainTotals
from rollmesh.step_metrics import RateWindow
from rollmesh.store.policy_registry import HeldPin
from rollmesh.store.queue_types import EvalRecord, EvalRequest, EvalResult

from .samples import SCHEDULE, built, counts, generator, look, view


@pytest.mark.parametrize(
    ("one", "state", "waiting_for"),
    [
        (look(desired=Desired(pool_size=24, waiting_for="4 more ready groups of 4")), "running", "4 more ready groups"),
        (look(), "running", ""),
        (look(generators=[generator(serving=False)]), "running", "a generator that serves"),
        (look(view=view(policy_version=-1)), "starting", "the trainer to publish the initial policy"),
        (look(view=view(user_paused=True)), "paused", "an operator to resume"),
        (look(desired=Desired(pool_size=24, paused=True, reason="batch 4 is cut")), "paused", "batch 4 is cut"),
        (
            look(
                view=view(user_paused=True), desired=Desired(pool_size=24, paused=True, reason="paused by an operator")
            ),
            "paused",
            "an operator to resume",
        ),
        (look(view=view(launcher_paused=True)), "paused", "the launcher, which evaluates"),
        (look(view=view(recovering=True)), "recovering", "workers to register again"),
        (look(failure="the verifier fails"), "failed", "the verifier fails"),
        (look(view=view(trained_step=40, cut_step=40, is_complete=True, policy_train_step=40)), "complete", ""),
        (look(view=view(trained_step=40, cut_step=40, is_complete=True, policy_train_step=39)), "running", ""),
    ],
)
def test_the_state_says_what_the_run_does_and_waits_for(one: MeshSnapshot, state: str, waiting_for: str) -> None:
    found, why = run_state(one, SCHEDULE)
    assert found == state
    assert waiting_for in why


def test_the_staleness_of_waiting_groups_is_the_one_in_the_next_batch() -> None:
    overview = built(look(view=view(unclaimed_by_step=((1, 2), (3, 5)))))
    assert [(each.staleness, each.count) for each in overview.staleness.queue] == [(0, 5), (2, 2)]
    assert overview.staleness.bound == 4
    training = built(look(view=view(trained_step=3, cut_step=4, unclaimed_by_step=((1, 2),))))
    assert [(each.staleness, each.count) for each in training.staleness.queue] == [(3, 2)]


def test_drops_and_waste_without_a_drop_are_told_by_reason_with_their_tokens() -> None:
    totals = {"groups_restarted_total": 3, "surplus_total": 5, "dead_total": 0, "restarts_total": 9}
    tokens = {"restarted": 70, "surplus": 40, "stale": 9}
    found = counts(totals=totals, drops={"stale": 2, "rolled_back": 0}, dropped_tokens=tokens)
    overview = built(look(counts=found))
    assert [(d.reason, d.groups, d.tokens) for d in overview.drops] == [("stale", 2, 9)]
    assert [(w.reason, w.count, w.tokens) for w in overview.waste] == [("surplus", 5, 40), ("restarted", 3, 70)]


def test_domains_with_the_most_groups_come_first_and_not_all_are_listed() -> None:
    names = [f"d{number:02}" for number in range(70)]
    totals = {
        name: DomainTotals(drawn=number % 35, completed=8, solved=3, tokens=900) for number, name in enumerate(names)
    }
    overview = built(look(domains=totals))
    assert (len(overview.domains), overview.domain_count) == (64, 70)
    assert [view.domain for view in overview.domains[:3]] == ["d34", "d69", "d33"]
    assert list(overview.domains[0].model_dump().values()) == ["d34", 34, 8, 3, 900]
    assert built(look()).domains == ()


def test_generators_that_serve_come_first_and_tell_how_far_they_are_behind() -> None:
    records = [generator("a", serving=False, policy_version=-1, reason="loading"), generator("b", policy_version=1)]
    views = built(look(generators=records)).generators
    assert [(g.instance_id, g.versions_behind, g.serving) for g in views] == [("b", 2, True), ("a", 0, False)]
    crowd = built(look(generators=[generator(f"g{i}") for i in range(1000)]))
    assert (len(crowd.generators), crowd.generator_count) == (256, 1000)


def test_services_tell_what_runs_and_what_was_asked_for() -> None:
    overview = built(look(scale_requests={"generator": 3}), running={"generator": 2, "reward": 1})
    assert [(s.service, s.running, s.requested) for s in overview.services] == [
        ("generator", 2, 3),
        ("reward", 1, None),
    ]


def test_rates_are_those_of_the_last_seconds_and_survive_a_redis_that_went_back() -> None:
    window = RateWindow()
    assert window.update(0.0, 0, 0) == [0.0, 0.0]
    for second in range(1, 61):
        total = 100 * second if second <= 40 else 4000 + 300 * (second - 40)
        rates = window.update(float(second), total, second)
    assert rates == pytest.approx([300.0, 1.0])
    assert window.update(61.0, 10, 60) == [0.0, 0.0]
    assert window.update(62.0, 60, 62) == pytest.approx([50.0, 2.0])


def test_only_finished_evaluations_are_points_and_the_newest_of_a_version_counts() -> None:
    def record(version: int, mean: float | None, sample_count: int = 8) -> EvalRecord:
        result = None if mean is None else EvalResult(mean=mean, standard_error=0.1, sample_count=sample_count)
        request = EvalRequest(evaluation_id=f"{version}-{mean}", policy_version=version, prompt_count=8)
        return EvalRecord(
            request=request, claimed=True, result=result, request_time_seconds=1.0, finish_time_seconds=2.0
        )

    given_up = record(7, 0.0, sample_count=0)
    points = finished_evaluations([record(5, 0.5), record(0, 0.2), record(9, None), given_up, record(5, 0.6)])
    assert [(p.policy_version, p.mean) for p in points] == [(0, 0.2), (5, 0.6)]


@pytest.mark.parametrize(
    ("pin", "shown"),
    [
        (None, (None, None)),
        (HeldPin(policy_version=3, owner=""), (3, "operator")),
        (HeldPin(policy_version=3, owner="evaluation-7"), (3, "evaluation")),
    ],
)
def test_a_pin_is_shown_with_its_owner(pin: HeldPin | None, shown: tuple[int | None, str | None]) -> None:
    overview = built(look(pin=pin))
    assert (overview.pinned_version, overview.pinned_by) == shown
