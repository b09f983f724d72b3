"""Engines that name a version and compute another: canary and audit find the first version of which that is true."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollmesh.config.generator import GeneratorConfig
from rollmesh.config.load import write_run_config
from rollmesh.config.model import AdapterConfig
from rollmesh.generator.canary import THRESHOLDS
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.policy_folders import AdapterSettings
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.mesh import Cursor
from rollmesh.report.audit import SECRET_VARIABLE, audit_run
from rollmesh.types import (
    Batch,
    FinishReason,
    Group,
    PolicyRecord,
)

from ...kit.adapters import ALPHA, RANK, change_tensors, merge, write_adapter
from ...kit.checkpoint_samples import write_batch
from ...kit.generation import collect, hf_logprobs, prompt_ids
from ...kit.made_batches import trajectory
from ...kit.records import segments_of
from .generator_run import CANARY, SECRET, GeneratorRun, make_call

ADAPTER = {"rank": RANK, "alpha": ALPHA}
SIZE = 0.005
"""Of an adapter's numbers: as after a first step, it changes the log-probabilities by less than the canary's threshold.
Only the change between two versions shows a fault."""

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
    model = merge(run.folder / f"merged-{version}", run.models[0], source)
    return run.write(version, source, model, base=base)


async def decided(run: GeneratorRun, version: int) -> tuple[bool, str]:
    """Wait until the generator serves a version or refuses it; whether it serves, and its reason not to."""
    states: list[tuple[int, bool, str]] = []

    async def known() -> bool:
        states[:] = [(g.policy_version, g.serving, g.reason) for g in await run.store.generators.live()]
        return any((serving and v == version) or f"version {version}:" in reason for v, serving, reason in states)

    await run.until(f"the generator to load version {version} or to refuse it", known)
    ((_, serving, reason),) = states
    return serving, reason


async def train_on(run: GeneratorRun, engine: TorchEngine, step: int) -> None:
    """Write a batch of eight groups that the engine samples, and the state after it, as a trainer does."""
    groups = []
    for number in range(8 * step - 8, 8 * step):
        call = make_call(f"e0-{number}.0", prompt_ids(number), max_new_token_count=40)
        segments = segments_of((await collect(engine, call)).chunks)
        sampled = trajectory(call.trajectory_id, segments, 1.0, prompt=call.context_ids, finish=FinishReason.LENGTH)
        groups.append(Group(group_id=f"e0-{number}", admission_index=number, trajectories=(sampled,)))
    write_batch(run.checkpoints, Batch(train_step=step, groups=tuple(groups)), Cursor(epoch=0, index=8 * step))
    tensors = {"weight": torch.zeros(2)}
    run.checkpoints.save_state(session=f"s{step}", train_step=step, rollback_count=0, tensors=tensors, extra={})


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
        await train_on(run, engine, version + 1)
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


LEARNING_RATE = 1e-6
"""Of an ordinary run: the first Adam step moves every weight by it."""


class BaseWeights(TorchEngine):
    """A torch engine to which newer weights are never delivered."""

    async def start(self, folder: Path, policy_version: int) -> None:
        self.base = folder
        await super().start(folder, policy_version)

    async def stage(self, folder: Path, policy_version: int) -> bool:
        return await super().stage(self.base, policy_version)

    async def load(self, folder: Path, policy_version: int, mode: OnNewVersion) -> float:
        return await super().load(self.base, policy_version, mode)


async def publish_update(run: GeneratorRun, version: int) -> PolicyRecord:
    """Write the policy that one optimizer step makes of the version before, to be announced."""
    source = run.folder / f"model-{version}"
    model = AutoModelForCausalLM.from_pretrained(run.models[version - 1], dtype=torch.float32)
    tokens = torch.from_numpy(np.stack([prompt_ids(500 + i, 40) for i in range(8)]).astype(np.int64))
    model(tokens, labels=tokens).loss.backward()
    torch.optim.Adam(model.parameters(), lr=LEARNING_RATE).step()
    model.save_pretrained(source)
    return run.write(version, source, source)


async def test_a_generator_whose_engine_keeps_the_base_weights_stops_serving_at_the_first_version(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.generator.engines.torch.torch_engine.TorchEngine", BaseWeights)
    run = await make_run()
    await run.publish(0)
    first = await publish_update(run, 1)
    run.start()
    await run.serving(0)
    await run.announce(first)
    serving, reason = await decided(run, 1)
    assert not serving and "policy version 1: its weights were not delivered to the engine" in reason
