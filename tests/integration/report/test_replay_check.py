"""The audit repeats every draw of replayed groups, and names the one that differs."""

from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.checkpoints.batches import ReplayDraw
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config.old_logprob_methods import ReplayConfig
from rollmesh.report.ledger_check import ReplayRule, StalenessRule, Trained, read_batches
from rollmesh.trainer.service.batch_source import ReplaySource
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.trainer_progress import Progress

from ...kit.checkpoint_samples import CURSOR, SECRET, make_batch, write_batch

VERSIONS = dict.fromkeys(range(10), 0)
GROUPS = 4


def written(folder: Path, **changes: object) -> CheckpointStore:
    """Write three batches, each with a draw from those before it; ``changes`` falsify the draw of the last."""
    store = CheckpointStore(folder, SECRET)
    source = ReplaySource(ReplayConfig(batches=2), store, PolicyCatalog(store), Progress(), 7, 20)
    for step in (1, 2, 3):
        batch = make_batch(step, [f"e0-{GROUPS * step + i}" for i in range(GROUPS)])
        draw = source.draw(batch)
        assert draw is not None
        if step == 3:
            draw = draw.model_copy(update=changes)
        write_batch(store, batch, CURSOR, VERSIONS, replay=draw)
        if not changes:
            source.complete(store.stored_batch(step))
    return store


RULE = ReplayRule(replay=ReplayConfig(batches=2), seed=7, max_staleness=20)


def counts(store: CheckpointStore, rule: ReplayRule = RULE) -> Trained:
    bound = StalenessRule(max_staleness=20, mask_old_segments=False)
    return read_batches(store, 3, bound, VERSIONS, lambda: None, rule)[0]


def test_replayed_groups_are_counted_apart_and_never_as_trained_twice(tmp_path: Path) -> None:
    found = counts(written(tmp_path))
    assert (found.groups, found.replays.groups) == (3 * GROUPS, 2 * GROUPS)
    assert found.replays.staleness == {1: GROUPS, 2: GROUPS}
    assert (found.replays.problems, found.trained_twice(), found.trajectories_twice) == ([], {}, {})


def _draw(store: CheckpointStore) -> ReplayDraw:
    draw = store.batch_footer(3).replay
    assert draw is not None
    return draw


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seed": 8}, "train step 3 replayed 4 groups, which are not those that its seed draws"),
        ({"groups": []}, "train step 3 replayed 0 groups, which are not those that its seed draws"),
        ({"max_staleness": 0}, "which are not those that its seed draws"),
        ({"batches": 1}, "train step 3 drew from batch 1, which is none of the 1 before it"),
    ],
)
def test_a_draw_that_the_seed_does_not_give_is_a_problem(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    assert any(problem in text for text in counts(written(tmp_path, **changes)).replays.problems)


def test_a_source_with_other_trajectories_is_a_problem(tmp_path: Path) -> None:
    true = _draw(written(tmp_path / "true"))
    falsified = true.sources | {2: "0" * 64}
    problems = counts(written(tmp_path / "false", sources=falsified)).replays.problems
    assert problems == ["train step 3 drew from batch 2, whose file has other trajectories now"]


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (replace(RULE, seed=8), "train step 3 records replay with seed=7; the run has 8"),
        (replace(RULE, replay=ReplayConfig(batches=4)), "train step 3 records replay with batches=2; the run has 4"),
        (replace(RULE, replay=ReplayConfig(share=0.3)), "train step 3 records replay with share=0.5; the run has 0.3"),
        (replace(RULE, replay=None), "train step 3 records replay with replay=True; the run has False"),
        (replace(RULE, max_staleness=1), "train step 3 replayed a group of batch 2 with staleness 2; max_staleness=1"),
    ],
)
def test_draws_with_other_settings_than_the_run_are_problems(tmp_path: Path, rule: ReplayRule, problem: str) -> None:
    assert problem in counts(written(tmp_path), rule).replays.problems


def test_a_draw_that_leaves_out_a_batch_that_can_be_read_is_a_problem(tmp_path: Path) -> None:
    draw = _draw(written(tmp_path / "true"))
    only = {2: draw.sources[2]}
    groups = sorted((2, f"e0-{GROUPS * 2 + i}") for i in range(GROUPS))
    problems = counts(written(tmp_path / "false", sources=only, groups=groups)).replays.problems
    assert problems == ["train step 3 did not draw from batch 1, which has a valid file"]
    problems = counts(written(tmp_path / "later", sources=only, groups=groups, first=2)).replays.problems
    assert problems == ["train step 3 drew from batch 2 on instead of 1"]
