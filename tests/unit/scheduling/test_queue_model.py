"""The queue model where no server is needed: order of queues and views, groups of one, refusals, cost of a view."""

import math
import random

import pytest

from rollmesh.mesh import Desired, RunLimits
from rollmesh.sim.queue_model import GroupState, QueueModel, Save
from rollmesh.sim.queue_model.records import ScoredSet
from rollmesh.types import WriteStatus


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


def train(model, *names):
    model.cut(model.cut_step + 1, names)
    model.confirm_batch_file()
    model.report_trained()
    model.announce(model.trained_step)


def stale(group):
    return math.inf if group.step is None else group.step, group.group_id


def listed(model, shortest):
    """Ready and open groups of a view, from the records of all groups."""
    bound, oldest = 2 * model.limits.groups_per_batch, model.trained_step - model.limits.max_staleness

    def row(group):
        step = max(group.step, oldest) if model.limits.mask_old_segments and group.step is not None else group.step
        return group.group_id, group.index, step, group.scored_tokens if group.state is GroupState.READY else 0

    ready, opened = (
        sorted(model.groups[state].values(), key=lambda group: group.index)
        for state in (GroupState.READY, GroupState.OPEN)
    )
    named = [*ready[:bound], *sorted(ready, key=stale)[:bound]]
    if shortest:
        named += sorted(ready, key=lambda group: (group.scored_tokens, group.group_id))[:bound]
    stalest = [group for group in sorted(opened, key=stale) if group.step is not None][:bound]
    if len(stalest) < bound:
        stalest += [group for group in opened[:bound] if group.step is None]
    return [row(group) for group in dict.fromkeys(named)], [row(group) for group in stalest]


@pytest.mark.parametrize("mask", [False, True])
def test_a_view_lists_the_first_the_stalest_and_the_shortest_groups_whatever_happened_before(mask):
    model, rng = queue(mask_old_segments=mask, train_steps=1000), random.Random(9)
    most = {GroupState.OPEN: 0, GroupState.READY: 0, GroupState.ASIDE: 0}
    for index in range(2000):
        held = sorted(model.held["worker"])
        member = model.members[rng.choice(held)] if held else None
        match rng.choices(range(7), [6, 6, 12, 1, 1, 1, 1])[0]:
            case 0 if len(model.groups[GroupState.OPEN]) < 12:
                model.admit(f"e{rng.randrange(100)}-{index}", 2)
            case 1:
                model.lease("worker", rng.randrange(4))
            case 2 if member:
                model.finish("worker", member.trajectory_id, Save(rng.randrange(1, 50), model.policy_version))
                model.score("worker", member.trajectory_id, rng.choice([0.0, 1.0, 1.0, None]))
            case 3 if member:
                model.begin("worker", member.trajectory_id, rng.randrange(model.policy_version + 1))
                model.release("worker", member.trajectory_id, free_attempt=True)
            case 4 if not mask:
                model.begin_again([*model.groups[GroupState.READY], *model.groups[GroupState.OPEN]][:9], aside=True)
            case 5:
                model.recall(model.cut_step + 1, model.recalled_groups + 1)
            case 6 if len(model.groups[GroupState.READY]) > 8:
                evicted, chosen = rng.sample(sorted(model.groups[GroupState.READY].values(), key=stale), 2)
                model.evict([evicted.group_id], "straggler")
                if mask or chosen.step >= model.cut_step - 1:
                    train(model, chosen.group_id)
        for shortest in (False, True):
            view = model.view(shortest=shortest)
            found = [
                [(g.group_id, g.admission_index, g.min_train_step, g.token_count) for g in groups]
                for groups in (view.ready, view.stalest_open)
            ]
            assert found == list(listed(model, shortest))
        most = {state: max(count, len(model.groups[state])) for state, count in most.items()}
    # More than a view lists, of each kind.
    assert min(most[GroupState.OPEN], most[GroupState.READY]) > 2 * model.limits.groups_per_batch
    assert model.trained_step and (mask or most[GroupState.ASIDE])
