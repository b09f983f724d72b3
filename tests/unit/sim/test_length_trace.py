"""Length traces: what is written is read again, bad lines are refused by number, and turns come from segments."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.workloads import group_of, scored
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.cli.main import app
from rollmesh.errors import ConfigError
from rollmesh.mesh import Cursor
from rollmesh.sim.length_trace import TracedTrajectory, by_group, read_trace, traced_trajectory
from rollmesh.types import Batch, Prompt, Segment, SegmentSource

from ...kit.checkpoint_samples import write_batch

GOOD = {"group": "a", "stream": 0, "prompt_len": 12, "out_lens": [5, 7], "obs_lens": [3], "tool_seconds": [0.5]}


def segment(tokens, version=0):
    ids = np.arange(tokens, dtype=np.int32)
    if version is None:
        return Segment(
            token_ids=ids, behavior_logprobs=None, policy_version=0, kv_min_version=0, source=SegmentSource.ENVIRONMENT
        )
    logprobs = np.zeros(tokens, np.float32)
    return Segment(token_ids=ids, behavior_logprobs=logprobs, policy_version=version, kv_min_version=version)


def test_a_line_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(GOOD) + "\n\n" + json.dumps({**GOOD, "group": 7, "obs_lens": [3, 1]}) + "\n")
    trajectories = read_trace(file)
    assert trajectories[0] == TracedTrajectory(
        group="a", stream="0", prompt_tokens=12, outputs=(5, 7), observations=(3,), tool_seconds=(0.5,)
    )
    assert [group[0].group for group in by_group(trajectories)] == ["a", "7"]
    assert [TracedTrajectory.read(each.line()) for each in trajectories] == list(trajectories)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"out_lens": []}, r"out_lens=\[\]: expected turns of at least 1 token"),
        ({"out_lens": [5, 0]}, r"out_lens=\[5, 0\]"),
        ({"out_lens": [5.5, 1]}, "5.5 is no whole number"),
        ({"out_lens": None}, "length trace"),
        ({"obs_lens": []}, r"obs_lens=\[\]: expected 1 or 2 numbers for 2 turns"),
        ({"obs_lens": [-1]}, r"obs_lens=\[-1\]"),
        ({"tool_seconds": [float("nan")]}, r"tool_seconds=\[nan\]: expected finite numbers"),
        ({"tool_seconds": [1, 2, 3]}, "tool_seconds"),
        ({"tool_seconds": [10**400]}, "length trace: int too large"),
        ({"prompt_len": 0}, "prompt_len=0"),
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
    ("text", "named"), [("", "no trajectories"), ("{}", "line 1: group: missing"), ("[1]", "line 1"), ("{", "line 1")]
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, text, named):
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_trace(file)


def test_segments_of_several_versions_are_one_turn_and_what_comes_first_is_prompt():
    prompt = Prompt(prompt_id="p", token_ids=np.arange(3, dtype=np.int32), verifier="exact")
    segments = (segment(2, None), segment(10, 0), segment(5, 1), segment(4, None), segment(6, 1), segment(1, None))
    traced = traced_trajectory(scored(prompt, "e0-0", 0, segments, 1.0), "0")
    assert (traced.prompt_tokens, traced.outputs, traced.observations) == (5, (15, 6), (4, 1))


@pytest.mark.parametrize(
    ("budget", "outputs"), [(100, (5, 7)), (15, (5, 7)), (14, (5, 6)), (9, (5, 1)), (8, (5,)), (6, (5,)), (3, (3,))]
)
def test_a_budget_counts_the_tokens_of_the_environment(budget, outputs):
    """5 sampled, 3 of the environment, 7 sampled, unless the budget ends the trajectory before."""
    trajectory = TracedTrajectory.read(json.dumps(GOOD)).cut(budget)
    between = ((3,), (0.5,)) if len(outputs) > 1 else ((), ())
    assert (trajectory.outputs, (trajectory.observations, trajectory.tool_seconds)) == (outputs, between)
    assert trajectory.longest_context == sum(outputs) + sum(between[0])


def test_tokens_of_the_environment_after_the_last_turn_have_no_effect():
    trajectory = TracedTrajectory.read(json.dumps({**GOOD, "obs_lens": [3, 900]}))
    assert trajectory.longest_context == 15 and trajectory.cut(15) == TracedTrajectory.read(json.dumps(GOOD))


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
