"""Unsaved tokens of a real generator whose caller saves slowly: the loss if that worker is killed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import httpx
import pytest

from rollmesh.generator.engines import call_limits
from rollmesh.launcher.timeline_recorder import GENERATED_TOKENS, metric_sums
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.metrics import Metrics
from rollmesh.types import FinishReason, Prompt, SamplingParams, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.generation_calls import Caller, CallLimits, SaveLimits
from rollmesh.worker.generator_pool import GeneratorPool
from rollmesh.worker.known_policies import NewestPolicy

from ...kit.generation import VOCAB, prompt_ids
from .generator_run import GeneratorRun

HELD_BACK = "rollmesh_generator_calls_held_back_total"
CALLS = "rollmesh_generator_calls_total"
BUDGET = 160


class Saves:
    """Stands in for the queue: a save looks at the generator just before it is done.

    It takes up to ``seconds``; if the generator ``may_run`` ahead, the first ones begin when it has, as far as it may.
    """

    def __init__(self, run: GeneratorRun, client: httpx.AsyncClient, seconds: float, *, may_run: bool = False) -> None:
        self._admin = read_endpoints(run.folder, "generator")[0].admin
        self._client = client
        self._seconds = seconds
        self._may_run = may_run
        self._rng = random.Random(7)
        self._already = 0.0
        self.saved = 0
        self.most_unsaved = 0

    async def metrics(self) -> dict[str, float]:
        return metric_sums((await self._client.get(f"http://{self._admin}/metrics")).text)

    async def begin(self) -> None:
        self._already = (await self.metrics())[GENERATED_TOKENS]

    async def save(self, held: ActiveTrajectory) -> None:
        """The unsaved tokens grow until a save is done, so this is where they are most."""
        end = held.token_count
        if end == held.saved_token_count:
            return
        if self._may_run and not self.saved:
            while (await self.metrics())[HELD_BACK] == 0:
                await asyncio.sleep(0.02)
        await asyncio.sleep(self._rng.uniform(0.0, self._seconds))
        generated = (await self.metrics())[GENERATED_TOKENS] - self._already
        self.most_unsaved = max(self.most_unsaved, int(generated) - self.saved)
        self.saved += end - held.saved_token_count
        held.saved_token_count = end


def held_trajectory(name: str) -> ActiveTrajectory:
    prompt = Prompt(prompt_id=name, token_ids=prompt_ids(len(name)), verifier="exact")
    return ActiveTrajectory(
        Trajectory(trajectory_id=name, group_id=name, member_index=0, prompt=prompt, birth_version=0)
    )


async def make_caller(run: GeneratorRun, partial_save_tokens: int) -> Caller:
    generators = GeneratorPool(run.store.generators)
    await generators.refresh()
    limits = CallLimits(
        vocab_size=VOCAB,
        max_context_tokens=256,
        saving=SaveLimits.of(partial_save_tokens),
        chunk_timeout_seconds=60.0,
    )
    return Caller(run.client, generators, NewestPolicy(run.store.policies), limits, RolloutMetrics(Metrics("rollout")))


async def sample(
    caller: Caller, name: str, save: Callable[[ActiveTrajectory], Awaitable[None]] | None
) -> ActiveTrajectory:
    held = held_trajectory(name)
    assert await caller.sample(held, BUDGET, SamplingParams(seed=3), save=save) is FinishReason.LENGTH
    if save is not None:
        await save(held)
    return held


@pytest.mark.parametrize("rollouts", [1, 8])
@pytest.mark.parametrize("partial_save_tokens", [16, 64])
async def test_the_unsaved_tokens_of_a_rollout_stay_within_partial_save_tokens(make_run, partial_save_tokens, rollouts):
    run = await make_run(pace=[[1, 0.004]])
    await run.publish(0)
    run.start_process(0)
    await run.serving(0)
    caller = await make_caller(run, partial_save_tokens)
    whole = await asyncio.gather(*(sample(caller, f"t{i}", None) for i in range(rollouts)))
    async with httpx.AsyncClient(timeout=60) as client:
        saves = Saves(run, client, 0.16, may_run=True)
        await saves.begin()
        async with asyncio.timeout(120):
            helds = await asyncio.gather(*(sample(caller, f"t{i}", saves.save) for i in range(rollouts)))
        held_back = (await saves.metrics())[HELD_BACK]
    assert held_back > 0
    assert saves.most_unsaved <= partial_save_tokens * rollouts
    for held, one in zip(helds, whole, strict=True):
        assert held.context_ids().tolist() == one.context_ids().tolist()


@pytest.mark.parametrize("partial_save_tokens", [16, 64])
async def test_a_call_whose_saves_are_slow_is_held_and_not_ended_and_prefilled_again(
    make_run, monkeypatch, partial_save_tokens
):
    monkeypatch.setattr(call_limits, "_HOLD_SECONDS", 600.0)
    monkeypatch.setattr(call_limits, "_CONTENDED_HOLD_SECONDS", 600.0)
    run = await make_run()
    await run.begin()
    caller = await make_caller(run, partial_save_tokens)
    async with httpx.AsyncClient(timeout=60) as client:
        saves = Saves(run, client, 0.02, may_run=True)
        async with asyncio.timeout(120):
            await asyncio.gather(*(sample(caller, f"t{i}", saves.save) for i in range(4)))
        metrics = await saves.metrics()
    assert metrics[HELD_BACK] > 0
    assert metrics[CALLS] == 4
    assert metrics["rollmesh_generator_reprefill_tokens_total"] == 0


async def test_a_generator_continues_while_the_acknowledgements_keep_up(make_run):
    """A machine that stalls for as long as a chunk takes delays one answer; a generator that waits delays each."""
    run = await make_run(pace=[[1, 0.03]])
    await run.begin()
    caller = await make_caller(run, 128)
    async with httpx.AsyncClient(timeout=60) as client:
        saves = Saves(run, client, 0.0)
        changes: list[tuple[float, float]] = []
        while len(changes) < 5 and changes[-1:] != [(0, 1)]:
            changes.append(await held_back_and_calls(caller, f"t{len(changes)}", saves))
    assert changes[-1] == (0, 1), changes
    assert saves.saved == BUDGET * len(changes)


async def held_back_and_calls(caller: Caller, name: str, saves: Saves) -> tuple[float, float]:
    """Sample one trajectory; the calls that were held back and the calls that were made."""
    before = await saves.metrics()
    await sample(caller, name, saves.save)
    after = await saves.metrics()
    held_back, calls = (after[metric] - before[metric] for metric in (HELD_BACK, CALLS))
    return held_back, calls
