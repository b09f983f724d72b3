"""Reward shaping on plain numbers, usable by a rollout worker without torch."""

from __future__ import annotations


def overlong_penalty(token_count: int, budget: int, buffer: int) -> float:
    """Return the soft penalty on answers close to their token budget, in [-1, 0]; it is added to the reward.

    With budget L and buffer b: 0 up to L - b tokens, then linear ``((L - b) - token_count) / b``, -1 from L on.
    ``buffer`` 0 disables it. Source: the soft overlong punishment of DAPO (arXiv 2503.14476).

    >>> overlong_penalty(15360, 16384, 2048)
    -0.5
    """
    if budget < 1 or buffer < 0 or buffer > budget:
        raise ValueError(f"overlong_penalty: need 0 <= buffer <= budget and budget >= 1, got {buffer=}, {budget=}")
    if buffer == 0:
        return 0.0
    excess = token_count - (budget - buffer)
    return -min(max(excess / buffer, 0.0), 1.0)
