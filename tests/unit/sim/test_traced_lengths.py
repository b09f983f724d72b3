"""Recorded lengths: every schedule gets the same trajectories, each of a group once, and turns take their time."""

from dataclasses import replace

import pytest

from rollmesh.sim.length_trace import TracedLengths, TracedTrajectory, by_group
from rollmesh.sim.simulated_calls import SimulatedTurn

from .meshes import assert_conserved, mesh_settings, run


def traced(group, stream, *outputs, observations=(), tool_seconds=()):
    return TracedTrajectory(
        group=f"p{group}",
        stream=str(stream),
        prompt_tokens=20 + group,
        outputs=outputs,
        observations=observations,
        tool_seconds=tool_seconds,
    )


def lengths(*trajectories):
    return TracedLengths(groups=by_group(trajectories))


def test_a_group_gets_each_of_its_recorded_lengths_once_and_further_members_one_of_them():
    model = lengths(*(traced(0, stream, 10 * stream + 10) for stream in range(4)), traced(1, 0, 7))
    drawn = model.draw(5, 2, 4).tolist()  # Prompt 2 is the first group again.
    assert sorted(drawn) == [10, 20, 30, 40]
    assert model.draw(5, 2, 9).tolist()[:4] == drawn
    assert set(model.draw(5, 2, 9).tolist()) == {10, 20, 30, 40}
    assert model.draw(3, 1, 3).tolist() == [7, 7, 7]
    assert (model.prompt_tokens(2), model.prompt_tokens(1)) == (20, 21)


def test_the_turns_before_the_last_one_have_their_end_their_observation_and_its_time():
    recorded = traced(0, 0, 10, 20, 30, observations=(3, 4), tool_seconds=(0.5, 0.25))
    assert lengths(recorded).turns(0, 0, 1) == ((SimulatedTurn(10, 3, 0.5), SimulatedTurn(30, 4, 0.25)),)
    budget = lengths(recorded.cut(37))
    assert budget.draw(0, 0, 1).tolist() == [30] and budget.turns(0, 0, 1) == ((SimulatedTurn(10, 3, 0.5),),)


@pytest.mark.parametrize("preset", ["copris", "ulorl", "rollpacker", "sorted_partial"])
def test_turns_with_tools_conserve_work_with_deaths_barriers_rests_and_spares(preset):
    recorded = [
        traced(group, stream, 60 + 10 * stream, 90, observations=(30,), tool_seconds=(0.4 * group,))
        for group in range(5)
        for stream in range(4)
    ]
    settings = mesh_settings(preset, failures=("deaths_per_hour=100", "back_seconds=3"))
    prompts = replace(settings.prompts, lengths=lengths(*recorded))
    mesh, result = run(replace(settings, prompts=prompts))
    assert all(update.trajectories == 16 for update in result.updates)
    assert_conserved(mesh, result)


def test_everything_but_the_prompt_and_the_observations_is_prefilled_again():
    """One call per turn: each prefills the context of the one before, its tokens and the observation after them."""
    settings = mesh_settings("sync", steps=1)
    recorded = traced(0, 0, *[10] * 20, observations=[50] * 19)
    prompts = replace(settings.prompts, lengths=lengths(recorded))
    work = run(replace(settings, prompts=prompts))[1].work[-1]
    contexts = [20 + 60 * turn for turn in range(20)]
    assert work.prefilled_tokens == 16 * sum(contexts)
    assert work.reprefilled_tokens == 16 * (sum(contexts) - 20 - 19 * 50)


def test_an_update_waits_for_the_tools_of_its_turns():
    settings = mesh_settings("sync", steps=1)
    cut_at = {}
    for seconds in (0.0, 50.0):
        recorded = traced(0, 0, 100, 100, observations=(10,), tool_seconds=(seconds,))
        prompts = replace(settings.prompts, lengths=lengths(recorded))
        cut_at[seconds] = run(replace(settings, prompts=prompts))[1].updates[0].cut_at
    assert cut_at[50.0] - cut_at[0.0] == pytest.approx(50, abs=0.5)


@pytest.mark.parametrize("preset", ["sync", "copris"])
def test_tools_and_rewards_of_days_end_although_the_mesh_looks_on(preset):
    """Gaps of the leader go on in between, so there are events at which the mesh could give up."""
    settings = mesh_settings(preset, steps=1, failures=("leader_gaps_per_hour=0.2",))
    prompts = replace(
        settings.prompts, lengths=lengths(traced(0, 0, 9, 9, observations=(1,), tool_seconds=(400_000.0,)))
    )
    rewards = replace(settings.rewards, median_seconds=400_000.0, worker_count=64)
    _, result = run(replace(settings, prompts=prompts, rewards=rewards))
    assert len(result.updates) == 1 and result.seconds > 600_000


def test_a_prompt_is_as_long_as_in_the_trajectory_that_has_most_of_it():
    short, long = traced(0, 0, 10), replace(traced(0, 1, 3), prompt_tokens=90)
    model = lengths(short, long, traced(1, 0, 40))
    assert model.prompt_tokens(0) == 90
    assert model.longest() == (100, short)
