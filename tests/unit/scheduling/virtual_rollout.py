"""One rollout of a virtual mesh."""

from __future__ import annotations

from dataclasses import dataclass

NEVER = 1 << 30
"""Length of a rollout that never ends: it saves its first token, then nothing more."""


@dataclass
class Rollout:
    """One trajectory as its worker and its generator know it."""

    length: int
    reward_ticks: int
    reward: float
    sampled: int = 0
    generator: int | None = None
    newest_version: int = 0
    in_segment: int = 0
    """Tokens under the newest version since the last rest."""
    floor: int = 0
    waits_for_reward: int = 0
