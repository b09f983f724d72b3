import asyncio

import numpy as np
import pytest

from rollmesh.types import ANY_VERSION, GeneratorRecord, Prompt, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.generator_pool import GeneratorSlot


def slot() -> GeneratorSlot:
    prompt = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), verifier="exact")
    record = GeneratorRecord(
        instance_id="a",
        address="a:1",
        policy_version=0,
        running_count=0,
        waiting_count=0,
        slot_count=1,
        kv_token_capacity=100,
        serving=True,
    )
    active = ActiveTrajectory(Trajectory(trajectory_id="e0-0.0", group_id="e0-0", member_index=0, prompt=prompt))
    return GeneratorSlot(record=record, active=active, need=ANY_VERSION, _generators=None)  # type: ignore[arg-type]


async def wait_for_a_chunk(cut_off: GeneratorSlot) -> None:
    async with asyncio.timeout(3600) as deadline:
        cut_off.set_deadline(deadline)
        await asyncio.Event().wait()


async def test_a_call_that_waits_for_a_chunk_can_be_cut_off():
    cut_off = slot()
    waiting = asyncio.create_task(wait_for_a_chunk(cut_off))
    await asyncio.sleep(0)
    cut_off.abort()
    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            await waiting


async def test_a_call_cut_off_while_it_saves_a_chunk_waits_for_no_further_one():
    cut_off = slot()
    cut_off.abort()
    async with asyncio.timeout(60):
        with pytest.raises(TimeoutError):
            await wait_for_a_chunk(cut_off)
