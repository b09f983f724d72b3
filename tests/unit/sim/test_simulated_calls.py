"""Calls of a simulated trajectory: where a segment ends."""

import pytest

from rollmesh.sim.queue_model import ModelGroup, ModelMember, Save
from rollmesh.sim.simulated_calls import GroupWork, SimulatedTrajectory


def trajectory(*saves, length=1000, segment_tokens=64):
    group = ModelGroup(group_id="e0-0", index=0, needed=1)
    tokens = sum(save.token_count for save in saves)
    return SimulatedTrajectory(
        call=0,
        member=ModelMember(group, "e0-0.0", 0, saves=list(saves), tokens=tokens),
        work=GroupWork(prompt_id="p0", place="e0-0", prompt_tokens=40, lengths=(length,), rewards=(1.0,)),
        floor=0,
        segment_tokens=segment_tokens,
    )


def test_a_call_ends_with_the_segment_of_the_version_that_decodes_it():
    began = trajectory(Save(30, 0), Save(70, 0), Save(10, 1))
    assert began.tokens_of_call(0) == 28  # 100 tokens of version 0 are a segment of 64 and 36 of the next one.
    assert began.tokens_of_call(1) == 54
    assert began.tokens_of_call(2) == 64


def test_the_last_call_ends_with_the_trajectory():
    assert trajectory(Save(50, 0), length=60).tokens_of_call(0) == 10
    assert trajectory(Save(50, 0), segment_tokens=0).tokens_of_call(0) == 950


@pytest.mark.parametrize(("saves", "is_full"), [((64,), True), ((60, 68), True), ((63,), False), ((100,), False)])
def test_a_segment_is_full_at_every_multiple_of_its_tokens(saves, is_full):
    assert trajectory(Save(5, 0), *(Save(count, 1) for count in saves)).fills_segment(1) is is_full
