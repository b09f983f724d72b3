"""The GPU bench forces the promised lengths, and charges an arm for unfinished work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_arm import Update
from rollmesh.errors import ConfigError
from rollmesh.sim.decode_curve import CurvePoint

pytestmark = pytest.mark.long

UPDATE = Update(
    arm="sync",
    train_step=1,
    seconds={"load": 0.5, "generate": 2.0, "train": 1.0, "export": 0.5},
    generated_tokens=150,
    reprefilled_tokens=0,
    untrained_tokens=50,
    most_running=4,
    lengths={"0.0": 40, "0.1": 60},
)


def charged(*updates: Update) -> float:
    rows = gpu.measures(gpu.quick_plan(), {}, updates)
    return next(row.value for row in rows if "charged" in row.name)


def test_unfinished_and_inherited_tokens_earn_nothing():
    behind = replace(UPDATE, lengths={"0.0": 180}, generated_tokens=120)
    assert charged(UPDATE) == 100 / 4
    assert charged(behind) == 120 / 4
    assert charged(UPDATE, behind) == 270 / 8


def test_every_arm_is_compared_with_sync_and_every_row_names_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    other = replace(UPDATE, arm="copris_paper 32", seconds={**UPDATE.seconds, "generate": 0.0})
    curves = {"without graphs": (CurvePoint(running=8, context=720, seconds=0.25),)}
    rows = {row.name: row for row in gpu.measures(gpu.quick_plan(), curves, [UPDATE, other])}
    rate = rows["copris_paper 32: trained tokens (charged), CPU"]
    assert (rate.baseline, rate.baseline_value, rate.ratio) == ("sync", 25, 2)
    assert rows["sync: of it generation, CPU"].value == 2
    assert rows["decode step, 8 running of 720 tokens, without graphs, CPU"].value == 250


def test_without_a_gpu_it_refuses_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA.*--quick"):
        gpu.run()


def test_lengths_are_those_the_experiment_promises():
    plan = gpu.full_plan()
    members = [m for g in range(500) for m in plan.workload.group(g)]
    lengths = np.array([m.length for m in members])
    assert abs(np.median(lengths) - 500) < 25
    assert lengths.max() == 4096 and lengths.min() >= 4
    assert len(members) == 500 * 8 and {len(m.prompt.token_ids) for m in members} == {128}
    assert (plan.workload.groups_per_batch, plan.pools, plan.dtype) == (32, (512,), "bfloat16")
