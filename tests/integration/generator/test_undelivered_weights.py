"""An engine whose weights stay the base's while it names newer versions: the canary and the audit see the first one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.config.generator import GeneratorConfig
from rollmesh.config.load import write_run_config
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.mesh import Cursor
from rollmesh.report.audit import SECRET_VARIABLE, audit_run
from rollmesh.types import Batch, PolicyRecord

from ...kit.checkpoint_samples import write_batch
from ...kit.generation import hf_logprobs, prompt_ids
from .generator_run import SECRET, GeneratorRun
from .sampled_groups import group_of, sampled

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
    run.models[version] = source
    sequences = [prompt_ids(90 + i, 20) for i in range(2)]
    return run.checkpoints.publish(
        session=run.session,
        policy_version=version,
        train_step=version,
        parent=version - 1,
        write=lambda folder: [shutil.copy(f, folder) for f in source.iterdir()] and None,
        canary=[CanarySequence(token_ids=s.tolist(), logprobs=hf_logprobs(source, s).tolist()) for s in sequences],
    )


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
    states: list[tuple[int, bool, str]] = []

    async def decided() -> bool:
        states[:] = [(g.policy_version, g.serving, g.reason) for g in await run.store.generators.live()]
        return any((serving and version == 1) or "canary" in reason for version, serving, reason in states)

    await run.until("the generator to load version 1 or to refuse it", decided)
    ((_, serving, reason),) = states
    assert not serving
    assert "policy version 1: its weights were not delivered to the engine" in reason


async def test_a_generator_whose_engine_takes_ordinary_updates_serves_them(make_run: Any) -> None:
    run = await make_run()
    await run.begin()
    for version in (1, 2, 3):
        await run.announce(await publish_update(run, version))
        await run.serving(version)


@pytest.mark.parametrize("kind", [BaseWeights, TorchEngine])
async def test_the_audit_is_red_at_the_first_version_whose_weights_the_engine_never_had(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, kind: type[TorchEngine]
) -> None:
    run = await make_run()
    write_run_config(run.config, run.folder / "config.yaml")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    await run.publish(0)
    await publish_update(run, 1)
    first, second = (run.checkpoints.root / r.path for r in run.checkpoints.complete_policies())
    engine = kind(GeneratorConfig(slots=8, max_context_tokens=128, device="cpu"))
    await engine.start(first, 0)
    for step, numbers in ((1, range(8)), (2, range(8, 16))):
        groups = tuple([group_of(number, await sampled(engine, number)) for number in numbers])
        write_batch(run.checkpoints, Batch(train_step=step, groups=groups), Cursor(epoch=0, index=8 * step))
        tensors = {"weight": torch.zeros(2)}
        run.checkpoints.save_state(session=f"s{step}", train_step=step, rollback_count=0, tensors=tensors, extra={})
        await engine.load(second, 1, OnNewVersion.INTERRUPT)
    await engine.aclose()
    result = audit_run(run.folder)
    assert result.policy_versions == (0, 1)
    if kind is TorchEngine:
        assert result.green, result.problems
    else:
        assert not result.green
        assert [problem.partition(":")[0] for problem in result.problems] == ["policy version 1"]
    assert np.isfinite([version.mean_gap for version in result.rescoring.versions]).all()
