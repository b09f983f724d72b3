"""A run with an adapter: a full base, adapters above it, and the same versions wherever the trainer is killed."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rollmesh.store import EmbeddedServer

from .test_kills import assert_every_batch_counts_once
from .trainer_run import TrainerRun, opened_run, write_run_file

pytestmark = pytest.mark.slow

STEPS = 4
ADAPTER = {"rank": 4, "alpha": 8}


@asynccontextmanager
async def adapter_run(
    folder: Path, model: Path, server: EmbeddedServer, adapter: dict[str, Any] | None = None, **trainer: Any
) -> AsyncIterator[TrainerRun]:
    config = write_run_file(
        folder,
        model,
        server,
        model={"adapter": adapter or ADAPTER},
        trainer={"train_steps": STEPS, "learning_rate": 1e-2, **trainer},
        checkpoints={"state_every_steps": 2},
    )
    async with opened_run(config) as run:
        yield run


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


@pytest.fixture(scope="module")
def calm() -> dict[int, bytes]:
    """Adapters of an uninterrupted run, computed by the first test that needs them."""
    return {}


@pytest.mark.parametrize("at", ["before the canary", "before the manifest", "before the announcement"])
async def test_a_trainer_killed_between_state_and_publication_publishes_the_same_adapters(
    tmp_path: Path,
    tiny_model: Path,
    server: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    calm: dict[int, bytes],
    at: str,
) -> None:
    if not calm:
        async with adapter_run(tmp_path / "calm", tiny_model, server) as run:
            run.start()
            async with run.fed(STEPS):
                await run.until_finished()
            calm |= await adapters(run)
            (state,) = run.checkpoints.root.glob(f"states/{STEPS:08d}-*")
            tensors = {name for file in state.glob("*.safetensors") for name in load_file(file)}
            assert all(".lora_" in name for name in tensors), "the state has no base"
    monkeypatch.setenv("HELD_AT", at)
    monkeypatch.setenv("HELD_STEP", "2")
    async with adapter_run(tmp_path / "killed", tiny_model, server) as run:
        os.mkfifo(run.folder / "release")
        run.start(script="held_process")
        async with run.fed(STEPS):
            await run.until(at, (run.folder / "held").exists, pause=0.01)
            seen = {record.policy_version: record for record in await run.store.policies.announced()}
            run.kill()
            run.start()
            await run.until_finished()
        await assert_every_batch_counts_once(run, seen)
        assert await adapters(run) == calm
        assert len(set(calm.values())) == STEPS


async def test_a_run_goes_back_to_an_adapter_and_to_the_base(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer
) -> None:
    async with adapter_run(tmp_path / "run", tiny_model, server) as run:
        run.start()
        async with run.fed(2):
            await run.until("version 2", lambda: announced(run, 2), pause=0.01)
            for version, to in ((3, 1), (4, 0)):
                await run.store.rollbacks.request(to)
                await run.until(f"version {version}", lambda v=version: announced(run, v), pause=0.01)
            await run.until("the end of the rollback", lambda: rolled_back(run), pause=0.01)
            await run.feed(2)
            await run.until_finished()
        found = await adapters(run)
        assert sorted(found) == [1, 2, 3, 4, 5, 6]
        assert found[3] == found[1]
        records = await run.store.policies.announced()
        start = load_file(run.checkpoints.open(records[4]).folder / "adapter_model.safetensors")
        assert not any(value.any() for name, value in start.items() if ".lora_B." in name), "the base with no adapter"
        assert all(value.any() for name, value in start.items() if ".lora_A." in name)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"rank": 8, "alpha": 8}, "model.adapter=rank 8, "),
        ({"rank": 4, "alpha": 16}, "this run was trained with rank 4, alpha 8"),
        ({"rank": 4, "alpha": 8, "target": ["q_proj"]}, "target ['q_proj']: this run"),
        (None, "model.adapter=null (full weights): this run was trained with rank 4, alpha 8"),
    ],
)
async def test_a_trainer_refuses_to_continue_with_another_adapter(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, adapter: dict[str, Any] | None, message: str
) -> None:
    async with adapter_run(tmp_path / "run", tiny_model, server) as run:
        run.start()
        async with run.fed(2):
            await run.until("version 2", lambda: announced(run, 2), pause=0.01)
        run.kill()
        before = await adapters(run)
        write_run_file(tmp_path / "run", tiny_model, server, model={"adapter": adapter}, trainer={"train_steps": STEPS})
        process = run.start()
        assert await asyncio.to_thread(process.wait) != 0
        assert message in run.log()
        assert await adapters(run) == before


async def test_the_base_of_a_run_is_its_version_0_whatever_becomes_of_the_model_folder(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    async with adapter_run(tmp_path / "run", model, server) as run:
        run.start()
        async with run.fed(STEPS):
            await run.until("version 2", lambda: announced(run, 2), pause=0.01)
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


async def announced(run: TrainerRun, version: int) -> bool:
    latest = await run.store.policies.latest()
    return latest is not None and latest.policy_version >= version


async def rolled_back(run: TrainerRun) -> bool:
    return await run.store.rollbacks.pending() is None
