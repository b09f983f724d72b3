"""Engines that name an adapter and compute another: canary and audit find the first version of which that is true."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.checkpoints.policies import BasePolicy
from rollmesh.config.generator import GeneratorConfig
from rollmesh.config.load import write_run_config
from rollmesh.config.model import AdapterConfig
from rollmesh.generator.canary import THRESHOLDS
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.policy_folders import AdapterSettings
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.mesh import Cursor
from rollmesh.report.audit import SECRET_VARIABLE, audit_run
from rollmesh.types import Batch, PolicyRecord

from ...kit.adapters import ALPHA, RANK, change_tensors, merge, write_adapter
from ...kit.checkpoint_samples import write_batch
from ...kit.generation import hf_logprobs, prompt_ids
from .generator_run import SECRET, GeneratorRun
from .sampled_groups import group_of, sampled

ADAPTER = {"rank": RANK, "alpha": ALPHA}
SIZE = 0.005
"""Of an adapter's numbers: as after a first step, it changes the log-probabilities by less than the canary's threshold.
Only the change between two versions shows a fault."""
CANARY = [prompt_ids(90 + i, 20) for i in range(2)]

Tensors = dict[str, Tensor]
Fault = Callable[[Tensors, Tensors], Tensors]
"""What an engine computes with instead of its adapter, from that and the one of the version before."""


def the_base(adapter: Tensors, previous: Tensors) -> Tensors:
    return {name: 0 * tensor for name, tensor in adapter.items()}


def the_version_before(adapter: Tensors, previous: Tensors) -> Tensors:
    return previous


def half_of_the_modules(adapter: Tensors, previous: Tensors) -> Tensors:
    return {name: tensor * (".layers.0." in name) for name, tensor in adapter.items()}


def a_scale_without_alpha(adapter: Tensors, previous: Tensors) -> Tensors:
    return {name: tensor / (ALPHA if ".lora_B." in name else 1) for name, tensor in adapter.items()}


def a_scale_without_the_rank(adapter: Tensors, previous: Tensors) -> Tensors:
    return {name: tensor * (RANK if ".lora_B." in name else 1) for name, tensor in adapter.items()}


def engine_with(fault: Fault, first: int) -> type[TorchEngine]:
    """A torch engine that has the fault from version ``first`` on."""

    class FaultyEngine(TorchEngine):
        async def stage(self, folder: Path, policy_version: int) -> bool:
            given, self.before = getattr(self, "before", None), folder
            if policy_version >= first:
                copy = folder.with_name(f"{folder.name}-faulty")
                shutil.copytree(folder, copy)
                adapter = load_file(folder / "adapter_model.safetensors")
                previous = load_file(given / "adapter_model.safetensors") if given else the_base(adapter, {})
                change_tensors(copy, dict(fault(adapter, previous)))
                folder = copy
            return await super().stage(folder, policy_version)

    return FaultyEngine


async def publish_adapter(run: GeneratorRun, base: PolicyRecord, version: int) -> PolicyRecord:
    """Write a random adapter with a true canary, to be announced."""
    source = write_adapter(run.folder / f"adapter-{version}", run.models[0], version, size=SIZE)
    run.models[version] = merge(run.folder / f"merged-{version}", run.models[0], source)
    return run.checkpoints.publish(
        session=run.session,
        policy_version=version,
        train_step=version,
        parent=version - 1,
        write=lambda folder: [shutil.copy(f, folder) for f in source.iterdir()] and None,
        canary=[
            CanarySequence(token_ids=ids.tolist(), logprobs=hf_logprobs(run.models[version], ids).tolist())
            for ids in CANARY
        ],
        base=BasePolicy(record=base, manifest=run.checkpoints.open(base).manifest),
    )


async def decided(run: GeneratorRun, version: int) -> tuple[bool, str]:
    """Wait until the generator serves a version or refuses it; whether it serves, and its reason not to."""
    states: list[tuple[int, bool, str]] = []

    async def known() -> bool:
        states[:] = [(g.policy_version, g.serving, g.reason) for g in await run.store.generators.live()]
        return any((serving and v == version) or f"version {version}:" in reason for v, serving, reason in states)

    await run.until(f"the generator to load version {version} or to refuse it", known)
    ((_, serving, reason),) = states
    return serving, reason


@pytest.mark.parametrize(
    ("fault", "first", "reason"),
    [
        (the_base, 1, "its weights were not delivered to the engine: from version 0 on"),
        (the_version_before, 2, "its weights were not delivered to the engine: from version 1 on"),
        (half_of_the_modules, 1, "the engine computes another adapter: from version 0 on"),
        (a_scale_without_alpha, 1, "the engine computes another adapter: from version 0 on"),
        (a_scale_without_the_rank, 1, "the canary's logprobs differ by"),
    ],
)
async def test_the_first_version_with_a_fault_is_refused(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, fault: Fault, first: int, reason: str
) -> None:
    monkeypatch.setattr("rollmesh.generator.engines.torch.torch_engine.TorchEngine", engine_with(fault, first))
    run = await make_run(adapter=ADAPTER)
    base = await run.prepare(0)
    records = [await publish_adapter(run, base, version) for version in (1, 2)]
    gaps = [np.abs(hf_logprobs(run.models[0], ids) - hf_logprobs(run.models[1], ids)).max() for ids in CANARY]
    assert max(gaps) < THRESHOLDS["float32"], "the first rule alone sees nothing"
    await run.announce(base)
    run.start()
    await run.serving(0)
    for version in range(1, first):
        await run.announce(records[version - 1])
        assert await decided(run, version) == (True, "")
    await run.announce(records[first - 1])
    serving, found = await decided(run, first)
    assert not serving and f"policy version {first}: {reason}" in found


@pytest.mark.parametrize(
    ("fault", "first"),
    [
        (None, 3),
        (the_base, 1),
        (the_version_before, 2),
        (half_of_the_modules, 1),
        (a_scale_without_alpha, 1),
        (a_scale_without_the_rank, 1),
    ],
)
async def test_the_audit_is_red_at_the_first_version_with_a_fault(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, fault: Fault | None, first: int
) -> None:
    run = await make_run(adapter=ADAPTER)
    write_run_config(run.config, run.folder / "config.yaml")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    base = await run.prepare(0)
    records = [base, *[await publish_adapter(run, base, version) for version in (1, 2)]]
    folders = [run.checkpoints.root / record.path for record in records]
    kind = TorchEngine if fault is None else engine_with(fault, first)
    settings = AdapterSettings(config=AdapterConfig(**ADAPTER))
    engine = kind(GeneratorConfig(slots=8, max_context_tokens=128, device="cpu"), adapter=settings)
    await engine.start(folders[0], 0)
    for version, folder in enumerate(folders):
        if version:
            await engine.stage(folder, version)
            await engine.load(folder, version, OnNewVersion.NEXT_SLICE)
        numbers = range(8 * version, 8 * version + 8)
        groups = tuple([group_of(number, await sampled(engine, number)) for number in numbers])
        step = version + 1
        write_batch(run.checkpoints, Batch(train_step=step, groups=groups), Cursor(epoch=0, index=8 * step))
        tensors = {"weight": torch.zeros(2)}
        run.checkpoints.save_state(session=f"s{step}", train_step=step, rollback_count=0, tensors=tensors, extra={})
    await engine.aclose()
    result = audit_run(run.folder)
    if fault is None:
        assert result.green, result.problems
    else:
        assert not result.green
        assert result.problems[0].partition(":")[0] == f"policy version {first}"


async def test_a_late_generator_compares_the_newest_adapter_with_the_base(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await make_run(adapter=ADAPTER)
    base = await run.prepare(0)
    for record in (base, *[await publish_adapter(run, base, version) for version in (1, 2)]):
        await run.announce(record)
    sound = run.start()
    assert await decided(run, 2) == (True, "")
    await sound.stop()
    monkeypatch.setattr("rollmesh.generator.engines.torch.torch_engine.TorchEngine", engine_with(the_base, 1))
    run.start(1)
    serving, found = await decided(run, 2)
    assert not serving and "policy version 2: its weights were not delivered" in found and "from version 0 on" in found


async def test_an_engine_without_a_fault_serves_every_adapter(make_run: Any) -> None:
    run = await make_run(adapter=ADAPTER)
    base = await run.prepare(0)
    await run.announce(base)
    run.start()
    await run.serving(0)
    for version in (1, 2, 3):
        await run.announce(await publish_adapter(run, base, version))
        assert await decided(run, version) == (True, "")
