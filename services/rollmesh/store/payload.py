"""Trajectory payload at rest: protobuf encoding and decoding, inline up to 64 KB, checksums, and a cache of prompts."""

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.errors import DataError
from rollmesh.runtime.spans import traceparent_of
from rollmesh.segments import keep_scores, keep_tokens
from rollmesh.types import FinishReason, Prompt, Segment, SegmentSource, Trajectory
from rollmesh.v1 import trajectory_pb2 as pb
from rollmesh.wire.codec import (
    outcome_from_pb,
    prompt_from_pb,
    prompt_to_pb,
    segment_from_pb,
    segment_to_pb,
    teacher_from_pb,
)

INLINE_LIMIT_BYTES = 64 * 1024
"""Size limit in a list element; larger segments and prompts are uploaded under a key first and linked by the script."""
UPLOAD_SECONDS = 600
"""Expiry of an upload that no script has linked."""
LINK_MARK = b"@"
"""First byte of a list element that names a chunk key; no protobuf Segment starts with it, a tag of field 8."""

_CACHED_PROMPTS = 512
_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedChunk:
    """Encoded segments of one write."""

    token_count: int
    versions: str
    """Policy versions whose tokens are in the loss, comma-separated."""
    byte_count: int
    elements: tuple[bytes, ...]
    """List elements: segment bytes, or a link to an uploaded segment."""
    uploads: tuple[tuple[str, bytes], ...]
    """Chunk names and bytes that must be uploaded before the script runs."""


def encode_segments(segments: Sequence[Segment]) -> SavedChunk:
    """Encode the segments of one append or finish; raises DataError, which names the invalid segment."""
    elements, uploads, byte_count = [], [], 0
    versions: set[int] = set()
    for segment in segments:
        if not len(segment):
            continue
        if segment.source is SegmentSource.POLICY:
            if segment.behavior_logprobs is None or len(segment.behavior_logprobs) != len(segment):
                raise DataError(f"segment of version {segment.policy_version}: pass one behavior_logprob per token")
            versions.add(segment.policy_version)
        data = segment_to_pb(segment).SerializeToString(deterministic=True)
        byte_count += len(data)
        if len(data) <= INLINE_LIMIT_BYTES:
            elements.append(data)
        else:
            # CRC-32 of both halves: it tells a retry from another write, and protects against accidents only.
            view, middle = memoryview(data), len(data) // 2
            name = f"{zlib.crc32(view[:middle]):08x}{zlib.crc32(view[middle:]):08x}"
            uploads.append((name, data))
            elements.append(LINK_MARK + name.encode())
    return SavedChunk(
        token_count=sum(len(s) for s in segments),
        versions=",".join(map(str, sorted(versions))),
        byte_count=byte_count,
        elements=tuple(elements),
        uploads=tuple(uploads),
    )


def decode_segments(elements: Sequence[bytes], chunks: Mapping[bytes, bytes]) -> tuple[Segment, ...]:
    """Decode list elements into segments; ``chunks`` has the bytes of linked segments by element."""
    return tuple(segment_from_pb(pb.Segment.FromString(chunks.get(element, element))) for element in elements)


def encode_prompt(prompt: Prompt) -> bytes:
    """Encode a prompt for the queue; raises DataError for an empty prompt."""
    if not len(prompt.token_ids):
        raise DataError(f"prompt {prompt.prompt_id!r} is empty")
    return prompt_to_pb(prompt).SerializeToString(deterministic=True)


def decode_prompt(data: bytes) -> Prompt:
    """Decode a prompt of the queue."""
    return prompt_from_pb(pb.Prompt.FromString(data))


class PromptCache:
    """The most recently added prompts of this client, by group id.

    The prompt of a group never changes, but a sampler may choose another one for a group that Redis has lost and the
    leader admits again. The record of the prompt history that the group adds to tells them apart.
    """

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, tuple[str, Prompt]] = OrderedDict()

    def get(self, group_id: str, record_name: str) -> Prompt | None:
        """Return the prompt of a group; None when it is not cached. ``record_name`` is empty without a history."""
        name, prompt = self._prompts.get(group_id, ("", None))
        return prompt if name == record_name else None

    def put(self, group_id: str, record_name: str, prompt: Prompt) -> None:
        """Cache the prompt of a group; the oldest entry is removed when the cache is full."""
        self._prompts[group_id] = (record_name, prompt)
        if len(self._prompts) > _CACHED_PROMPTS:
            self._prompts.popitem(last=False)


def group_of(trajectory_id: str) -> str:
    """Return the group id of a trajectory id ``<group_id>.<member>``."""
    return trajectory_id.rpartition(".")[0]


def build_trajectory(
    trajectory_id: str,
    prompt: Prompt,
    segments: tuple[Segment, ...] = (),
    *,
    birth_version: int = 0,
    finish: bytes | None = None,
    outcome: bytes | None = None,
    reward: bytes | None = None,
    run: str = "",
    kept: bytes | None = None,
    teacher: bytes | None = None,
) -> Trajectory:
    """Build a trajectory from its record in the queue; its trace context is derived from ``run``.

    A group shaper may have kept only its first tokens: then it ends there, as if they were its budget.
    """
    group_id, _, member = trajectory_id.rpartition(".")
    cut = 0
    column = teacher_from_pb(pb.TeacherColumn.FromString(teacher)) if teacher else None
    if kept:
        column = keep_scores(column, int(kept)) if column else None
        segments, cut = keep_tokens(segments, int(kept))
        finish = FinishReason.LENGTH.value.encode()
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=group_id,
        member_index=int(member),
        prompt=prompt,
        segments=segments,
        finish_reason=FinishReason(finish.decode()) if finish else None,
        outcome=outcome_from_pb(pb.RewardOutcome.FromString(outcome)) if outcome else None,
        shaped_reward=float(reward) if reward else 0.0,
        birth_version=birth_version,
        traceparent=traceparent_of(run, trajectory_id) if run else "",
        cut_token_count=cut,
        teacher=column,
    )


@dataclass(frozen=True, slots=True)
class TokenDigest:
    """Digest of the first ``token_count`` tokens, their versions and logprobs; independent of the segment boundaries.

    CRC-32 of the (id, version) pairs and of the logprobs. It protects against accidents, not against attacks.
    """

    token_count: int = 0
    ids: int = 0
    logprobs: int = 0

    def extended(self, segments: Iterable[Segment]) -> "TokenDigest":
        """Return the digest of these tokens followed by the tokens of ``segments``."""
        token_count, ids, logprobs = self.token_count, self.ids, self.logprobs
        for segment in segments:
            token_count += len(segment)
            pairs = np.empty((len(segment), 2), _INT32)
            pairs[:, 0], pairs[:, 1] = segment.token_ids, segment.policy_version
            ids = zlib.crc32(pairs.tobytes(), ids)
            values = segment.behavior_logprobs
            if values is None:
                logprobs = zlib.crc32(b"\xff" * (_FLOAT32.itemsize * len(segment)), logprobs)
            else:
                logprobs = zlib.crc32(np.ascontiguousarray(values, _FLOAT32).tobytes(), logprobs)
        return TokenDigest(token_count, ids, logprobs)

    def __str__(self) -> str:
        return f"{self.ids:08x}{self.logprobs:08x}"


NO_TOKENS = TokenDigest()
