"""A run whose tokens are drawn from kept sets is trained and audited over these sets; on SGLang: test_sglang_run.py."""

from collections.abc import Callable

import pytest

from rollmesh.kept_sets import slice_sets
from rollmesh.report.audit import open_checkpoints
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.types import SegmentSource

from ..chaos.judge import judge
from .conftest import CommandLine, assert_rescored


@pytest.mark.long
def test_a_run_with_truncated_sampling_is_trained_over_its_kept_sets(small_run: Callable[..., CommandLine]) -> None:
    line = small_run(rollout={"top_p": 0.9, "min_p": 0.02}, evaluation={"before_and_after": False})
    line.succeeds("up", str(line.run_file))
    assert_rescored(line.audit())
    # Another program scores tokens and trains a step again: without the sets they are 0.1 nats and 0.1 updates off.
    judgement = judge(line.folder)
    assert judgement.problems == () and judgement.replay_distance is not None
    store, sizes = open_checkpoints(RecordedRun(line.folder)), []
    trajectories = (t for step in line.steps for group in store.read_batch(step).groups for t in group.trajectories)
    for segment in (s for t in trajectories for s in t.segments if s.source is SegmentSource.POLICY):
        assert segment.kept_sets is not None
        for at, token in enumerate(segment.token_ids.tolist()):
            kept = slice_sets(segment.kept_sets, at, at + 1).ids.tolist()
            assert token in kept
            sizes.append(len(kept))
    assert min(sizes) == 1 < max(sizes)
