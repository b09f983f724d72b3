"""The timeline: what one look after the other makes of rollouts in flight."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.gateway.models.live import RolloutSpan, Timeline, TimelineDelta
from rollmesh.gateway.timeline_tracker import TimelineTracker
from rollmesh.store.inspection import TrajectoryMark

WORKERS = {"s1": "rollout-0", "s2": "rollout-1"}


def mark(trajectory_id: str, tokens: int = 0, version: int | None = None, **changes: Any) -> TrajectoryMark:
    values: dict[str, Any] = {
        "trajectory_id": trajectory_id,
        "state": "leased",
        "token_count": tokens,
        "attempts": 1,
        "birth_version": 0,
        "newest_version": version,
        "finish_reason": None,
        "reward": None,
        "session": "s1",
    }
    return TrajectoryMark(**{**values, **changes})


def look(lanes: TimelineTracker, now: float, *marks: TrajectoryMark, gone: tuple[str, ...] = ()) -> TimelineDelta:
    found: dict[str, TrajectoryMark | None] = {m.trajectory_id: m for m in marks} | dict.fromkeys(gone)
    return lanes.update(now, found, WORKERS, in_flight=sum(m.state == "leased" for m in marks))


def only(spans: list[RolloutSpan]) -> RolloutSpan:
    (span,) = spans
    return span


def test_a_rollout_is_a_row_of_intervals_by_version() -> None:
    lanes = TimelineTracker(16, 120.0)
    look(lanes, 10.0, mark("a.0"))
    assert only(look(lanes, 11.0, mark("a.0", 64, 3, generator="g1")).changed).generator == "g1"
    assert only(look(lanes, 12.0, mark("a.0", 128, 3, generator="g2")).changed).generator == "g2"
    span = only(look(lanes, 13.0, mark("a.0", 192, 5)).changed)
    assert (span.start, span.end, span.tokens, span.worker) == (10.0, None, 192, "rollout-0")
    assert [(i.policy_version, i.start, i.end, i.tokens) for i in span.intervals] == [
        (3, 10.0, 12.0, 128),
        (5, 12.0, 13.0, 64),
    ]
    lost = only(look(lanes, 14.0, mark("a.0", 0)).changed)
    assert (lost.tokens, lost.intervals) == (0, []), "an environment that was lost begins again"
    earlier = only(look(lanes, 100.0, mark("b.0", 500, 2, lease_time=40.0)).changed)
    assert earlier.start == earlier.intervals[0].start == 40.0, "it was leased before the gateway came"


def test_an_unchanged_snapshot_sends_nothing() -> None:
    lanes = TimelineTracker(16, 120.0)
    assert len(look(lanes, 10.0, mark("a.0", 5, 1)).changed) == 1
    assert look(lanes, 11.0, mark("a.0", 5, 1)).changed == []
    assert len(look(lanes, 12.0, mark("a.0", 5, 1, session="s2")).changed) == 1


def test_a_released_rollout_ends_and_one_that_is_leased_again_continues() -> None:
    lanes = TimelineTracker(16, 120.0)
    look(lanes, 10.0, mark("a.0", 5, 1))
    assert only(look(lanes, 11.0, mark("a.0", 9, 1, state="partial", session="")).changed).end == 11.0
    assert lanes.followed == []
    span = only(look(lanes, 20.0, mark("a.0", 9, 1, session="s2")).changed)
    assert (span.start, span.end, span.worker, span.state) == (10.0, None, "rollout-1", "leased")
    assert len(lanes.timeline().rollouts) == 1


def test_a_rollout_whose_group_is_gone_says_so_and_leaves_after_the_window() -> None:
    lanes = TimelineTracker(16, 30.0)
    look(lanes, 10.0, mark("a.0", 5, 1))
    assert only(look(lanes, 11.0, gone=("a.0",)).changed).state == "gone"
    assert look(lanes, 40.0).removed == []
    assert look(lanes, 42.0).removed == ["a.0"]
    assert lanes.timeline().rollouts == []


def test_a_full_timeline_says_how_many_are_left_out_and_keeps_room_for_those_that_ended() -> None:
    lanes = TimelineTracker(16, 120.0)
    ids = [f"g.{i}" for i in range(100)]
    taken = lanes.new_ids(ids)
    delta = lanes.update(1.0, {i: mark(i) for i in taken}, WORKERS, in_flight=100)
    assert (len(delta.changed), delta.left_out) == (12, 88)
    assert lanes.new_ids(ids) == []
    lanes.update(2.0, {i: mark(i, 3, 0, state="finished") for i in taken}, WORKERS, in_flight=88)
    assert len(lanes.timeline().rollouts) == 12
    assert lanes.room == 12


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["leased", "finished", "partial", "gone"])), max_size=80))
def test_a_client_that_applies_every_delta_has_the_timeline(steps: list[tuple[int, str]]) -> None:
    lanes = TimelineTracker(16, 5.0)
    mirror: dict[str, RolloutSpan] = {}
    for now, (number, state) in enumerate(steps, start=1):
        trajectory_id = f"g.{number}"
        found = None if state == "gone" else mark(trajectory_id, now, now // 4, state=state)
        delta = lanes.update(float(now), {trajectory_id: found}, WORKERS, in_flight=3)
        for span in delta.changed:
            mirror[span.id] = span
        for removed in delta.removed:
            mirror.pop(removed, None)
        timeline: Timeline = lanes.timeline()
        assert {span.id: span for span in timeline.rollouts} == mirror
        assert len(mirror) <= 16
