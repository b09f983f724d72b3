"""Order in which ready groups enter a batch; B = 2."""

from __future__ import annotations

import random

import pytest

from rollmesh.errors import ConfigError
from rollmesh.mesh import GroupView
from rollmesh.scheduling import decide

from .views import at_step, group, schedule


@pytest.mark.parametrize(
    ("order", "expected"),
    [("admission", ("e0-1", "e0-2")), ("shortest", ("e0-4", "e0-2")), ("oldest", ("e0-3", "e0-1"))],
)
def test_groups_that_no_later_batch_needs_leave_in_the_cut_order(order: str, expected: tuple[str, ...]) -> None:
    ready = [group(1, 2, tokens=90), group(2, 3, tokens=40), group(3, 1, tokens=70), group(4, 3, tokens=10)]
    assert decide(schedule(max_staleness=4, cut_order=order), at_step(3, ready=ready)).cut == expected


def test_a_group_that_is_due_goes_before_shorter_ones() -> None:
    """Staleness 2 at step 3: tokens of train step 1 can be trained in this batch only."""
    ready = [group(1, 3, tokens=5), group(2, 3, tokens=4), group(7, 1, tokens=900)]
    assert decide(schedule(max_staleness=2, cut_order="shortest"), at_step(3, ready=ready)).cut == ("e0-7", "e0-2")


def test_an_unfinished_group_that_is_due_still_blocks_the_cut_of_shorter_ones() -> None:
    ready = [group(5, 3, tokens=1), group(6, 3, tokens=1)]
    assert decide(
        schedule(max_staleness=2, cut_order="shortest"), at_step(3, ready=ready, opened=[group(1, 1)])
    ).blocked


@pytest.mark.parametrize("order", ["shortest", "oldest"])
def test_equal_groups_leave_in_admission_order(order: str) -> None:
    ready = [group(index, 3, tokens=8) for index in (4, 9, 6)]
    assert decide(schedule(max_staleness=4, cut_order=order), at_step(3, ready=ready)).cut == ("e0-4", "e0-6")


def test_a_group_without_tokens_is_the_newest() -> None:
    ready = [group(1, None), group(2, 3), group(3, 2)]
    assert decide(schedule(max_staleness=4, cut_order="oldest"), at_step(3, ready=ready)).cut == ("e0-3", "e0-2")


@pytest.mark.parametrize("seed", range(20))
def test_no_order_lets_a_group_pass_the_bound(seed: int) -> None:
    """One long group among ready ones that are always shorter and younger leaves within max_staleness + 1 batches."""
    random_ = random.Random(seed)
    rules = schedule(max_staleness=3, cut_order="shortest")
    long, index = group(0, 0, tokens=10_000), 1
    ready: list[GroupView] = [long]
    for step in range(4):
        while len(ready) < 4:
            ready.append(group(index, step, tokens=random_.randrange(1, 100)))
            index += 1
        cut = decide(rules, at_step(step, ready=ready)).cut
        assert cut is not None
        if long.group_id in cut:
            return
        ready = [g for g in ready if g.group_id not in cut]
    pytest.fail("the long group was overtaken beyond its last batch")


def test_shortest_first_is_refused_where_a_long_group_has_no_deadline() -> None:
    with pytest.raises(ConfigError, match=r"cut_order=shortest with schedule.on_stale=mask_old_segments"):
        schedule(cut_order="shortest", on_stale="mask_old_segments")
