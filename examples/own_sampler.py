"""A sampler of your own: the shortest prompts first, longer ones as the training goes on.

curriculum:
  sampler: own_sampler:short_first
  sampler_options: {steps: 200}
"""

import numpy as np

from rollmesh.curriculum.prompt_tables import Draw, History, PromptTable


def short_first(draw: Draw, prompts: PromptTable, history: History, train_step: int, *, steps: int = 200) -> int:
    """Draw one of the least used prompts among those with short answers; all count after ``steps`` train steps."""
    tokens = history.token_sums / np.maximum(history.members, 1)
    open_rows = max(1, round(prompts.row_count * min(1.0, 0.1 + train_step / steps)))
    rows = np.argsort(tokens, kind="stable")[:open_rows]
    used = history.groups[rows] + history.in_progress[rows]
    least = rows[used == used.min()]
    return int(least[int(draw.uniform("row") * len(least))])
