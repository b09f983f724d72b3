"""Calls of a simulated trajectory: where a segment ends."""

import pytest

from rollmesh.sim.queue_model import ModelGroup, ModelMember, Save
from rollmesh.sim.simulated_calls import GroupWork, SimulatedTrajectory, SimulatedTurn


def trajectory(*saves, length=1000, segment_tokens=64, turns=()):
    group = ModelGroup(group_id="e0-0", index=0, needed=1)
    tokens = sum(save.token_count for save in saves)
    return SimulatedTrajectory(
        call=0,
        member=ModelMember(group, "e0-0.0", 0, saves=list(saves), tokens=tokens),
        work=GroupWork(
            prompt_id="p0", place="e0-0", prompt_tokens=40, lengths=(length,), rewards=(1.0,), turns=(turns,)
        ),
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


def test_a_call_ends_with_its_turn_and_the_next_one_prefills_what_the_environment_said():
    turns = (SimulatedTurn(100, 7, 2.5), SimulatedTurn(150, 9, 0.5))

    def after(tokens):
        return trajectory(*(Save(tokens, 0),)[:tokens], segment_tokens=0, turns=turns)

    first, within, second, last = after(20), after(100), after(150), after(999)
    assert [each.tokens_of_call(0) for each in (first, within, second, last)] == [80, 50, 850, 1]
    assert [each.context for each in (first, within, second, last)] == [60, 147, 206, 1055]
    assert [each.new_context for each in (after(0), first, within, second, last)] == [40, 0, 7, 9, 0]
    assert [each.tool_seconds for each in (first, within, second, last)] == [0.0, 2.5, 0.5, 0.0]


def test_a_segment_may_end_within_a_turn():
    assert trajectory(Save(30, 0), turns=(SimulatedTurn(100, 7, 2.5),)).tokens_of_call(0) == 34
