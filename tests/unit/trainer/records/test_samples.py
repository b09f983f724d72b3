"""Completions recorded for people."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rollmesh.trainer.records.run_log import decoder, sample_completions
from rollmesh.types import (
    Batch,
    FinishReason,
    Group,
    OutcomeKind,
    Prompt,
    RewardOutcome,
    Segment,
    Trajectory,
)


def batch(step: int, groups: int = 4, members: int = 3) -> Batch:
    return Batch(
        train_step=step,
        groups=tuple(
            Group(
                group_id=f"e0-{g}",
                admission_index=g,
                trajectories=tuple(_trajectory(f"e0-{g}", m) for m in range(members)),
            )
            for g in range(groups)
        ),
    )


def _trajectory(group_id: str, member: int) -> Trajectory:
    ids = np.array([1, 2, 3], np.int32)
    return Trajectory(
        trajectory_id=f"{group_id}.{member}",
        group_id=group_id,
        member_index=member,
        prompt=Prompt(prompt_id=group_id, token_ids=np.array([7], np.int32), verifier="exact"),
        segments=(
            Segment(token_ids=ids, behavior_logprobs=-np.ones(3, np.float32), policy_version=4, kv_min_version=4),
        ),
        finish_reason=FinishReason.STOP,
        outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=0.5),
        shaped_reward=0.25,
    )


def test_samples_come_from_different_groups_and_from_other_members_each_step(tmp_path: Path) -> None:
    decode = decoder(tmp_path)
    first, second = (sample_completions(batch(step), 2, decode) for step in (1, 2))
    assert [s["trajectory_id"].split(".")[0] for s in first] == ["e0-0", "e0-2"]
    assert {s["trajectory_id"] for s in first}.isdisjoint(s["trajectory_id"] for s in second)


def test_a_sample_says_what_was_asked_answered_and_paid(tmp_path: Path) -> None:
    (sample,) = sample_completions(batch(3), 1, decoder(tmp_path))
    assert sample == {
        "train_step": 3,
        "trajectory_id": "e0-0.0",
        "prompt": "7",
        "completion": "1 2 3",
        "token_count": 3,
        "finish_reason": "stop",
        "outcome": "scored",
        "reward": 0.5,
        "shaped_reward": 0.25,
        "policy_versions": [4],
    }


def test_no_samples_are_taken_when_none_are_asked_for(tmp_path: Path) -> None:
    assert sample_completions(batch(1), 0, decoder(tmp_path)) == []


def test_every_group_gives_one_sample_when_more_are_asked_for(tmp_path: Path) -> None:
    found = sample_completions(batch(1, groups=2), 9, decoder(tmp_path))
    assert [s["trajectory_id"].split(".")[0] for s in found] == ["e0-0", "e0-1"]
