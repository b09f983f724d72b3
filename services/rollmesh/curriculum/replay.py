"""Replay: the groups of earlier batches that a train step trains on again.

The draw is a pure function of the run's seed, the train step and the earlier batches, so a trainer that is killed
before it has written the batch file draws the same groups again, and an audit can repeat the draw.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rollmesh.types import Batch, SegmentSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCandidate:
    """A fresh group of an earlier batch."""

    train_step: int
    """Batch of the group."""
    group_id: str
    oldest: int
    """Smallest train step among the policies that wrote its tokens."""
    reward: float
    """Mean shaped reward of its answers."""


def replay_candidates(batch: Batch, version_train_steps: Mapping[int, int]) -> list[ReplayCandidate]:
    """Return the groups of a batch that a later step may train on again, in training order.

    A group without a reward is left out, and so is one with tokens of a version that is not in ``version_train_steps``,
    because its staleness is unknown.
    """
    found = []
    for group in batch.groups:
        scored = [t for t in group.trajectories if t.outcome is not None]
        written = [s for t in scored for s in t.segments if s.source is SegmentSource.POLICY and len(s)]
        versions = {segment.policy_version for segment in written}
        if versions and versions <= version_train_steps.keys():
            oldest = min(version_train_steps[version] for version in versions)
            # Divided first: the sum of finite rewards may not be finite, and an audit reads what it finds.
            reward = math.fsum(t.shaped_reward / len(scored) for t in scored)
            found.append(
                ReplayCandidate(train_step=batch.train_step, group_id=group.group_id, oldest=oldest, reward=reward)
            )
    return found


def draw_replay(
    candidates: Iterable[ReplayCandidate],
    count: int,
    *,
    by: Literal["uniform", "reward"],
    seed: int,
    train_step: int,
    max_staleness: int,
) -> list[ReplayCandidate]:
    """Draw at most ``count`` groups without replacement, ordered by batch and group id.

    The weight of a group is 1, or ``exp(reward)``. A group whose oldest token would be staler than ``max_staleness`` at
    ``train_step`` is never drawn. Source of the draw: keys ``-log(u) / weight`` with one ``u`` per group, of which the
    smallest win (Efraimidis and Spirakis, 2006); ``u`` is a hash, so that it depends on no other group.
    """
    within = [c for c in candidates if train_step - 1 - c.oldest <= max_staleness]
    highest = max((c.reward for c in within), default=0.0)

    def key(candidate: ReplayCandidate) -> tuple[float, str]:
        # In logarithms: exp of a small reward may be 0.
        log_weight = candidate.reward - highest if by == "reward" else 0.0
        return math.log(-math.log(_uniform(seed, train_step, candidate.group_id))) - log_weight, candidate.group_id

    drawn = sorted(within, key=key)[:count]
    return sorted(drawn, key=lambda c: (c.train_step, c.group_id))


def _uniform(seed: int, train_step: int, group_id: str) -> float:
    """Return a number in (0, 1)."""
    digest = hashlib.blake2b(f"{seed}/{train_step}/{group_id}".encode(), digest_size=6).digest()
    return (int.from_bytes(digest) + 0.5) / 2**48
