"""Length traces: what is written is read again, bad lines are refused by number, and turns come from segments."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.workloads import group_of, scored
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.cli.main import app
from rollmesh.errors import ConfigError
from rollmesh.mesh import Cursor
from rollmesh.sim.length_trace import TracedLengths, TracedTrajectory, by_group, read_trace, traced_trajectory
from rollmesh.sim.simulated_calls import SimulatedTurn
from rollmesh.types import Batch, Prompt

from ...kit.checkpoint_samples import write_batch
from ...kit.records import environment_tokens, policy_tokens
from .meshes import assert_conserved, mesh_settings, run

GOOD = {"group": "a", "stream": 0, "prompt_len": 12, "out_lens": [5, 7], "obs_lens": [3], "tool_seconds": [0.5]}


def segment(tokens, version=0):
    return environment_tokens(range(tokens)) if version is None else policy_tokens(range(tokens), version)


def test_a_line_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(GOOD) + "\n\n" + json.dumps({**GOOD, "group": 7, "obs_lens": [3, 1]}) + "\n")
    trajectories = read_trace(file)
    assert trajectories[0] == TracedTrajectory(
        group="a", stream="0", prompt_len=12, out_lens=(5, 7), obs_lens=(3,), tool_seconds=(0.5,)
    )
    assert [group[0].group for group in by_group(trajectories)] == ["a", "7"]
    assert [TracedTrajectory.model_validate_json(each.line()) for each in trajectories] == list(trajectories)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"out_lens": []}, "out_lens.*: .* at least 1 item"),
        ({"out_lens": [5, 0]}, "out_lens.*: .* greater than or equal to 1"),
        ({"out_lens": [5.5, 1]}, "out_lens.*: .* valid integer"),
        ({"out_lens": None}, "out_lens"),
        ({"obs_lens": []}, r"obs_lens=\[\]: expected 1 or 2 numbers for 2 turns"),
        ({"obs_lens": [-1]}, "obs_lens.*: .* greater than or equal to 0"),
        ({"tool_seconds": [float("nan")]}, "tool_seconds.*: .* finite number"),
        ({"tool_seconds": [1, 2, 3]}, "tool_seconds"),
        ({"tool_seconds": [10**400]}, "tool_seconds"),
        ({"prompt_len": 0}, "prompt_len: .* greater than or equal to 1"),
        ({"out_lens": [2**31, 1]}, "out_lens and obs_lens: total=2147483664: expected at most 2147483647 tokens"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_its_field_and_the_remedy(tmp_path, change, named):
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{json.dumps({**GOOD, **change})}\n")
    with pytest.raises(ConfigError, match=rf"line 2: .*{named}.*rollmesh sim --export RUN_FOLDER") as refused:
        read_trace(file)
    assert str(refused.value).count("write one with") == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [("", "no trajectories"), ("{}", "line 1: group: Field required"), ("[1]", "line 1"), ("{", "line 1")],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, text, named):
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_trace(file)


def test_segments_of_several_versions_are_one_turn_and_what_comes_first_is_prompt():
    prompt = Prompt(prompt_id="p", token_ids=np.arange(3, dtype=np.int32), verifier="exact")
    segments = (segment(2, None), segment(10, 0), segment(5, 1), segment(4, None), segment(6, 1), segment(1, None))
    traced = traced_trajectory(scored(prompt, "e0-0", 0, segments, 1.0))
    assert (traced.prompt_tokens, traced.outputs, traced.observations) == (5, (15, 6), (4, 1))


@pytest.mark.parametrize(
    ("budget", "outputs"), [(100, (5, 7)), (15, (5, 7)), (14, (5, 6)), (9, (5, 1)), (8, (5,)), (6, (5,)), (3, (3,))]
)
def test_a_budget_counts_the_tokens_of_the_environment(budget, outputs):
    """5 sampled, 3 of the environment, 7 sampled, unless the budget ends the trajectory before."""
    trajectory = TracedTrajectory.model_validate(GOOD).cut(budget)
    between = ((3,), (0.5,)) if len(outputs) > 1 else ((), ())
    assert (trajectory.outputs, (trajectory.observations, trajectory.tool_seconds)) == (outputs, between)
    assert trajectory.longest_context == sum(outputs) + sum(between[0])


def test_tokens_of_the_environment_after_the_last_turn_have_no_effect():
    trajectory = TracedTrajectory.model_validate({**GOOD, "obs_lens": [3, 900]})
    assert trajectory.longest_context == 15 and trajectory.cut(15) == TracedTrajectory.model_validate_json(
        json.dumps(GOOD)
    )


@pytest.fixture
def run_folder(tmp_path):
    """Return a run folder with two groups of one prompt and one of another, in two batch files."""
    (tmp_path / SECRET_FILE).write_text("0" * 64)
    (tmp_path / "checkpoints").mkdir()
    store = CheckpointStore(tmp_path / "checkpoints", b"0" * 64)
    prompts = [Prompt(prompt_id=name, token_ids=np.arange(3, dtype=np.int32), verifier="exact") for name in "ab"]

    def group(index, prompt, *lengths):
        turns = ((segment(length), segment(4, None), segment(2)) for length in lengths)
        members = [scored(prompts[prompt], f"e0-{index}", m, turn, 1.0) for m, turn in enumerate(turns)]
        return group_of(index, reversed(members))

    write_batch(store, Batch(train_step=1, groups=(group(2, 0, 30, 40),)), Cursor(epoch=0, index=3))
    write_batch(store, Batch(train_step=2, groups=(group(1, 1, 50, 60), group(0, 0, 10, 20))), Cursor(epoch=0, index=3))
    return tmp_path


def test_a_run_exports_its_trajectories_by_prompt_and_simulates_as_its_trace(run_folder):
    runner, trace = CliRunner(), run_folder / "trace.jsonl"
    exported = runner.invoke(app, ["sim", "--export", str(run_folder)])
    trace.write_text(exported.stdout)
    groups = by_group(read_trace(trace))
    assert [[(each.stream, each.outputs, each.observations) for each in group] for group in groups] == [
        [(str(stream), (length, 2), (4,)) for stream, length in enumerate((10, 20, 30, 40))],
        [(str(stream), (length, 2), (4,)) for stream, length in enumerate((50, 60))],
    ]
    sets = ["schedule.groups_per_batch=2", "schedule.group_size=2", "generator.replicas=2", "trainer.train_steps=2"]
    options = ["sim", "--json", *(item for each in sets for item in ("--set", each))]
    of_run, of_trace = (
        json.loads(runner.invoke(app, [*options, "--lengths", str(path)]).stdout) for path in (run_folder, trace)
    )
    assert (of_run.pop("assumed")["lengths"], of_trace.pop("assumed")["lengths"]) == (str(run_folder), str(trace))
    assert of_run == of_trace and of_run["updates"] == 1


def traced(group, stream, *outputs, observations=(), tool_seconds=()):
    return TracedTrajectory(
        group=f"p{group}",
        stream=str(stream),
        prompt_len=20 + group,
        out_lens=outputs,
        obs_lens=observations or (0,) * (len(outputs) - 1),
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
    short, long = traced(0, 0, 10), traced(0, 1, 3).model_copy(update={"prompt_tokens": 90})
    model = lengths(short, long, traced(1, 0, 40))
    assert model.prompt_tokens(0) == 90
    assert model.longest() == (100, short)
