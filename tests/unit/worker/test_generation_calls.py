"""Saves before every call and after every chunk, and their acknowledgements to the generator."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.errors import EngineError
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.health import Waits
from rollmesh.runtime.metrics import Metrics
from rollmesh.store.queue_types import ReleaseReason
from rollmesh.types import (
    Chunk,
    FinishReason,
    GenerationCall,
    GeneratorRecord,
    PolicyRecord,
    Prompt,
    SamplingParams,
    Trajectory,
    VersionNeed,
)
from rollmesh.worker.active_trajectory import ActiveTrajectory, Parked
from rollmesh.worker.generation_calls import Acknowledger, Caller, CallLimits, SaveLimits
from rollmesh.worker.generator_pool import FIRST_AVOID_SECONDS, GeneratorPool
from rollmesh.worker.known_policies import NewestPolicy

from ...kit.records import generator_record

PROMPT = 3
CONTEXT = 400
BREAK = "break"
RECORD = generator_record("a", slot_count=1)


class Registry:
    """Generators, and the newest policy."""

    def __init__(self, newest: int = 0, records: Sequence[GeneratorRecord] = (RECORD,)) -> None:
        self.newest, self.records = newest, list(records)

    async def live(self) -> list[GeneratorRecord]:
        return self.records

    async def latest(self) -> PolicyRecord:
        return PolicyRecord(policy_version=self.newest, train_step=self.newest, path="p", manifest_digest="")


class Generator:
    """A stand-in for ``GenerationClient`` whose calls end after so many tokens, interrupted or broken."""

    def __init__(self, script: Sequence[tuple[int, FinishReason | str]], held: ActiveTrajectory) -> None:
        self._script = list(script)
        self._held = held
        self.calls: list[GenerationCall] = []
        self.unsaved_at_start: list[int] = []
        self.acknowledged: list[Mapping[str, int]] = []

    async def generate(
        self, record: GeneratorRecord, call: GenerationCall, need: VersionNeed, *, traceparent: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        self.calls.append(call)
        self.unsaved_at_start.append(self._held.token_count - self._held.saved_token_count)
        count, end = self._script.pop(0) if self._script else (call.max_new_token_count, FinishReason.LENGTH)
        room = min(call.max_new_token_count, CONTEXT - len(call.context_ids))
        if count >= room:
            count, end = room, FinishReason.LENGTH
        for start in range(0, count, call.chunk_token_count):
            size = min(call.chunk_token_count, count - start)
            last = start + size == count and end != BREAK
            yield chunk(size, end if last and isinstance(end, FinishReason) else None)
        if end == BREAK:
            raise EngineError("the connection was lost")
        if not count:
            yield chunk(0, FinishReason.INTERRUPTED)

    async def interrupt(self, record: GeneratorRecord, trajectory_ids: Sequence[str]) -> int:
        return 0

    async def acknowledge(self, record: GeneratorRecord, context_token_counts: Mapping[str, int]) -> None:
        assert record is RECORD
        self.acknowledged.append(dict(context_token_counts))
        await asyncio.sleep(0)


def chunk(size: int, reason: FinishReason | None) -> Chunk:
    return Chunk(
        token_ids=np.full(size, 5, np.int32),
        behavior_logprobs=np.full(size, -1.0, np.float32),
        policy_version=0,
        kv_min_version=0,
        finish_reason=reason,
    )


def make_held() -> ActiveTrajectory:
    prompt = Prompt(prompt_id="p", token_ids=np.ones(PROMPT, np.int32), verifier="exact")
    return ActiveTrajectory(Trajectory(trajectory_id="t", group_id="g", member_index=0, prompt=prompt))


async def make_caller(
    generator: Generator,
    partial_save_tokens: int,
    registry: Registry | None = None,
    generators: GeneratorPool | None = None,
    segment_tokens: int = 0,
    waits: Waits | None = None,
) -> Caller:
    registry = registry or Registry()
    looks = itertools.count(0, 1000)  # no generator is avoided for so long
    generators = generators or GeneratorPool(registry, clock=lambda: next(looks))  # type: ignore[arg-type]
    await generators.refresh()
    limits = CallLimits(
        vocab_size=10,
        max_context_tokens=CONTEXT,
        saving=SaveLimits.of(partial_save_tokens),
        chunk_timeout_seconds=10.0,
        segment_tokens=segment_tokens,
    )
    policies = NewestPolicy(registry)  # type: ignore[arg-type]
    return Caller(generator, generators, policies, limits, RolloutMetrics(Metrics("rollout")), waits)


async def save(held: ActiveTrajectory) -> None:
    await asyncio.sleep(0)
    held.saved_token_count = held.token_count


endings = st.tuples(st.integers(1, 120), st.sampled_from([FinishReason.INTERRUPTED, BREAK]))


@given(script=st.lists(endings, max_size=8), partial_save_tokens=st.integers(1, 200), budget=st.integers(1, 390))
async def test_everything_is_saved_before_the_next_call_begins(
    script: list[tuple[int, FinishReason | str]], partial_save_tokens: int, budget: int
) -> None:
    held = make_held()
    generator = Generator(script, held)
    caller = await make_caller(generator, partial_save_tokens)
    assert await caller.sample(held, budget, SamplingParams(), save=save) is FinishReason.LENGTH
    assert held.token_count == budget
    assert set(generator.unsaved_at_start) == {0}
    assert held.token_count - held.saved_token_count <= partial_save_tokens
    durable = [report["t"] for report in generator.acknowledged]
    assert durable == sorted(durable)
    assert all(count <= PROMPT + held.saved_token_count for count in durable)


async def test_a_trajectory_waits_for_its_tool_but_not_between_the_calls_of_one_answer() -> None:
    held, waits = make_held(), list[bool]()
    caller = await make_caller(Generator([(3, FinishReason.INTERRUPTED)], held), 8)

    async def look(held: ActiveTrajectory) -> None:
        waits.append(held.waits)
        await save(held)

    assert held.waits
    await caller.sample(held, 8, SamplingParams(), save=look)
    assert len(waits) >= 2 and not any(waits)
    assert held.waits
    held.finish_reason = FinishReason.LENGTH
    assert not held.waits, "a finished trajectory is not in the pool"


async def test_the_error_of_a_generator_shows_until_a_call_has_a_token() -> None:
    held, waits, seen = make_held(), Waits(), []

    class Watched(Generator):
        async def generate(self, *arguments: Any, **options: Any) -> AsyncGenerator[Chunk, None]:
            seen.append(waits.text())
            async for each in super().generate(*arguments, **options):
                yield each

    caller = await make_caller(Watched([(0, BREAK)], held), 16, waits=waits)
    await caller.sample(held, 10, SamplingParams(), save=None)
    assert seen == ["", f"generation: {RECORD.address}: the connection was lost"]
    assert waits.text() == ""


async def test_what_is_not_saved_before_its_end_is_neither_held_back_nor_cut_into_calls() -> None:
    held = make_held()
    generator = Generator([], held)
    caller = await make_caller(generator, 16)
    await caller.sample(held, 100, SamplingParams(), save=None)
    assert [(c.max_new_token_count, c.unacknowledged_token_limit) for c in generator.calls] == [(100, 0)]


async def test_a_small_bound_costs_no_further_calls_and_a_full_context_ends_the_answer() -> None:
    held = make_held()
    generator = Generator([], held)
    caller = await make_caller(generator, 16)
    async with asyncio.timeout(60):
        reason = await caller.sample(held, CONTEXT, SamplingParams(), save=save)
    assert reason is FinishReason.LENGTH
    assert held.token_count == CONTEXT - PROMPT
    assert [(c.chunk_token_count, c.unacknowledged_token_limit) for c in generator.calls] == [(16, 16)]


async def test_reports_that_come_up_during_a_report_travel_together_and_a_lost_one_is_no_error() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Generator):
        async def acknowledge(self, record: GeneratorRecord, context_token_counts: Mapping[str, int]) -> None:
            self.acknowledged.append(dict(context_token_counts))
            begun.set()
            await go_on.wait()
            raise EngineError("lost")

    generator = Slow([], make_held())
    acknowledger = Acknowledger(generator)
    acknowledger.saved(RECORD, "a", 5)
    await begun.wait()
    acknowledger.saved(RECORD, "a", 9)
    acknowledger.saved(RECORD, "b", 7)
    acknowledger.saved(RECORD, "a", 12)
    go_on.set()
    async with asyncio.timeout(60):
        while len(generator.acknowledged) < 2:
            await asyncio.sleep(0)
    assert generator.acknowledged == [{"a": 5}, {"a": 12, "b": 7}]


async def test_a_call_ends_with_the_chunk_that_was_enough_and_nothing_of_it_is_saved_unasked() -> None:
    held = make_held()
    generator = Generator([], held)
    caller = await make_caller(generator, 96)

    def look(held: ActiveTrajectory) -> None:
        if held.token_count > 60:
            held.request_stop(50)

    held.observe(look)
    assert await caller.sample(held, 300, SamplingParams(), save=save) is FinishReason.STOP
    assert (held.token_count, held.saved_token_count) == (50, 48)
    assert len(generator.calls) == 1


async def test_a_first_token_is_known_before_the_second_chunk_although_nothing_is_saved() -> None:
    held = make_held()
    caller = await make_caller(Generator([], held), 200)
    seen: list[int] = []

    async def report(held: ActiveTrajectory) -> None:
        seen.append(held.token_count)

    assert await caller.sample(held, 390, SamplingParams(), save=report, durable=False) is FinishReason.LENGTH
    chunk_tokens = SaveLimits.of(200).chunk_token_count
    assert seen[:2] == [0, chunk_tokens]


async def test_a_floor_that_rose_while_the_call_waited_for_a_generator_holds() -> None:
    held = make_held()
    generator = Generator([], held)
    registry = Registry(newest=3, records=())
    generators = GeneratorPool(registry)  # type: ignore[arg-type]
    caller = await make_caller(generator, 200, registry, generators)
    call = asyncio.create_task(caller.sample(held, 5, SamplingParams(), save=save))
    while not generators.waiting_count:
        await asyncio.sleep(0)
    held.set_floors(start=3, call=0)
    registry.records.append(RECORD)  # it serves version 0
    for _ in range(3):
        await generators.refresh()
        await asyncio.sleep(0)
    assert generator.calls == []
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


class Silent(Generator):
    """Sends empty chunks before each of its chunks."""

    async def generate(self, *arguments: Any, **options: Any) -> AsyncGenerator[Chunk, None]:
        yield chunk(0, None)
        async for sampled in super().generate(*arguments, **options):
            yield chunk(0, None)
            yield sampled


async def test_empty_chunks_do_not_end_a_call_and_after_them_too_only_saved_tokens_are_acknowledged() -> None:
    excess: list[int] = []

    class Comparing(Silent):
        async def acknowledge(self, record: GeneratorRecord, context_token_counts: Mapping[str, int]) -> None:
            excess.append(context_token_counts["t"] - PROMPT - held.saved_token_count)
            await super().acknowledge(record, context_token_counts)

    async def save_late(held: ActiveTrajectory) -> None:
        await asyncio.sleep(0)
        held.saved_token_count = max(0, held.token_count - 10)

    held = make_held()
    generator = Comparing([], held)
    caller = await make_caller(generator, 64)
    assert await caller.sample(held, 100, SamplingParams(), save=save_late) is FinishReason.LENGTH
    assert (held.token_count, len(generator.calls), len(held.segments)) == (100, 1, 4)
    durable = [report["t"] for report in generator.acknowledged]
    assert durable == sorted(durable) and durable[0] < durable[-1]
    assert max(excess) <= 0


async def test_a_generator_that_breaks_after_an_empty_chunk_is_avoided_for_longer_each_time() -> None:
    seconds: list[float] = []

    class Noting(GeneratorPool):
        def avoid(self, instance_id: str, at_least: float = FIRST_AVOID_SECONDS) -> float:
            seconds.append(super().avoid(instance_id, at_least))
            return seconds[-1]

    held, registry, looks = make_held(), Registry(), itertools.count(0, 1000)
    generators = Noting(registry, clock=lambda: next(looks))  # type: ignore[arg-type]
    generator = Silent([(0, BREAK)] * 3, held)
    caller = await make_caller(generator, 64, registry, generators)
    assert await caller.sample(held, 10, SamplingParams(), save=save) is FinishReason.LENGTH
    assert seconds == [5, 10, 20]


async def test_a_segment_rests_under_the_newest_policy_and_continues_at_once_if_another_is_announced() -> None:
    held, registry = make_held(), Registry()
    generator = Generator([], held)
    caller = await make_caller(generator, 16, registry, segment_tokens=48)

    async def announce(held: ActiveTrajectory) -> None:
        await save(held)
        registry.newest = 1 if 48 < held.token_count < 96 else registry.newest

    with pytest.raises(Parked) as rested:
        await caller.sample(held, 300, SamplingParams(), save=announce)
    assert (rested.value.reason, held.token_count) == (ReleaseReason.RESTED, 48)
    assert await caller.sample(held, 100, SamplingParams(), save=announce) is FinishReason.LENGTH
    assert [call.max_new_token_count for call in generator.calls] == [48, 48, 48, 4]
