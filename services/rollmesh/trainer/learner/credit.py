"""Units of credit: what has one return and one advantage of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollmesh.types import Trajectory


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
