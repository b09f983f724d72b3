"""The GPU bench gives every arm the same work and charges each for what it leaves undone; run here at tiny size."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rollmesh.bench import gpu
from rollmesh.bench.gpu_arm import Update
from rollmesh.bench.gpu_queue import MemoryQueue
from rollmesh.config.services import GeneratorConfig
from rollmesh.errors import ConfigError
from rollmesh.scheduling import decide
from rollmesh.types import Chunk

PLAN = replace(gpu.quick_plan(), device="cpu", cuda_graphs=False, warmup=0, updates=3)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[gpu.GpuFindings, Path]:
    """All arms from their first update on."""
    folder = tmp_path_factory.mktemp("gpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return asyncio.run(gpu.measure(PLAN, folder)), folder
    finally:
        torch.set_num_threads(threads)


def by_arm(findings: gpu.GpuFindings) -> dict[str, list[Update]]:
    arms: dict[str, list[Update]] = {}
    for update in findings.updates:
        arms.setdefault(update.arm, []).append(update)
    return arms


def test_arms_take_turns_and_make_equally_many_updates_of_equally_many_trajectories(measured):
    findings, _ = measured
    names = ["sync", "copris_paper 16", "copris_paper 32"]
    assert [(u.arm, u.train_step) for u in findings.updates] == [(name, s) for s in (1, 2, 3) for name in names]
    for update in findings.updates:
        assert len(update.lengths) == PLAN.groups_per_batch * PLAN.group_size
        assert update.trained_tokens == sum(update.lengths.values())


def test_a_trajectory_has_the_same_forced_length_in_every_arm(measured):
    findings, _ = measured
    trained = {
        name: {i: n for u in updates for i, n in u.lengths.items()} for name, updates in by_arm(findings).items()
    }
    for lengths in trained.values():
        for trajectory_id, length in lengths.items():
            group, member = map(int, trajectory_id.split("."))
            assert length == PLAN.workload.length(group, member)
    assert len(trained["sync"].keys() & trained["copris_paper 32"].keys()) > 20


def test_sync_trains_the_stream_in_order_and_leaves_nothing(measured):
    findings, _ = measured
    updates = by_arm(findings)["sync"]
    groups = [sorted({int(i.split(".")[0]) for i in u.lengths}) for u in updates]
    assert groups == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all(u.untrained_tokens == u.reprefilled_tokens == 0 for u in updates)
    assert all(u.trained_tokens == u.generated_tokens for u in updates)


def test_no_arm_exceeds_its_pool_and_copris_fills_it(measured):
    findings, _ = measured
    for name, pool in (("sync", 16), ("copris_paper 16", 16), ("copris_paper 32", 32)):
        # An update that finds its groups ready leases nothing.
        most = [u.most_running for u in by_arm(findings)[name]]
        assert max(most) == pool and most[0] == pool


def test_every_sampled_token_is_trained_on_or_counted_as_unfinished(measured):
    findings, _ = measured
    for updates in by_arm(findings).values():
        before = 0
        for update in updates:
            assert update.generated_tokens + before == update.trained_tokens + update.untrained_tokens
            before = update.untrained_tokens
    assert by_arm(findings)["copris_paper 32"][-1].untrained_tokens > 0


def test_unfinished_and_inherited_tokens_earn_nothing(measured):
    update = by_arm(measured[0])["copris_paper 32"][0]
    ahead = replace(update, trained_tokens=100, generated_tokens=150)
    behind = replace(update, trained_tokens=180, generated_tokens=120)
    assert gpu.charged_tokens([ahead]) == 100
    assert gpu.charged_tokens([behind]) == 120
    assert gpu.charged_tokens([ahead, behind]) == 270


def test_parked_trajectories_are_resumed_and_prefilled_again(measured):
    updates = by_arm(measured[0])["copris_paper 32"]
    assert updates[0].unfinished_trajectories > 0
    assert updates[1].reprefilled_tokens > 0


def test_the_saved_curve_is_a_pace_that_a_generator_accepts(measured):
    findings, folder = measured
    curve = json.loads((folder / gpu.CURVE).read_text())
    assert [running for running, _ in curve] == [1, 2, 4, 8, 16, 32]
    assert all(seconds > 0 for _, seconds in curve)
    assert GeneratorConfig(pace=curve).pace == findings.curve


def test_saved_results_name_the_device_and_the_dtype(measured):
    findings, folder = measured
    saved = json.loads((folder / gpu.RESULTS).read_text())
    assert (saved["device"], saved["plan"]["dtype"]) == ("CPU", "float32")
    assert len(saved["findings"]["updates"]) == len(findings.updates)
    table = gpu.measures(PLAN, findings)
    assert table[0].name == "tiny shape on CPU, float32"
    rates = {m.name: m for m in table if "charged" in m.name}
    assert rates["copris_paper 16: trained tokens, charged for what is unfinished"].baseline == "sync"


def test_without_a_gpu_it_refuses_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA.*--quick"):
        gpu.run()


def test_only_the_curve_can_be_measured(tmp_path):
    found = gpu.run(quick=True, curve_only=True, pools=[16], output=tmp_path)
    assert [m.name.split(",")[0] for m in found[1:]] == ["decode step"] * 5
    assert json.loads((tmp_path / gpu.RESULTS).read_text())["findings"]["updates"] == []


def test_lengths_are_those_the_experiment_promises():
    workload = gpu.full_plan().workload
    lengths = np.array([workload.length(g, m) for g in range(500) for m in range(8)])
    assert abs(np.median(lengths) - 500) < 25
    assert lengths.max() == 4096 and lengths.min() >= 4
    plan = gpu.full_plan()
    assert (plan.groups_per_batch * plan.group_size, plan.pools, plan.updates) == (256, (256, 512, 768), 6)


def test_the_queue_leases_partials_of_the_oldest_groups_first():
    _, _, schedule = gpu.schedules(PLAN)
    queue = MemoryQueue(schedule, PLAN.workload)
    queue.admit(decide(schedule, queue.view()).admit_groups)
    first = queue.lease(6)
    assert [m.trajectory_id for m in first] == ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1"]
    one = Chunk(
        token_ids=np.ones(1, np.int32), behavior_logprobs=np.zeros(1, np.float32), policy_version=0, kv_min_version=0
    )
    for member in reversed(first):
        if member.trajectory_id != "0.1":
            member.add([one])
        queue.release(member)
    assert [m.trajectory_id for m in queue.lease(6)] == ["0.0", "0.2", "0.3", "1.0", "1.1", "0.1"]
    assert queue.lease(6) == []
