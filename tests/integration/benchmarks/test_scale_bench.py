"""The scale bench holds its rollouts in flight on a real mesh, and counts what becomes of each."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.scale_processes import Answers
from rollmesh.types import Prompt, Segment, Trajectory

pytestmark = [pytest.mark.long, pytest.mark.slow]

FAULTS = (
    "trajectories in no state",
    "leases beyond one a trajectory",
    "trajectories consumed twice",
    "groups consumed incomplete",
    "trajectories with other tokens than were sent",
    "groups dropped",
)


@pytest.mark.timeout(600)
def test_the_scale_bench_holds_200_rollouts_in_flight_and_loses_none() -> None:
    command = [sys.executable, "-m", "benchmarks", "scale", "--quick", "--level", "200", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    values = {row["name"].removeprefix("200 in flight: "): row["value"] for row in rows}
    assert {name: values[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert 100 < values["held"] <= 200
    assert values["finished"] > 0
    parts = ("Redis", "workers", "leader", "emulated generators", "reward service", "consumer")
    assert all(values[f"CPU of {part} a trajectory"] > 0 for part in parts)
    for name in ("look", "decision", "PING of Redis", *(f"event loop lag, {part}" for part in parts[1:])):
        assert 0 < values[f"{name}, p50"] <= values[f"{name}, p99"]
    total = values["CPU of Redis, workers and leader a trajectory"]
    assert total == pytest.approx(sum(values[f"CPU of {part} a trajectory"] for part in parts[:3]))


@pytest.mark.parametrize("broken", ["nothing", "a token", "a logprob", "the last token", "the order"])
def test_the_consumer_sees_every_token_that_is_not_the_answers(broken: str) -> None:
    answers, name = Answers(256), "e0-3.1"
    sent = answers.tokens(name, 0, answers.length(name))
    ids, logprobs = sent[0].copy(), sent[1].copy()
    cut = len(ids) // 2
    if broken == "a token":
        ids[cut] = ids[cut] % 80 + 12
    elif broken == "a logprob":
        logprobs[cut] -= 1
    elif broken == "the last token":
        ids, logprobs = ids[:-1], logprobs[:-1]
    elif broken == "the order":
        ids = np.concatenate([ids[cut:], ids[:cut]])
    trajectory = Trajectory(
        trajectory_id=name,
        group_id="e0-3",
        member_index=1,
        prompt=Prompt(prompt_id="3", token_ids=np.zeros(1, np.int32), verifier="exact"),
        segments=tuple(
            Segment(token_ids=part, behavior_logprobs=logprob, policy_version=0, kv_min_version=0)
            for part, logprob in ((ids[:cut], logprobs[:cut]), (ids[cut:], logprobs[cut:]))
        ),
    )
    assert answers.matches(trajectory) == (broken == "nothing")


def test_a_continued_answer_starts_at_its_last_token() -> None:
    answers, name = Answers(256), "e0-3.1"
    length = answers.length(name)
    whole, _ = answers.tokens(name, 0, length)
    parts = [answers.tokens(name, first, min(32, length - first))[0] for first in range(0, length, 32)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert 32 <= length <= 480
