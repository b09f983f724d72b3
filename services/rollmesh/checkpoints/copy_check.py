"""Comparison of the objects of a bucket with their digests; a reader compares only the copy in its cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollmesh.checkpoints.objects import ObjectStore

MOST_BYTES = 64 << 30
"""Maximum number of bytes that one check reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPart:
    """A range of an object with its recorded digest."""

    key: str
    start: int = 0
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCopy:
    """The objects of one policy, trainer state or batch file."""

    name: str
    marker: str
    """Key that is written last and deleted first."""
    parts: tuple[ObjectPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCheck:
    """Result of a comparison."""

    compared: int
    compared_bytes: int
    skipped: tuple[str, ...]
    """Copies that were not read because of ``MOST_BYTES``."""
    damaged: Mapping[str, str]
    """Reason by name."""


def check_copies(objects: ObjectStore, copies: Iterable[StoredCopy]) -> CopyCheck:
    """Compare copies with their digests, in order, as far as ``MOST_BYTES`` allow; ignore those pruned meanwhile."""
    compared, total = 0, 0
    skipped: list[str] = []
    damaged: dict[str, str] = {}
    for copy in copies:
        size = sum(part.size_bytes for part in copy.parts)
        if total + size > MOST_BYTES:
            skipped.append(copy.name)
            continue
        found = objects.sha256_all([(part.key, part.start, part.start + part.size_bytes) for part in copy.parts])
        wrong = [part.key for part, digest in zip(copy.parts, found, strict=True) if digest != part.sha256]
        if wrong and not objects.sizes(copy.marker):
            continue
        compared, total = compared + 1, total + size
        if wrong:
            damaged[copy.name] = f"missing, or different from the recorded digest: {', '.join(wrong)}"
    return CopyCheck(compared=compared, compared_bytes=total, skipped=tuple(skipped), damaged=damaged)
