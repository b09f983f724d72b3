"""An advantage of your own: GRPO, with answers cut off by their budget left out.

trainer:
  algorithm:
    advantage: own_advantage:whole_answers
    advantage_options: {least: 2}
"""

from torch import Tensor

from rollmesh.algorithms.advantages import TrajectoryColumns


def whole_answers(data: TrajectoryColumns, *, least: int = 2) -> Tensor:
    """Compare each finished answer with the others of its group; 0 where fewer than ``least`` finished."""
    finished = (~data.truncated).double()
    count = data.group_sum(finished)
    centred = finished * (data.rewards - data.group_sum(finished * data.rewards) / count.clamp(min=1))
    return centred * (count >= least)
