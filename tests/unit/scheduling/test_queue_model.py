"""The queue model where no server is needed: order of queues, groups of one, refusals, and the cost of a view."""

import random
import timeit

import pytest

from rollmesh.errors import Conflict, SessionLost
from rollmesh.mesh import Desired, RunLimits
from rollmesh.scheduling.queue_model import GroupState, QueueModel, Save
from rollmesh.scheduling.queue_model.model_records import ScoredSet
from rollmesh.types import ForkStatus, WriteStatus


def queue(pool_size=1 << 20, **changes):
    values = {
        "group_size": 2,
        "groups_per_batch": 2,
        "max_staleness": 1,
        "max_attempts": 2,
        "session_ttl_seconds": 30.0,
        "filter_zero_variance": False,
        "mask_old_segments": False,
        "train_steps": 10,
    }
    model = QueueModel(RunLimits(**{**values, **changes}))
    model.announce(0)
    model.set_desired(Desired(pool_size=pool_size))
    model.open_session("worker")
    return model


def complete(model, *rewards):
    for member, reward in zip(model.lease("worker", len(rewards)), rewards, strict=True):
        assert model.finish("worker", member.trajectory_id, Save(3, model.policy_version)) is WriteStatus.SAVED
        assert model.score("worker", member.trajectory_id, reward) is WriteStatus.SAVED


def test_a_scored_set_gives_the_smallest_member_first_whatever_left_or_moved():
    found, expected, rng = ScoredSet(), {}, random.Random(3)
    for _ in range(3000):
        name, score = f"m{rng.randrange(40)}", rng.randrange(1000)
        if rng.random() < 0.6:
            found.add(name, score)
            expected[name] = score
        else:
            found.discard(name)
            expected.pop(name, None)
        smallest = min(expected, key=lambda name: (expected[name], name), default=None)
        assert (len(found), found.first()) == (len(expected), smallest)


@pytest.mark.parametrize(("reward", "ends"), [(1.0, {}), (None, {"e0-0": "too_few_scored"})])
def test_a_group_of_one_is_ready_with_one_score_and_dropped_without(reward, ends):
    model = queue(group_size=1)
    model.admit("e0-0", 1)
    complete(model, reward)
    if reward is None:
        complete(model, None)  # of the member that replaces it
    assert list(model.groups[GroupState.READY]) == ([] if ends else ["e0-0"])
    assert model.ended == ends


def test_a_batch_goes_from_its_cut_to_trained_and_leaves_nothing():
    model = queue()
    model.admit("e0-0", 2)
    complete(model, 0.0, 1.0)
    model.cut(1, ["e0-0"])
    with pytest.raises(Conflict, match="has not been confirmed"):
        model.report_trained()
    assert [group.group_id for group in model.claim()] == ["e0-0"]
    model.confirm_batch_file()
    assert model.claim() == [] and not model.members
    model.report_trained()
    assert (model.trained_step, model.ended, model.admitted_unconsumed) == (1, {"e0-0": "consumed"}, 0)
    assert not any(model.counts.values()) and not model.unclaimed


def test_wrong_calls_are_refused():
    model = queue(pool_size=1)
    model.admit("e0-0", 2)
    with pytest.raises(Conflict, match="e0-0 was admitted before"):
        model.admit("e0-0", 2)
    with pytest.raises(Conflict, match="e0-0 is not ready"):
        model.cut(1, ["e0-0"])
    with pytest.raises(Conflict, match="cut_step is 0"):
        model.cut(2, ["e0-0"])
    with pytest.raises(SessionLost, match="session nobody is not open"):
        model.lease("nobody", 1)
    (member,) = model.lease("worker", 2)
    assert model.fork("worker", member.trajectory_id) == (ForkStatus.POOL_FULL, None)
    assert model.append("nobody", member.trajectory_id, Save(1, 0)) is WriteStatus.LOST
    assert model.score("worker", member.trajectory_id, 1.0) is WriteStatus.REFUSED


def test_a_cut_over_the_staleness_bound_is_refused():
    model = queue(max_staleness=0)
    for index in range(2):
        model.admit(f"e0-{index}", 2)
        complete(model, 0.0, 1.0)
    model.cut(1, ["e0-0"])
    model.confirm_batch_file()
    model.report_trained()
    with pytest.raises(Conflict, match="e0-1 has staleness 1, over the bound of 0"):
        model.cut(2, ["e0-1"])


def test_a_view_without_single_groups_costs_the_same_with_64000_trajectories_in_flight():
    def seconds(trajectories):
        model = queue(group_size=16)
        for index in range(trajectories // 16):
            model.admit(f"e0-{index}", 16)
        assert len(model.lease("worker", trajectories)) == trajectories == model.view(groups=False).leased
        return min(timeit.repeat(lambda: model.view(groups=False), number=20, repeat=20))

    assert seconds(64_000) < 5 * seconds(64)
