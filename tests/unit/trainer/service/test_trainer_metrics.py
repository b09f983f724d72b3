"""Goodput, work of the engines, counters of groups and waste, and the disk of the checkpoints."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.samples import Sample

from rollmesh.checkpoints.sealing import canonical
from rollmesh.runtime.metrics import Metrics
from rollmesh.store.queue_types import WASTE_REASONS
from rollmesh.trainer.service.trainer_metrics import (
    Growth,
    TrainerMetrics,
    dropped_by_decile,
    length_decile,
    trained_share,
)
from rollmesh.trainer.service.trainer_progress import EngineWork, GeneratedTokens, Progress
from rollmesh.trainer.service.training_loop import mesh_numbers
from rollmesh.types import GeneratorRecord, GeneratorWork

from ....kit.records import generator_record, store_counts


def generator(name: str, generated: int = 0, **work: float) -> GeneratorRecord:
    return generator_record(name, work=GeneratorWork(generated_tokens=generated, **work))


def worked(name: str, prefill: int, again: int, running: float, slots: float) -> GeneratorRecord:
    work = {"prefill_tokens": prefill, "reprefill_tokens": again, "running_slot_seconds": running}
    return generator(name, slot_seconds=slots, **work)


def saved_and_loaded(progress: Progress) -> Progress:
    """As a trainer state holds it."""
    return Progress.from_extra(json.loads(canonical(progress.to_extra())))


def test_a_queue_that_came_back_empty_takes_nothing_from_the_goodput() -> None:
    progress = Progress(trained_token_total=500_000)
    progress.generated.add([generator("a", 600_000)])
    numbers: dict[str, Any] = mesh_numbers(store_counts(totals={"saved_tokens_total": 10_000}), progress)
    assert numbers["goodput"] == pytest.approx(5 / 6)
    assert (numbers["trained_token_total"], numbers["generated_token_total"]) == (500_000, 600_000)


def test_a_generator_that_started_again_adds_to_what_its_former_process_sampled() -> None:
    generated = GeneratedTokens()
    for look in ([generator("a", 100)], [generator("a", 150)], [], [generator("b", 30)], [generator("b", 30)]):
        generated.add(look)
    assert generated.total == 180
    generated.add([generator("a", 140), generator("b", 30)])
    assert generated.total == 180, "an older record adds nothing, and takes nothing"
    generated.add([generator("a", 160), generator("b", 30)])
    assert generated.total == 190


def test_a_trainer_that_started_again_counts_what_was_sampled_meanwhile_once() -> None:
    progress = Progress(trained_token_total=60)
    EngineWork(progress.generated).begin([generator("a", 100)])
    progress = saved_and_loaded(progress)
    engines = EngineWork(progress.generated)
    engines.begin([generator("a", 130), generator("b", 20)])
    engines.observe([generator("a", 140), generator("b", 20)])
    assert progress.generated.total == 160
    assert progress.generated.goodput(progress.trained_token_total) == 60 / 160


@pytest.mark.parametrize(
    ("records", "trained"),
    [([], 0), ([], 5), ([generator("a", 0)], 0), ([generator("a", 10)], 11)],
)
def test_a_goodput_that_cannot_be_known_is_none(records: list[GeneratorRecord], trained: int) -> None:
    generated = GeneratedTokens()
    generated.add(records)
    assert generated.goodput(trained) is None


def test_the_memory_of_generators_is_bounded_and_forgets_the_longest_unseen_first() -> None:
    generated = GeneratedTokens()
    generated.add([generator("first", 1), generator("stays", 1)])
    for start in range(0, 12_000, 2_000):
        generated.add([generator("stays", 1), *(generator(f"g{start + i}", 1) for i in range(2_000))])
    assert len(generated.seen) == 10_000
    assert "stays" in generated.seen and "first" not in generated.seen
    assert generated.total == 12_002 and math.isclose(generated.goodput(6_001) or 0, 0.5)


def test_a_step_reports_what_the_engines_did_since_the_one_before() -> None:
    work = EngineWork(GeneratedTokens())
    work.begin([worked("a", 1000, 900, 80.0, 80.0)])
    first = work.since_last([worked("a", 1100, 920, 82.0, 88.0), worked("b", 100, 20, 2.0, 8.0)])
    assert (first["prefill_tokens"], first["reprefill_tokens"]) == (200, 40), "a new generator began at zero"
    assert first["reprefill_share"] == 0.2
    assert first["bubble_ratio"] == 0.75
    second = work.since_last([worked("a", 1150, 930, 90.0, 96.0), worked("b", 150, 20, 10.0, 16.0)])
    assert (second["reprefill_share"], second["bubble_ratio"]) == (0.1, 0.0)


def drafting(name: str, draft_bytes: int, accepted: int, drafted: int, **steps: tuple[int, int]) -> GeneratorRecord:
    """``steps`` has the steps and tokens by running calls."""
    counters = {"drafted": drafted, "accepted": accepted}
    counters |= {f"steps {running}": count for running, (count, _) in steps.items()}
    counters |= {f"tokens {running}": tokens for running, (_, tokens) in steps.items()}
    return generator_record(name, work=GeneratorWork(speculation=counters), draft_bytes=draft_bytes)


def test_a_step_reports_what_drafts_saved_and_wasted_and_the_tokens_of_a_call_a_step() -> None:
    work = EngineWork(GeneratedTokens())
    assert work.since_last([generator("plain", 5)])["speculation"] is None
    work.begin([drafting("a", 10, 60, 100, **{"1": (50, 110)})])
    records = [
        drafting("a", 20, 90, 140, **{"1": (60, 135), "33-64": (8, 12)}),
        drafting("b", 5, 5, 10, **{"1": (10, 15), "3-4": (2, 2)}),
    ]
    assert work.since_last(records)["speculation"] == {
        "drafted_tokens": 50,
        "accepted_tokens": 35,
        "wasted_tokens": 15,
        "draft_bytes": 25,
        "tokens_per_step": {"1": 2.0, "3-4": 1.0, "33-64": 1.5},
    }
    assert work.since_last(records)["speculation"]["tokens_per_step"] == {}


def test_a_generator_that_was_missing_for_a_step_is_not_counted_twice() -> None:
    work = EngineWork(GeneratedTokens())
    work.since_last([worked("a", 100, 10, 1.0, 8.0)])
    assert work.since_last([])["prefill_tokens"] == 0
    assert work.since_last([worked("a", 150, 20, 2.0, 16.0)])["prefill_tokens"] == 50


def test_a_generator_that_died_before_the_step_ended_is_counted_up_to_its_last_report() -> None:
    work = EngineWork(GeneratedTokens())
    work.begin([worked("a", 100, 10, 1.0, 8.0)])
    work.observe([worked("a", 150, 20, 5.0, 16.0)])
    assert work.since_last([])["prefill_tokens"] == 50
    assert work.since_last([])["prefill_tokens"] == 0


def test_a_decile_is_the_share_of_finished_trajectories_that_were_shorter() -> None:
    finished = {0: 10, 4: 40, 8: 30, 12: 20}  # buckets of 0, 1, 3 and 7 tokens
    assert length_decile(0, finished) == 0
    assert length_decile(1, finished) == 1
    assert length_decile(3, finished) == 5
    assert length_decile(7, finished) == 8
    assert length_decile(10_000, finished) == 9
    assert length_decile(5, {}) == 0


def test_the_trained_share_of_a_decile_counts_every_reason_of_a_drop() -> None:
    dropped = dropped_by_decile({"stale:9": 2, "straggler_timeout:9": 1, "filtered_all_right:0": 4})
    assert dropped == [4, 0, 0, 0, 0, 0, 0, 0, 0, 3]
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


def wasted(metrics: Metrics) -> dict[str, float]:
    samples: list[Sample] = [s for family in metrics.registry.collect() for s in family.samples if s.name == NAME]
    return {sample.labels["reason"]: sample.value for sample in samples}


def test_tokens_of_members_without_a_score_are_exported_beside_those_of_dropped_groups() -> None:
    metrics = Metrics("trainer")
    trainer = TrainerMetrics(metrics)
    assert wasted(metrics) == dict.fromkeys(WASTE_REASONS, 0), "every reason is there before anything is wasted"
    trainer.groups.observe([], store_counts(dropped_tokens={"stale": 5, "unscorable": 7}))
    trainer.groups.observe([], store_counts(dropped_tokens={"stale": 6, "unscorable": 27, "dead": 4}))
    assert {reason: n for reason, n in wasted(metrics).items() if n} == {"stale": 1, "unscorable": 20, "dead": 4}
