"""Counters of groups by length, of waste, and the disk of the checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.samples import Sample

from rollmesh.runtime.metrics import Metrics
from rollmesh.store.queue_types import WASTE_REASONS, StoreCounts
from rollmesh.trainer.service.trainer_metrics import (
    Growth,
    TrainerMetrics,
    dropped_by_decile,
    length_decile,
    trained_share,
)


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


def shown(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"rollmesh_trainer_checkpoint_{name}") or 0.0


def test_the_disk_of_the_checkpoints_is_shown_and_an_unreachable_one_keeps_its_figures(tmp_path: Path) -> None:
    metrics = Metrics("trainer")
    trainer = TrainerMetrics(metrics)
    trainer.disk.observe(tmp_path)
    free, size = shown(metrics, "free_bytes"), shown(metrics, "disk_bytes")
    assert 0 < free <= size
    trainer.disk.observe(tmp_path / "gone")
    assert (shown(metrics, "free_bytes"), shown(metrics, "disk_bytes")) == (free, size)


NAME = "rollmesh_trainer_wasted_tokens_total"


def counts(dropped_tokens: dict[str, int]) -> StoreCounts:
    return StoreCounts(
        trajectories={},
        groups={},
        totals={},
        drops={},
        dropped_tokens=dropped_tokens,
        drop_deciles={},
        scoring_queue=0,
        sessions=1,
        dead_letters=0,
        used_memory_bytes=0,
        max_memory_bytes=0,
    )


def wasted(metrics: Metrics) -> dict[str, float]:
    samples: list[Sample] = [s for family in metrics.registry.collect() for s in family.samples if s.name == NAME]
    return {sample.labels["reason"]: sample.value for sample in samples}


def test_tokens_of_members_without_a_score_are_exported_beside_those_of_dropped_groups() -> None:
    metrics = Metrics("trainer")
    trainer = TrainerMetrics(metrics)
    assert wasted(metrics) == dict.fromkeys(WASTE_REASONS, 0), "every reason is there before anything is wasted"
    trainer.groups.observe([], counts({"stale": 5, "unscorable": 7}))
    trainer.groups.observe([], counts({"stale": 6, "unscorable": 27, "dead": 4}))
    assert {reason: n for reason, n in wasted(metrics).items() if n} == {"stale": 1, "unscorable": 20, "dead": 4}
