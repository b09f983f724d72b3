"""A policy is verified while the engine reads it, and only a verified one is handed on to be swapped in."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.policies import FetchedPolicy, VerifiedPolicy
from rollmesh.errors import CheckpointError, EngineError, Reason
from rollmesh.generator.canary import Canary
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.generator.policy_loader import PolicyLoader
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.metrics import Metrics

from ...kit.checkpoint_samples import SECRET, publish


class Engine:
    """Notes the folders that it stages."""

    def __init__(self, error: EngineError | None = None) -> None:
        self.staged: list[Path] = []
        self._error = error

    async def stage(self, folder: Path, policy_version: int) -> bool:
        self.staged.append(folder)
        if self._error is not None:
            raise self._error
        return True


def staging(engine: Any, store: CheckpointStore) -> PolicyLoader:
    return PolicyLoader(
        engine,
        store,
        ServingState(),
        GeneratorMetrics(Metrics("generator")),
        mode=OnNewVersion.INTERRUPT,
        canary=Canary(threshold=0.1, min_change=1e-6),
        max_context_tokens=64,
    )


async def test_the_files_are_verified_while_the_engine_reads_them(tmp_path: Path) -> None:
    began = threading.Event()

    class Store(CheckpointStore):
        def verify(self, policy: FetchedPolicy) -> VerifiedPolicy:
            assert began.wait(60), "the engine does not read before the files are verified"
            return super().verify(policy)

    class ReadingEngine(Engine):
        async def stage(self, folder: Path, policy_version: int) -> bool:
            began.set()
            return await super().stage(folder, policy_version)

    store, engine = Store(tmp_path, SECRET), ReadingEngine()
    record = publish(store, 0)
    policy, scorable = await staging(engine, store).staged(record, None)
    assert scorable
    assert (policy.folder, policy.manifest.policy_version) == (store.root / record.path, 0)
    assert engine.staged == [policy.folder]


async def test_a_damaged_policy_is_refused_with_its_reason_whatever_the_engine_says(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, SECRET)
    record = publish(store, 0)
    with (store.root / record.path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    for engine in (Engine(), Engine(EngineError("not readable"))):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: sha256") as raised:
            await staging(engine, store).staged(record, None)
        assert raised.value.reason == Reason.TAMPERED


async def test_an_engine_that_cannot_serve_a_verified_policy_refuses_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, SECRET)
    record = publish(store, 0)
    with pytest.raises(EngineError, match="another architecture"):
        await staging(Engine(EngineError("another architecture")), store).staged(record, None)


async def test_a_folder_that_was_replaced_meanwhile_is_read_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, SECRET)
    record = publish(store, 0)
    replaced = threading.Event()

    class ReplacingEngine(Engine):
        async def stage(self, folder: Path, policy_version: int) -> bool:
            if not self.staged:
                shutil.copytree(folder, folder.with_name(".copy"))
                shutil.move(folder, folder.with_name(".old"))
                shutil.move(folder.with_name(".copy"), folder)
                replaced.set()
            return await super().stage(folder, policy_version)

    class Store(CheckpointStore):
        def verify(self, policy: FetchedPolicy) -> VerifiedPolicy:
            assert replaced.wait(60)
            return super().verify(policy)

    engine = ReplacingEngine()
    await staging(engine, Store(tmp_path, SECRET)).staged(record, None)
    assert engine.staged == [store.root / record.path] * 2
