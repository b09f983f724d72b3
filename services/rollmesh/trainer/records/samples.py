"""A few decoded completions of every batch, for users to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmesh.errors import DataError
from rollmesh.text import Tokenizer
from rollmesh.types import Batch, Int32Array, Trajectory

Decode = Callable[[Int32Array], str]


def decoder(folder: Path) -> Decode:
    """Return a function from token ids to text with the model's tokenizer; without one, to the ids as text."""
    if not (folder / "tokenizer.json").is_file():
        return lambda ids: " ".join(map(str, ids.tolist()))
    tokenizer = Tokenizer(folder)

    def decode(ids: Int32Array) -> str:
        try:
            return tokenizer.decode(ids, special_tokens=True)
        except DataError:
            return " ".join(map(str, ids.tolist()))

    return decode


def sample_completions(batch: Batch, count: int, decode: Decode) -> list[dict[str, Any]]:
    """Select ``count`` trajectories spread over the groups of the batch, with a different member in each step.

    At most one trajectory per group.
    """
    count = min(count, len(batch.groups))
    chosen: list[Trajectory] = []
    for i in range(count):
        members = batch.groups[i * len(batch.groups) // count].trajectories
        chosen.append(members[(batch.train_step + i) % len(members)])
    return [_sample(batch.train_step, t, decode) for t in chosen]


def _sample(train_step: int, trajectory: Trajectory, decode: Decode) -> dict[str, Any]:
    outcome = trajectory.outcome
    return {
        "train_step": train_step,
        "trajectory_id": trajectory.trajectory_id,
        "prompt": decode(trajectory.prompt.token_ids),
        "completion": decode(trajectory.response_ids),
        "token_count": trajectory.response_token_count,
        "finish_reason": None if trajectory.finish_reason is None else str(trajectory.finish_reason),
        "outcome": None if outcome is None else str(outcome.kind),
        "reward": None if outcome is None else outcome.verdict,
        "shaped_reward": trajectory.shaped_reward,
        "policy_versions": list(trajectory.policy_versions),
    }
