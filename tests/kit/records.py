"""Records of generators, and segments of given tokens."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from rollmesh.mesh import MeshView
from rollmesh.store import StoreCounts
from rollmesh.types import Chunk, GeneratorRecord, PolicyRecord, Segment, SegmentSource


def generator_record(name: str = "a", **fields: Any) -> GeneratorRecord:
    """An idle generator that serves version 0 with 8 slots, but for these fields."""
    values: dict[str, Any] = {
        "address": f"{name}:1",
        "policy_version": 0,
        "running_count": 0,
        "waiting_count": 0,
        "slot_count": 8,
        "kv_token_capacity": 1024,
        "serving": True,
    }
    return GeneratorRecord(instance_id=name, **values | fields)


def mesh_view(**fields: Any) -> MeshView:
    """The view of an idle mesh at policy 0 without groups, but for these fields."""
    values: dict[str, Any] = {
        **dict.fromkeys(("trained_step", "cut_step", "policy_version", "policy_train_step"), 0),
        **dict.fromkeys(("admitted_unconsumed", "open_groups", "ready_groups", "pending", "partial", "leased"), 0),
        **dict.fromkeys(("ready", "stalest_open", "ready_by_step"), ()),
        **dict.fromkeys(("recovering", "user_paused", "is_complete"), False),
        "now": 1000.0,
        "finished": 0,
        "memory_ratio": 0.0,
        "filtered_in_a_row": 0,
        "blocked_since": None,
        "registered_generators": 1,
    }
    return MeshView(**values | fields)


def policy_tokens(ids: Iterable[int], version: int = 0, **fields: Any) -> Segment:
    """Tokens of one policy version; the logprob of each is its negative number."""
    values = np.asarray(list(ids), np.int32)
    own = {"behavior_logprobs": -values.astype(np.float32), "kv_min_version": version}
    return Segment(token_ids=values, policy_version=version, **own | fields)


def environment_tokens(ids: Iterable[int], version: int = 0) -> Segment:
    """Tokens of the environment."""
    return policy_tokens(ids, version, behavior_logprobs=None, source=SegmentSource.ENVIRONMENT)


def segments_of(chunks: Iterable[Chunk]) -> list[Segment]:
    """The segments of what an engine streamed, one for each chunk with tokens."""
    return [
        policy_tokens(
            c.token_ids, c.policy_version, behavior_logprobs=c.behavior_logprobs, kv_min_version=c.kv_min_version
        )
        for c in chunks
        if len(c.token_ids)
    ]


def policy_record(version: int, train_step: int | None = None, path: str = "", digest: str = "ab" * 32) -> PolicyRecord:
    """A published policy of this step, which is its version unless another one is given."""
    step = version if train_step is None else train_step
    return PolicyRecord(policy_version=version, train_step=step, path=path or f"{step}-x", manifest_digest=digest)


def store_counts(**fields: Any) -> StoreCounts:
    """The counts of an idle queue, but for these fields."""
    numbers = ("scoring_queue", "sessions", "dead_letters", "used_memory_bytes", "max_memory_bytes")
    totals = ("trajectories", "groups", "totals", "drops", "dropped_tokens", "drop_deciles")
    return StoreCounts(**{**dict.fromkeys(numbers, 0), **{name: {} for name in totals}, **fields})
