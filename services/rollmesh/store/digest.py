"""Running digest of a trajectory's tokens: tells whether two records of a trajectory begin with the same tokens."""

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
    """Digest of the first ``token_count`` tokens, their versions and logprobs, however they were cut into segments.

    CRC-32 of (id, version) pairs and of the logprobs: it guards against accidents, not attacks.
    """

    token_count: int = 0
    ids: int = 0
    logprobs: int = 0

    def extended(self, segments: Iterable[Segment]) -> TokenDigest:
        """Digest of these tokens and those of ``segments`` after them."""
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
