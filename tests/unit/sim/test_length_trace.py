"""Length traces: what is written is read again, bad lines are refused by number, and turns come from segments."""

import json

import numpy as np
import pytest

from rollmesh.bench.workloads import scored
from rollmesh.errors import ConfigError
from rollmesh.sim.length_trace import TracedTrajectory, by_group, read_trace, traced_trajectory
from rollmesh.types import Prompt, Segment, SegmentSource

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
        ({"prompt_len": 0}, "prompt_len=0"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_its_field_and_the_remedy(tmp_path, change, named):
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{json.dumps({**GOOD, **change})}\n")
    with pytest.raises(ConfigError, match=rf"line 2: .*{named}.*rollmesh sim --export RUN_FOLDER"):
        read_trace(file)


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


@pytest.mark.parametrize(("cap", "context"), [(100, 27), (12, 27), (11, 26), (6, 21), (5, 17), (3, 15)])
def test_the_context_ends_with_the_sampled_tokens_that_the_cap_allows(cap, context):
    """12 of the prompt, 5 sampled, 3 of the environment, 7 sampled, unless the cap ends the trajectory before."""
    assert TracedTrajectory.read(json.dumps(GOOD)).context_tokens(cap) == context
