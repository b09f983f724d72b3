"""Tokens of a leased trajectory: sampled ones, and those that the queue stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from rollmesh.segments import join_segments, slice_segment
from rollmesh.store.payload import TokenDigest
from rollmesh.store.queue_types import HeldTokens
from rollmesh.types import Int32Array, Segment, SegmentSource, Trajectory


class ResponseTokens:
    """Prompt and response of one trajectory, with the part that is saved; a restart drops the response."""

    def __init__(self, trajectory: Trajectory, snapshot: bytes | None, incarnation: int) -> None:
        self.trajectory: Final = trajectory
        """State at the lease: prompt, saved segments, trace."""
        self._segments: list[Segment] = list(trajectory.segments)
        self._token_count = trajectory.response_token_count
        self._saved_token_count = self._token_count
        self._newest_version = max(trajectory.policy_versions, default=-1)
        self._digest = TokenDigest()
        """Digest of the prefix requested last; the next request usually extends it by a few tokens."""
        self._incarnation = incarnation
        self._snapshot = snapshot
        self._first_token_reported = False

    @property
    def trajectory_id(self) -> str:
        """Identity of the trajectory."""
        return self.trajectory.trajectory_id

    @property
    def prompt_token_count(self) -> int:
        """Length of the prompt."""
        return len(self.trajectory.prompt.token_ids)

    @property
    def segments(self) -> Sequence[Segment]:
        """All tokens after the prompt."""
        return self._segments

    @property
    def token_count(self) -> int:
        """Number of tokens after the prompt."""
        return self._token_count

    @property
    def saved_token_count(self) -> int:
        """Number of tokens that the queue stores."""
        return self._saved_token_count

    @property
    def newest_version(self) -> int:
        """Newest policy version that sampled a token; -1 without one."""
        return self._newest_version

    def count_under(self, policy_version: int) -> int:
        """Return the number of tokens that a policy version sampled."""
        own = (s for s in self._segments if s.source is SegmentSource.POLICY and s.policy_version == policy_version)
        return sum(len(segment) for segment in own)

    @property
    def unreported_version(self) -> int | None:
        """Policy version of the first token while the queue does not know it; None otherwise."""
        if self._saved_token_count or self._first_token_reported:
            return None
        return next((s.policy_version for s in self._segments if s.source is SegmentSource.POLICY), None)

    @property
    def incarnation(self) -> int:
        """Number of restarts; every write carries it."""
        return self._incarnation

    @property
    def snapshot(self) -> bytes | None:
        """Newest saved state of the environment, taken after a completed turn."""
        return self._snapshot

    def context_ids(self) -> Int32Array:
        """Return the prompt and all later tokens, int32 [prompt_tokens + token_count]."""
        parts = [self.trajectory.prompt.token_ids, *(s.token_ids for s in self._segments)]
        return np.concatenate(parts).astype(np.int32, copy=False)

    def add(self, segment: Segment) -> None:
        """Append tokens."""
        if len(segment) == 0:
            return
        self._segments.append(segment)
        self._token_count += len(segment)
        if segment.source is SegmentSource.POLICY:
            self._newest_version = max(self._newest_version, segment.policy_version)

    def trim(self, token_count: int) -> None:
        """Drop the tokens after the first ``token_count``, but no saved ones."""
        kept = max(token_count, self._saved_token_count)
        self._digest = TokenDigest()
        while self._token_count > kept:
            last = self._segments.pop()
            self._token_count -= len(last)
            if self._token_count < kept:
                self._segments.append(slice_segment(last, 0, kept - self._token_count))
                self._token_count = kept
        written = [s.policy_version for s in self._segments if s.source is SegmentSource.POLICY]
        self._newest_version = max(written, default=-1)

    def restart(self, incarnation: int | None = None) -> None:
        """Drop every token; the queue must have none either. ``incarnation`` is the queue's new number of restarts."""
        self._segments.clear()
        self._token_count = self._saved_token_count = 0
        self._first_token_reported = False
        self._digest = TokenDigest()
        self._newest_version = -1
        self._snapshot = None
        if incarnation is not None:
            self._incarnation = incarnation

    def mark_saved(self, token_count: int) -> None:
        """Note the number of tokens that the queue stores."""
        self._saved_token_count = token_count

    def mark_registered(self, saved_token_count: int) -> None:
        """Note a registration with a server that may have been restored to a state before the last writes."""
        self.mark_saved(min(saved_token_count, self._token_count))
        self._first_token_reported = False

    def mark_first_token_reported(self) -> None:
        """Note that the queue stores the policy version of a first token that is not saved yet."""
        self._first_token_reported = True

    def keep_snapshot(self, snapshot: bytes) -> None:
        """Replace the state of the environment."""
        self._snapshot = snapshot

    def unsaved(self) -> list[Segment]:
        """Return the segments after the saved tokens; the first one is sliced if it is partly saved."""
        return list(join_segments(self._between(self._saved_token_count, self._token_count)))

    def digest_at(self, token_count: int) -> TokenDigest:
        """Return the digest of the first ``token_count`` tokens."""
        if token_count < self._digest.token_count:
            self._digest = TokenDigest()
        self._digest = self._digest.extended(self._between(self._digest.token_count, token_count))
        return self._digest

    def held_tokens(self) -> HeldTokens:
        """Return the state that the worker sends when it registers its trajectories again."""
        return HeldTokens(
            trajectory_id=self.trajectory_id,
            incarnation=self._incarnation,
            token_count=lambda: self._token_count,
            digest_at=self.digest_at,
        )

    def _between(self, first: int, last: int) -> Iterator[Segment]:
        """Yield the segments of the tokens from ``first`` up to ``last``, sliced at both ends."""
        start = 0
        for segment in self._segments:
            end = start + len(segment)
            if end > first and start < last:
                yield slice_segment(segment, max(0, first - start), last - start)
            start = end
