"""Text form of the state of an automatic pool, one field of the desired state."""

from __future__ import annotations

from rollmesh.mesh import CachePool


def encode_cache_pool(pool: CachePool | None) -> str:
    """Encode the state; empty without one."""
    return "" if pool is None else f"{pool.size} {pool.since} {pool.preemptions}"


def decode_cache_pool(text: bytes) -> CachePool | None:
    """Decode the state; None for an empty text."""
    if not text:
        return None
    size, since, preemptions = text.split()
    return CachePool(size=int(size), since=float(since), preemptions=int(preemptions))
