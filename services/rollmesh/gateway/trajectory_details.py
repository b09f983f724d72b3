"""Single trajectories as responses of the REST API."""

from __future__ import annotations

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import ConfigError, DataError
from rollmesh.gateway.archive import Archived
from rollmesh.gateway.batch_rows import reward_of
from rollmesh.gateway.models.items import Outcome, TrajectoryDetail
from rollmesh.gateway.token_runs import Pieces, token_runs
from rollmesh.runtime.logging import get_logger
from rollmesh.text import Tokenizer
from rollmesh.types import RewardOutcome, Trajectory


def open_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Return the model's tokenizer; None if the model folder cannot be read: tokens are then shown as ids."""
    try:
        return Tokenizer(resolve_model(config.model.path))
    except (ConfigError, DataError) as error:
        get_logger("gateway").warning("tokens_without_text", message=str(error))
        return None


def trajectory_detail(
    trajectory: Trajectory, first_token: int, token_limit: int, pieces: Pieces | None
) -> TrajectoryDetail:
    """Return a trajectory with the runs of its tokens; blocks, because thousands of tokens are decoded."""
    runs, next_token = token_runs(trajectory, first_token, token_limit, pieces)
    return TrajectoryDetail(
        id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        members=[trajectory.trajectory_id],
        state="",
        found_in="queue",
        train_step=None,
        worker="",
        history=[],
        birth_version=trajectory.birth_version,
        policy_versions=list(trajectory.policy_versions),
        finish_reason=None if trajectory.finish_reason is None else trajectory.finish_reason.value,
        outcome=None if trajectory.outcome is None else _outcome(trajectory.outcome),
        shaped_reward=reward_of(trajectory),
        verifier=trajectory.prompt.verifier,
        prompt_metadata=dict(trajectory.prompt.metadata),
        prompt_tokens=len(trajectory.prompt.token_ids),
        response_tokens=trajectory.response_token_count,
        first_token=first_token,
        next_token=next_token,
        runs=runs,
        traceparent=trajectory.traceparent,
    )


def archived_detail(
    found: Archived, trajectory_id: str, trained_step: int, first_token: int, token_limit: int, pieces: Pieces | None
) -> TrajectoryDetail | None:
    """Return a member of an archived group, None for no such member; blocks like ``trajectory_detail``."""
    members = found.group.trajectories
    trajectory = next((each for each in members if each.trajectory_id == trajectory_id), None)
    if trajectory is None:
        return None
    return trajectory_detail(trajectory, first_token, token_limit, pieces).model_copy(
        update={
            "members": [each.trajectory_id for each in members],
            "member_rewards": tuple(reward_of(each) for each in members),
            "state": "consumed" if found.train_step <= trained_step else "cut",
            "found_in": "batch",
            "train_step": found.train_step,
        }
    )


def _outcome(outcome: RewardOutcome) -> Outcome:
    return Outcome(kind=outcome.kind.value, value=outcome.value, parts=dict(outcome.parts), message=outcome.message)
