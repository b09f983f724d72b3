"""Columns of a batch beside its tokens: units of credit, which have one return and one advantage, and teachers."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollmesh.errors import DataError
from rollmesh.trainer.learner.token_scores import TopTokens
from rollmesh.types import BoolArray, Float32Array, Float64Array, Int32Array, Int64Array, TeacherColumn, Trajectory


def units_of(
    trajectories: Sequence[Trajectory],
    credit: str,
    sequence_index: npt.NDArray[np.int64],
    written: npt.NDArray[np.bool_],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the unit of each token, [tokens], and the return of each unit, [units] (docs/methods.md: Credit).

    ``sequence_index`` and ``written``, which tells whether a policy wrote it, are [tokens]. A unit is numbered by the
    place of its first token.
    """
    if credit == "turn":
        return _turns(trajectories, sequence_index, written)
    rewards = np.array([t.shaped_reward for t in trajectories], np.float64)
    if credit == "trajectory":
        return sequence_index, rewards
    numbers = dict[str, int]()
    names = [(t.outcome.shared_by if t.outcome else "") or t.trajectory_id for t in trajectories]
    unit = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
    return unit[sequence_index], np.bincount(unit, rewards) / np.bincount(unit)


def _turns(
    trajectories: Sequence[Trajectory], sequence_index: npt.NDArray[np.int64], written: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    index, returns = np.empty_like(sequence_index), list[float]()
    edges = np.searchsorted(sequence_index, np.arange(len(trajectories) + 1))
    for number, trajectory in enumerate(trajectories):
        span = slice(edges[number], edges[number + 1])
        total = np.cumsum(written[span])
        before: npt.NDArray[np.int64] = total - written[span]
        ends, values = _with_tokens(trajectory, int(total[-1]))
        turn = np.searchsorted(ends, before, side="right").clip(max=len(ends) - 1)
        index[span] = len(returns) + turn
        returns += values
    return index, np.array(returns, np.float64)


def _with_tokens(trajectory: Trajectory, count: int) -> tuple[list[int], list[float]]:
    """Return the ends and returns of the turns that have one of the ``count`` tokens; without any, of the whole."""
    ends, values = list[int](), list[float]()
    outcome = trajectory.outcome
    assert outcome is not None
    for turn in outcome.turns:
        if (end := min(turn.end, count)) > (ends[-1] if ends else 0):
            # What shaping added to the reward of the trajectory is a reward of its end.
            ends.append(end)
            values.append(turn.value + trajectory.shaped_reward - outcome.value)
    return (ends, values) if ends else ([0], [trajectory.shaped_reward])


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """Log-probabilities of the teachers for the tokens of a batch; 0 for prompts."""

    logprobs: Float32Array  # [tokens]
    advantages: Float64Array  # [tokens], of the reverse KL; 0 where no policy wrote
    top_ids: Int32Array | None  # [tokens, top_k]; None unless all columns have the same top_k
    top_logprobs: Float32Array | None  # [tokens, top_k]

    def choose(self, inside: BoolArray) -> "TeacherScores":
        """Return the scores of the tokens where ``inside`` [tokens] is True."""
        columns = {each.name: getattr(self, each.name) for each in fields(self)}
        chosen: dict[str, Any] = {name: None if value is None else value[inside] for name, value in columns.items()}
        return TeacherScores(**chosen)

    def top_of(self, token_index: Int64Array, device: torch.device) -> TopTokens:
        """Return the top tokens of these tokens on a device."""
        assert self.top_ids is not None and self.top_logprobs is not None
        ids, logprobs = (torch.from_numpy(each[token_index]).to(device) for each in (self.top_ids, self.top_logprobs))
        return TopTokens(ids=ids.long(), logprobs=logprobs)


def teacher_scores(trajectories: Sequence[Trajectory]) -> TeacherScores:
    """Join the columns of these trajectories. Raises DataError for one without a sound column."""
    columns = [_sound(t) for t in trajectories]
    sizes = {None if column.top_ids is None else column.top_ids.shape[1] for column in columns}
    top = len(sizes) == 1 and None not in sizes

    def join(name: str) -> npt.NDArray[Any]:
        found = [
            getattr(column, name)[: t.response_token_count] for t, column in zip(trajectories, columns, strict=True)
        ]
        lengths = (len(t.prompt.token_ids) for t in trajectories)
        pieces = ((np.zeros((n, *each.shape[1:]), each.dtype), each) for n, each in zip(lengths, found, strict=True))
        return np.concatenate([piece for both in pieces for piece in both])

    logprobs = join("logprobs")
    return TeacherScores(
        logprobs=logprobs,
        advantages=np.zeros(len(logprobs)),
        top_ids=join("top_ids") if top else None,
        top_logprobs=join("top_logprobs") if top else None,
    )


def _sound(trajectory: Trajectory) -> TeacherColumn:
    column, count = trajectory.teacher, trajectory.response_token_count
    where = f"trajectory {trajectory.trajectory_id}"
    if column is None:
        domain = trajectory.prompt.domain
        raise DataError(
            f"{where}: no teacher has scored it; its prompt has {f'the domain {domain}' if domain else 'no domain'}: "
            "name it in the domains of a teacher, or leave out the domains of one (teachers.*.domains)"
        )
    for values in (column.logprobs, *(() if column.top_logprobs is None else (column.top_logprobs,))):
        # A group shaper cuts tokens off after the teacher has scored them.
        scored = count if trajectory.cut_token_count and len(values) > count else len(values)
        if scored != count or not np.isfinite(values).all():
            raise DataError(
                f"{where}: teacher {column.teacher} has no finite log-probability for each of {count} tokens"
            )
    return column
