import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.store.queue_types import ReleaseReason
from rollmesh.types import FinishReason, Prompt, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo, Parked

from ...kit.records import environment_tokens, policy_tokens


def held(*segments):
    prompt = Prompt(prompt_id="p", token_ids=np.array([90, 91], np.int32), verifier="exact")
    return ActiveTrajectory(
        Trajectory(trajectory_id="e0-1.0", group_id="e0-1", member_index=0, prompt=prompt, segments=tuple(segments))
    )


def ids_of(segments):
    return [int(i) for s in segments for i in s.token_ids]


def test_a_resumed_trajectory_starts_with_everything_saved_and_a_restart_forgets_every_token():
    trajectory = held(policy_tokens([1, 2], version=1), policy_tokens([3], version=4))
    assert (trajectory.token_count, trajectory.saved_token_count, trajectory.newest_version) == (3, 3, 4)
    assert trajectory.context_ids().tolist() == [90, 91, 1, 2, 3]
    trajectory.restart()
    assert (trajectory.token_count, trajectory.saved_token_count, trajectory.newest_version) == (0, 0, -1)
    assert trajectory.result(FinishReason.STOP).segments == ()


@given(st.lists(st.integers(1, 5), max_size=6), st.data())
def test_unsaved_tokens_are_exactly_those_after_the_saved_count(lengths, data):
    trajectory = held()
    first = 0
    for length in lengths:
        trajectory.add(policy_tokens(range(first, first + length), version=1))
        first += length
    trajectory.saved_token_count = data.draw(st.integers(0, first))
    rest = trajectory.unsaved()
    assert ids_of(rest) == list(range(trajectory.saved_token_count, first))
    for part in rest:
        assert part.behavior_logprobs.tolist() == (-part.token_ids).tolist()


def test_the_next_token_needs_the_newest_segments_version_and_a_new_trajectory_its_floor():
    trajectory = held()
    trajectory.set_floors(start=3, call=0)
    assert trajectory.min_version == 3
    trajectory.add(policy_tokens([1], version=2))
    assert trajectory.min_version == 2
    trajectory.add(environment_tokens([5], version=0))
    assert trajectory.min_version == 2
    trajectory.set_floors(start=3, call=6)
    assert trajectory.min_version == 6


def test_parking_stops_at_the_next_step_and_a_pause_can_be_taken_back_but_not_a_drain_or_a_loss():
    trajectory = held()
    trajectory.park(ReleaseReason.PAUSED)
    with pytest.raises(Parked) as stop:
        trajectory.check()
    assert stop.value.reason is ReleaseReason.PAUSED
    trajectory.check_lost()
    trajectory.unpark()
    trajectory.check()
    trajectory.park(ReleaseReason.DRAINED)
    trajectory.unpark()
    with pytest.raises(Parked):
        trajectory.check()
    trajectory.lose("reaped")
    with pytest.raises(LetGo, match="reaped"):
        trajectory.check()


def test_tokens_that_are_not_saved_can_be_trimmed_and_saved_ones_stay():
    trajectory = held()
    trajectory.add(policy_tokens(range(5), version=1))
    trajectory.add(policy_tokens(range(5, 9), version=2))
    trajectory.trim(7)
    assert (trajectory.token_count, trajectory.newest_version) == (7, 2)
    assert ids_of(trajectory.segments) == list(range(7))
    trajectory.saved_token_count = 4
    trajectory.trim(2)
    assert (trajectory.token_count, trajectory.newest_version) == (4, 1)
    assert trajectory.unsaved() == []
    trajectory.add(policy_tokens([7, 8], version=3))
    assert ids_of(trajectory.unsaved()) == [7, 8]


def test_observers_are_notified_of_tokens_of_a_pause_and_of_a_loss():
    trajectory, told = held(), []
    trajectory.observe(lambda seen: told.append((seen.token_count, seen.wanted)))
    trajectory.add(policy_tokens([1, 2], version=1))
    trajectory.park(ReleaseReason.PAUSED)
    trajectory.unpark()
    trajectory.lose("gone")
    assert told == [(2, True), (2, False), (2, True), (2, False)]


def test_a_stop_request_ends_with_the_call_that_it_concerns():
    trajectory = held()
    trajectory.add(policy_tokens([1, 2, 3], version=1))
    trajectory.request_stop(2)
    assert (trajectory.stop_requested, trajectory.token_count) == (True, 2)
    trajectory.begin_call("b")
    assert not trajectory.stop_requested


def test_a_first_token_is_unreported_until_it_is_reported_or_saved_and_again_after_a_registration():
    trajectory = held()
    trajectory.add(environment_tokens([8], version=0))
    assert trajectory.unreported_version is None
    trajectory.add(policy_tokens([1, 2], version=4))
    assert trajectory.unreported_version == 4
    trajectory.first_token_reported = True
    assert trajectory.unreported_version is None
    trajectory.mark_registered(0)
    assert trajectory.unreported_version == 4
    trajectory.mark_registered(9)
    assert (trajectory.unreported_version, trajectory.saved_token_count) == (None, 3)
