import pytest
from prometheus_client import CollectorRegistry, Counter

from rollmesh.trainer.records.trainer_metrics import Growth, dropped_by_decile, length_decile, trained_share


def test_a_decile_is_the_share_of_finished_trajectories_that_were_shorter() -> None:
    finished = {0: 10, 4: 40, 8: 30, 12: 20}  # buckets of 0, 1, 3 and 7 tokens
    assert length_decile(0, finished) == 0
    assert length_decile(1, finished) == 1
    assert length_decile(3, finished) == 5
    assert length_decile(7, finished) == 8
    assert length_decile(10_000, finished) == 9
    assert length_decile(5, {}) == 0


def test_dropped_groups_add_up_over_reasons() -> None:
    counts = dropped_by_decile({"stale:9": 2, "straggler_timeout:9": 1, "filtered_all_right:0": 4})
    assert counts == [4, 0, 0, 0, 0, 0, 0, 0, 0, 3]


def test_a_trained_share_needs_a_group_that_left_the_queue() -> None:
    assert trained_share([3, 0, 0], [1, 2, 0]) == [0.75, 0.0, None]


def test_growth_counts_from_its_first_value_and_never_backwards() -> None:
    counter = Counter("c_total", "c", ["reason"], registry=CollectorRegistry())
    growth = Growth(counter)
    for totals in ({"stale": 5}, {"stale": 7, "dead": 1}, {"stale": 3}, {"stale": 4}):
        growth.update(totals)
    assert counter.labels("stale")._value.get() == pytest.approx(3)
    assert counter.labels("dead")._value.get() == pytest.approx(1)
