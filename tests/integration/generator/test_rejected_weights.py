"""Policies that a generator refuses: wrong weights, broken folders and those that fail their canary."""

import asyncio
import threading

import pytest

from rollmesh.errors import GenerationRefused
from rollmesh.generator.engines.torch.adapters import BASE
from rollmesh.generator.engines.torch.decoder_model import DecoderModel
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.generator.engines.torch.weights import StagedWeights
from rollmesh.types import FinishReason

from .generator_run import SLOWEST, make_call


@pytest.mark.parametrize("mode", ["keep_kv", "interrupt", "drain"])
async def test_wrong_weights_are_refused_while_calls_decode_without_a_pause(make_run, mode, monkeypatch):
    scoring, decoded = asyncio.Event(), threading.Event()
    loop, score, pause = asyncio.get_running_loop(), DecoderModel.score, TorchEngine.pause
    pauses: list[str] = []

    def held_score(self, tokens, place=BASE):
        if threading.current_thread().name != "torch-engine":  # not the first policy, which is scored in service
            loop.call_soon_threadsafe(scoring.set)
            assert decoded.wait(120), "no call decodes while the staged weights are scored"
        return score(self, tokens, place)

    async def noted_pause(self):
        pauses.append(mode)
        await pause(self)

    monkeypatch.setattr(DecoderModel, "score", held_score)
    monkeypatch.setattr(TorchEngine, "pause", noted_pause)
    run = await make_run(pace=SLOWEST, on_new_version=mode)  # 12 seconds, in which the staged weights are scored
    record = await run.begin()
    wrong = await run.prepare(1, canary_error=0.5)
    stream = await run.under_way(record, make_call(max_new_token_count=200))
    await run.announce(wrong)
    async with asyncio.timeout(120):
        await scoring.wait()
    count = len(stream.chunks)

    async def further() -> bool:
        return len(stream.chunks) >= count + 2

    await run.until("tokens while the staged weights are scored", further)
    decoded.set()
    await run.out_of_rotation()
    assert not pauses
    assert await stream.end() is FinishReason.LENGTH
    assert stream.versions == {0} and not (await run.client.status(record)).paused
    with pytest.raises(GenerationRefused, match="canary"):
        await run.stream(record, make_call("late")).end()
    await run.publish(2)
    await run.serving(2)
    assert (await run.client.status(record)).out_of_rotation_reason == ""
    assert not pauses, "the swap is between two decode steps"


@pytest.mark.parametrize("mode", ["keep_kv", "interrupt"])
async def test_weights_that_fail_their_canary_sample_nothing_when_the_old_ones_are_gone(make_run, mode, monkeypatch):
    # As an engine on a GPU: the staged weights are scored once they are swapped in.
    monkeypatch.setattr(StagedWeights, "scorable_on", lambda weights, device: False)
    run = await make_run(pace=SLOWEST, on_new_version=mode)
    old = await run.publish(0)
    wrong = await run.prepare(1, canary_error=0.5)
    run.start()
    (record,) = await run.serving(0)
    stream = await run.under_way(record, make_call(max_new_token_count=200))
    (old / "model.safetensors").unlink()
    await run.announce(wrong)
    assert await stream.end() is FinishReason.INTERRUPTED
    assert stream.versions == {0}
    await run.until_status(
        record, "a generator at rest", lambda status: status.paused and "canary" in status.out_of_rotation_reason
    )
    with pytest.raises(GenerationRefused, match="canary"):
        await run.stream(record, make_call("late")).end()
    await run.publish(2)
    await run.serving(2)
    assert not (await run.client.status(record)).paused
    later = run.stream(record, make_call("later", max_new_token_count=10))
    assert await later.end() is FinishReason.LENGTH
    assert later.versions == {2}


async def test_a_generator_registers_the_versions_that_it_refuses_in_a_row_until_one_passes(make_run):
    run = await make_run()
    await run.begin()

    async def registered(*refused: int | None) -> None:
        await run.until_live(
            f"refused {refused}", lambda live: (live[0].refused_version, live[0].refused_count) == refused
        )

    for version in (1, 2):
        await run.publish(version, hidden_size=64)
        await registered(version, version)
    (record,) = await run.store.generators.live()
    assert record.refused_reason.startswith("foreign_architecture: ")
    await run.publish(3)
    await run.serving(3)
    await registered(None, 0)
