"""Rules between which a schedule chooses."""

from enum import StrEnum


class AdmissionRule(StrEnum):
    """Limit on open groups, within the window."""

    WAVE = "wave"
    """``wave_batches`` batches of groups at a time, and ``spare_groups`` more: the next wave opens after the last batch
    of the wave is cut (and, at staleness 0, trained)."""
    POOL = "pool"
    """Enough groups for a full pool, with at most the pool and one batch of work ahead of the trainer (CoPRIS)."""
    CONCURRENCY = "concurrency"
    """At most as many open groups as fill the pool, no backlog (AReaL)."""


class Harvest(StrEnum):
    """Unit in which answers enter a batch."""

    GROUP = "group"
    TRAJECTORY = "trajectory"
    """Every trajectory is a group of one: answers to one prompt need not be in the same batch (SortedRL)."""


class CutOrder(StrEnum):
    """Order in which ready groups enter a batch, after those that later batches could no longer train."""

    ADMISSION = "admission"
    SHORTEST = "shortest"
    """The fewest tokens first: batches of similar lengths (SortedRL)."""
    OLDEST = "oldest"
    """The oldest weights first (ROLL)."""


class StartOrder(StrEnum):
    """Order in which groups start, within blocks of as many groups as a batch has."""

    ADMISSION = "admission"
    LONGEST_EXPECTED = "longest_expected"
    """The longest expected length first, as long as the prompt history predicts lengths (StreamRL)."""


class OnStale(StrEnum):
    """Treatment of a group that the next train step would push over the staleness bound."""

    PACE = "pace"
    """The group blocks the cut until it finishes or is evicted after the straggler time-out."""
    MASK_OLD_SEGMENTS = "mask_old_segments"
    """Its old tokens leave the loss; the group neither blocks the cut nor is dropped."""
    EVICT = "evict"
    """The group is dropped once it exceeds the bound. This biases the lengths, so it is opt-in."""
    RESTART = "restart"
    """The group loses its tokens and begins again in its wave (SortedRL, arXiv 2603.23414)."""
    SET_ASIDE = "set_aside"
    """The group loses its tokens and waits until a whole batch of such groups has collected (RollPacker)."""
