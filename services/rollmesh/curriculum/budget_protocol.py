"""Protocol of budgets: the length of a trajectory as a function of the training."""

from __future__ import annotations

from collections.abc import Callable

Budget = Callable[[int], int]
"""Budget in tokens, or in turns, of a trajectory that is born under the policy of a train step."""
