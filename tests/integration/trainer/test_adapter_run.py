"""A run with an adapter: a full base, adapters above it, and the same versions wherever the trainer is killed."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from .test_kills import assert_every_batch_counts_once
from .trainer_run import Runs, TrainerRun

pytestmark = pytest.mark.slow

STEPS = 4
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"adapter": {"rank": 4, "alpha": 8}},
    "trainer": {"train_steps": STEPS, "learning_rate": 1e-2},
    "checkpoints": {"state_every_steps": 2},
}


async def adapters(run: TrainerRun) -> dict[int, bytes]:
    """Weights of every adapter, by version; the base is verified."""
    found = {}
    for record in await run.store.policies.announced():
        policy = run.checkpoints.open(record)
        if record.policy_version == 0:
            assert policy.manifest.kind == "full"
            continue
        assert policy.manifest.kind == "adapter"
        assert policy.base is not None and policy.base.manifest.policy_version == 0
        found[record.policy_version] = (policy.folder / "adapter_model.safetensors").read_bytes()
    return found


async def test_a_trainer_killed_between_state_and_publication_publishes_the_same_adapters(runs: Runs) -> None:
    async with runs("calm", **SECTIONS) as run:
        await run.train(STEPS)
        calm = await adapters(run)
        (state,) = run.checkpoints.root.glob(f"states/{STEPS:08d}-*")
        tensors = {name for file in state.glob("*.safetensors") for name in load_file(file)}
        assert all(".lora_" in name for name in tensors), "the state has no base"
    async with runs.held("before the manifest", 2, fed=STEPS, **SECTIONS) as run:
        seen = await run.seen()
        run.kill()
        run.start()
        await run.until_finished()
        await assert_every_batch_counts_once(run, seen)
        assert await adapters(run) == calm
        assert len(set(calm.values())) == STEPS


async def test_a_run_goes_back_to_an_adapter_and_to_the_base(runs: Runs) -> None:
    async with runs(**SECTIONS) as run:
        run.start()
        async with run.fed(2):
            await run.until_version(2)
            for version, to in ((3, 1), (4, 0)):
                await run.store.rollbacks.request(to)
                await run.until_version(version)
            await run.until_rolled_back()
            await run.feed(2)
            await run.until_finished()
        found = await adapters(run)
        assert sorted(found) == [1, 2, 3, 4, 5, 6]
        assert found[3] == found[1]
        records = await run.store.policies.announced()
        start = load_file(run.checkpoints.open(records[4]).folder / "adapter_model.safetensors")
        assert not any(value.any() for name, value in start.items() if ".lora_B." in name), "the base with no adapter"
        assert all(value.any() for name, value in start.items() if ".lora_A." in name)


OTHERS: list[tuple[dict[str, Any] | None, str]] = [
    ({"rank": 8, "alpha": 8}, "model.adapter=rank 8, "),
    ({"rank": 4, "alpha": 16}, "this run was trained with rank 4, alpha 8"),
    ({"rank": 4, "alpha": 8, "target": ["q_proj"]}, "target ['q_proj']: this run"),
    (None, "model.adapter=null (full weights): this run was trained with rank 4, alpha 8"),
]


async def test_a_trainer_refuses_to_continue_with_another_adapter(runs: Runs) -> None:
    async with runs(**SECTIONS) as run:
        run.start()
        async with run.fed(2):
            await run.until_version(2)
        run.kill()
        before = await adapters(run)
        for adapter, message in OTHERS:
            runs.file(model={"adapter": adapter}, trainer={"train_steps": STEPS})
            process = run.start()
            assert await asyncio.to_thread(process.wait) != 0
            assert message in run.log().splitlines()[-1]
            assert await adapters(run) == before


async def test_the_base_of_a_run_is_its_version_0_whatever_becomes_of_the_model_folder(
    runs: Runs, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(runs.model, tmp_path / "model"))
    async with replace(runs, model=model)(**SECTIONS) as run:
        run.start()
        async with run.fed(STEPS):
            await run.until_version(2)
            run.kill()
            weights = model / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-64] + bytes(64))
            run.start()
            await run.until_finished()
        assert sorted(await adapters(run)) == [1, 2, 3, 4]
        base = run.checkpoints.open((await run.store.policies.announced())[0]).folder
        for number, name in enumerate(("model.safetensors", "manifest.json"), 1):
            file = base / name
            file.write_bytes(file.read_bytes()[:-64] + bytes(64))
            process = run.start()
            assert await asyncio.to_thread(process.wait) != 0
            assert run.log().count("policy version 0, the base of all adapters of the run: ") >= number, name
