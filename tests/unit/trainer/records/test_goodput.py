"""Goodput is a share of what the generators sampled over the life of the run, across restarts."""

import json
import math
from typing import Any

import pytest

from rollmesh.checkpoints.committed import new_record
from rollmesh.checkpoints.sealing import canonical
from rollmesh.store import StoreCounts
from rollmesh.trainer.service.trainer_progress import EngineWork, GeneratedTokens, Progress
from rollmesh.trainer.service.training_loop import mesh_numbers
from rollmesh.types import GeneratorRecord, GeneratorWork


def generator(name: str, generated: int, prefill: int = 100) -> GeneratorRecord:
    return GeneratorRecord(
        instance_id=name,
        address=f"{name}:1",
        policy_version=0,
        running_count=0,
        waiting_count=0,
        slot_count=8,
        kv_token_capacity=100,
        serving=True,
        work=GeneratorWork(prefill_tokens=prefill, generated_tokens=generated),
    )


def counts(saved: int) -> StoreCounts:
    return StoreCounts(
        trajectories={},
        groups={},
        totals={"saved_tokens_total": saved},
        drops={},
        dropped_tokens={},
        drop_deciles={},
        scoring_queue=0,
        sessions=1,
        dead_letters=0,
        used_memory_bytes=0,
        max_memory_bytes=0,
    )


def saved_and_loaded(progress: Progress) -> Progress:
    """As a trainer state holds it."""
    record = new_record(train_step=1, rollback_count=0, session="a", files=[[]], extra=progress.to_extra())
    return Progress.from_extra(json.loads(canonical(record.model_dump(mode="json")))["extra"])


def test_a_queue_that_came_back_empty_takes_nothing_from_the_goodput() -> None:
    progress = Progress(trained_token_total=500_000)
    progress.generated.add([generator("a", 600_000)])
    numbers: dict[str, Any] = mesh_numbers(counts(saved=10_000), progress)
    assert numbers["goodput"] == pytest.approx(5 / 6)
    assert (numbers["trained_token_total"], numbers["generated_token_total"]) == (500_000, 600_000)


def test_tokens_that_were_sampled_and_never_saved_lower_the_goodput() -> None:
    progress = Progress(trained_token_total=80)
    progress.generated.add([generator("a", 100)])
    assert mesh_numbers(counts(saved=80), progress)["goodput"] == 0.8


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


def test_a_generator_that_has_done_nothing_yet_hides_nothing() -> None:
    generated = GeneratedTokens()
    generated.add([generator("a", 10), generator("starting", 0, prefill=0)])
    assert generated.goodput(5) == 0.5


def test_the_memory_of_generators_is_bounded_and_forgets_the_longest_unseen_first() -> None:
    generated = GeneratedTokens()
    generated.add([generator("first", 1), generator("stays", 1)])
    for start in range(0, 12_000, 2_000):
        generated.add([generator("stays", 1), *(generator(f"g{start + i}", 1) for i in range(2_000))])
    assert len(generated.seen) == 10_000
    assert "stays" in generated.seen and "first" not in generated.seen
    assert generated.total == 12_002 and math.isclose(generated.goodput(6_001) or 0, 0.5)


def test_a_trainer_that_started_again_forgets_the_longest_unseen_first_too() -> None:
    progress = Progress()
    progress.generated.add([generator("z", 1), generator("a", 2)])
    progress = saved_and_loaded(progress)
    assert list(progress.generated.seen.items()) == [("z", 1), ("a", 2)]
