"""The arms of the GPU bench do the same work under their schedules; run on a CPU at tiny size."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_arm import Update
from rollmesh.errors import ConfigError

pytestmark = pytest.mark.long

PLAN = gpu.quick_plan()
SYNC, COPRIS = "sync", "copris_paper 32"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results file of a quick bench."""
    folder: Path = tmp_path_factory.mktemp("gpu")
    rows = gpu.run(quick=True, updates=2, output=folder)
    document: dict[str, Any] = json.loads((folder / gpu.RESULTS).read_text())
    assert document["measures"] == [row.figures() for row in rows]
    return document


@pytest.fixture(scope="module")
def arms(saved: dict[str, Any]) -> dict[str, list[Update]]:
    """Measured updates of every arm."""
    found = defaultdict(list)
    for fields in saved["updates"]:
        found[fields["arm"]].append(Update(**fields))
    return found


def test_arms_take_turns_and_train_equally_many_trajectories_of_the_forced_lengths(saved, arms):
    assert [u["arm"] for u in saved["updates"]] == [SYNC, COPRIS] * 2
    assert [u.train_step for u in (*arms[SYNC], *arms[COPRIS])] == [2, 3, 3, 4]
    for update in (u for updates in arms.values() for u in updates):
        assert len(update.lengths) == PLAN.workload.batch_size
        for trajectory_id, length in update.lengths.items():
            group, member = map(int, trajectory_id.split("."))
            assert length == PLAN.workload.group(group)[member].length


def test_sync_trains_the_stream_in_order_and_leaves_nothing(arms):
    groups = [sorted({int(i.split(".")[0]) for i in u.lengths}) for u in arms[SYNC]]
    assert groups == [[4, 5, 6, 7], [8, 9, 10, 11]]
    for update in arms[SYNC]:
        assert update.untrained_tokens == update.reprefilled_tokens == 0
        assert (update.trained_tokens, update.most_running) == (update.generated_tokens, 16)


def test_copris_fills_its_pool_and_continues_what_it_interrupted(arms):
    first, second = arms[COPRIS]
    assert max(first.most_running, second.most_running) == 32
    assert first.untrained_tokens > 0
    assert first.reprefilled_tokens + second.reprefilled_tokens > 0
    assert second.generated_tokens + first.untrained_tokens == second.trained_tokens + second.untrained_tokens


def test_without_a_gpu_it_refuses_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA.*--quick"):
        gpu.run()
