"""Work of the engines between two step reports."""

from rollmesh.trainer.service.trainer_progress import EngineWork, GeneratedTokens
from rollmesh.types import GeneratorRecord, GeneratorWork


def generator(name: str, prefill: int, again: int, running: float, slots: float) -> GeneratorRecord:
    return GeneratorRecord(
        instance_id=name,
        address=f"{name}:1",
        policy_version=0,
        running_count=0,
        waiting_count=0,
        slot_count=8,
        kv_token_capacity=100,
        serving=True,
        work=GeneratorWork(
            prefill_tokens=prefill, reprefill_tokens=again, running_slot_seconds=running, slot_seconds=slots
        ),
    )


def test_a_step_reports_what_the_engines_did_since_the_one_before() -> None:
    work = EngineWork(GeneratedTokens())
    work.begin([generator("a", 1000, 900, 80.0, 80.0)])
    first = work.since_last([generator("a", 1100, 920, 82.0, 88.0), generator("b", 100, 20, 2.0, 8.0)])
    assert (first["prefill_tokens"], first["reprefill_tokens"]) == (200, 40), "a new generator began at zero"
    assert first["reprefill_share"] == 0.2
    assert first["bubble_ratio"] == 0.75
    second = work.since_last([generator("a", 1150, 930, 90.0, 96.0), generator("b", 150, 20, 10.0, 16.0)])
    assert (second["reprefill_share"], second["bubble_ratio"]) == (0.1, 0.0)


def test_a_generator_that_was_missing_for_a_step_is_not_counted_twice() -> None:
    work = EngineWork(GeneratedTokens())
    work.since_last([generator("a", 100, 10, 1.0, 8.0)])
    assert work.since_last([])["prefill_tokens"] == 0
    assert work.since_last([generator("a", 150, 20, 2.0, 16.0)])["prefill_tokens"] == 50


def test_a_step_without_news_of_the_engines_has_no_shares() -> None:
    work = EngineWork(GeneratedTokens())
    work.begin([generator("a", 100, 10, 1.0, 8.0)])
    nothing = work.since_last([generator("a", 100, 10, 1.0, 8.0)])
    assert (nothing["reprefill_share"], nothing["bubble_ratio"]) == (None, None)


def test_a_generator_that_died_before_the_step_ended_is_counted_up_to_its_last_report() -> None:
    work = EngineWork(GeneratedTokens())
    work.begin([generator("a", 100, 10, 1.0, 8.0)])
    work.observe([generator("a", 150, 20, 5.0, 16.0)])
    assert work.since_last([])["prefill_tokens"] == 50
    assert work.since_last([])["prefill_tokens"] == 0
