"""The teachers' columns of a batch, flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from rollmesh.errors import DataError
from rollmesh.types import BoolArray, Float32Array, Float64Array, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """Log-probabilities of the teachers for the tokens of a batch; 0 for prompts."""

    logprobs: Float32Array  # [tokens]
    advantages: Float64Array  # [tokens], of the reverse KL; 0 where no policy wrote

    def choose(self, inside: BoolArray) -> TeacherScores:
        """Return the scores of the tokens where ``inside`` [tokens] is True."""
        return TeacherScores(**{each.name: getattr(self, each.name)[inside] for each in fields(self)})


def teacher_scores(trajectories: Sequence[Trajectory]) -> TeacherScores:
    """Join the columns of these trajectories. Raises DataError for one without a sound column."""
    logprobs = np.concatenate([_over_tokens(t) for t in trajectories])
    return TeacherScores(logprobs=logprobs, advantages=np.zeros(len(logprobs)))


def _over_tokens(trajectory: Trajectory) -> npt.NDArray[np.float32]:
    column, count = trajectory.teacher, trajectory.response_token_count
    where = f"trajectory {trajectory.trajectory_id}"
    if column is None:
        domain = trajectory.prompt.domain
        raise DataError(
            f"{where}: no teacher has scored it; its prompt has {f'the domain {domain}' if domain else 'no domain'}: "
            "name it in the domains of a teacher, or leave out the domains of one (teachers.*.domains)"
        )
    # A group shaper cuts tokens off after the teacher has scored them.
    logprobs = column.logprobs[:count] if trajectory.cut_token_count else column.logprobs
    if len(logprobs) != count or not np.isfinite(logprobs).all():
        raise DataError(f"{where}: teacher {column.teacher} has no finite log-probability for each of {count} tokens")
    return np.concatenate([np.zeros(len(trajectory.prompt.token_ids), np.float32), logprobs])
