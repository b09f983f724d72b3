"""A run whose tokens are drawn from kept sets is trained and audited over these sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rollmesh.kept_sets import slice_sets
from rollmesh.report.audit import open_checkpoints
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.types import Batch, Segment, SegmentSource

from ..chaos.judge import judge
from ..kit.environments import python_of
from ..kit.made_batches import sets_of
from .conftest import CommandLine, assert_rescored

pytestmark = pytest.mark.long


def policy_segments(batch: Batch) -> Iterator[tuple[Segment, list[list[int]]]]:
    """The segments that a policy wrote, each with the sets of its tokens."""
    for group in batch.groups:
        for trajectory in group.trajectories:
            for segment in trajectory.segments:
                if segment.source is SegmentSource.POLICY:
                    assert segment.kept_sets is not None
                    count = len(segment)
                    yield segment, [slice_sets(segment.kept_sets, at, at + 1).ids.tolist() for at in range(count)]


def with_one_set_altered(batch: Batch) -> tuple[Batch, int]:
    """The batch with one token alone in a set that had others, and the policy version that drew it."""
    altered = next(s for s, sets in policy_segments(batch) if any(len(kept) > 1 for kept in sets))
    sets = next(sets for s, sets in policy_segments(batch) if s is altered)
    at = next(at for at, kept in enumerate(sets) if len(kept) > 1)
    sets[at] = [int(altered.token_ids[at])]
    changed = replace(altered, kept_sets=sets_of(sets))
    groups = [
        replace(
            group,
            trajectories=tuple(
                replace(t, segments=tuple(changed if s is altered else s for s in t.segments))
                for t in group.trajectories
            ),
        )
        for group in batch.groups
    ]
    return replace(batch, groups=tuple(groups)), altered.policy_version


@pytest.fixture(params=["torch", "sglang"])
def sections(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A run on each engine; skips where the real server is not installed."""
    rollout = {"top_p": 0.9, "min_p": 0.02}
    if request.param == "torch":
        return {"rollout": rollout}
    server = {
        "python": str(python_of("sglang-cpu")),
        "environment": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
    }
    return {
        "rollout": rollout,
        "generator": {"engine": "sglang", "device": "cpu", "replicas": 1, "slots": 32, "sglang": server},
    }


def test_a_run_with_truncated_sampling_is_trained_over_its_kept_sets_and_an_altered_set_is_found(
    small_run: Callable[..., CommandLine], sections: dict[str, Any]
) -> None:
    line = small_run(**sections, evaluation={"before_and_after": False})
    done = line.run("up", str(line.run_file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_rescored(line.audit())
    # Another program scores tokens and trains a step again: without the sets they are 0.1 nats and 0.1 updates off.
    judgement = judge(line.folder)
    assert judgement.problems == () and judgement.replay_distance is not None
    store = open_checkpoints(RecordedRun(line.folder))
    sizes = []
    for step in line.steps:
        for segment, sets in policy_segments(store.read_batch(step)):
            assert all(token in kept for token, kept in zip(segment.token_ids.tolist(), sets, strict=True))
            sizes += map(len, sets)
    assert min(sizes) == 1 < max(sizes)
    stored = store.stored_batch(3)
    batch, version = with_one_set_altered(stored.batch)
    (line.folder / "checkpoints" / "batches" / "00000003.pb").unlink()
    store.write_batch(batch, stored.footer.cursor, stored.footer.version_train_steps, stored.footer.settings)
    again = line.run("audit", str(line.folder), "--json")
    assert again.returncode == 1, again.stdout + again.stderr
    (problem,) = json.loads(again.stdout)["problems"]
    assert problem.startswith(f"policy version {version}: ")
