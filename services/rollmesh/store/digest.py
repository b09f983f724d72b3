"""Running digest of a trajectory's tokens, to compare the first tokens of two records of it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rollmesh.types import Segment

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class TokenDigest:
    """Digest of the first ``token_count`` tokens, their versions and logprobs; independent of the segment boundaries.

    CRC-32 of the (id, version) pairs and of the logprobs. It protects against accidents, not against attacks.
    """

    token_count: int = 0
    ids: int = 0
    logprobs: int = 0

    def extended(self, segments: Iterable[Segment]) -> TokenDigest:
        """Return the digest of these tokens followed by the tokens of ``segments``."""
        token_count, ids, logprobs = self.token_count, self.ids, self.logprobs
        for segment in segments:
            token_count += len(segment)
            ids = zlib.crc32(_id_bytes(segment), ids)
            logprobs = zlib.crc32(_logprob_bytes(segment), logprobs)
        return TokenDigest(token_count, ids, logprobs)

    def __str__(self) -> str:
        return f"{self.ids:08x}{self.logprobs:08x}"


NO_TOKENS = TokenDigest()


def _id_bytes(segment: Segment) -> bytes:
    pairs = np.empty((len(segment), 2), _INT32)
    pairs[:, 0], pairs[:, 1] = segment.token_ids, segment.policy_version
    return pairs.tobytes()


def _logprob_bytes(segment: Segment) -> bytes:
    if segment.behavior_logprobs is None:
        return b"\xff" * (_FLOAT32.itemsize * len(segment))
    return np.ascontiguousarray(segment.behavior_logprobs, _FLOAT32).tobytes()
