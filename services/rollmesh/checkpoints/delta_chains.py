"""Chains of deltas in a bucket: the policies that a reader applies, and those that pruning must keep for others."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmesh.checkpoints.durable import confined, sync_file
from rollmesh.checkpoints.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, parse_manifest
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.checkpoints.reasons import Reason
from rollmesh.checkpoints.weight_delta import SUFFIX, apply_delta
from rollmesh.errors import CheckpointError
from rollmesh.types import PolicyRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A policy in a bucket that is read on the way to another one."""

    path: str
    """Path of its folder."""
    manifest: Manifest


def chain_of(
    record: PolicyRecord, manifest_of: Callable[[PolicyRecord], Manifest], cached: Callable[[PolicyRecord], Path | None]
) -> tuple[list[Link], Path | None]:
    """Return the policies that make one, oldest first, and the folder that the first delta is applied to.

    The chain begins at the newest version that is stored whole, without such a folder, or after the newest one that is
    ``cached``. Raises CheckpointError (tampered) for a delta to a version that is not older.
    """
    links = [Link(path=record.path, manifest=manifest_of(record))]
    while (delta := links[-1].manifest.delta) is not None:
        base, version = delta.base, links[-1].manifest.policy_version
        if base.policy_version >= version:
            raise CheckpointError(
                f"policy_version {version}: its delta is to policy_version {base.policy_version}, which is not older",
                reason=Reason.TAMPERED,
            )
        if (folder := cached(base.record)) is not None:
            return links[::-1], folder
        links.append(Link(path=base.path, manifest=manifest_of(base.record)))
    return links[::-1], None


def is_stored(objects: ObjectStore, record: PolicyRecord, manifest_of: Callable[[PolicyRecord], Manifest]) -> bool:
    """Tell whether a bucket has a policy, and those that it is a difference to, by the sizes of their files.

    Raises CheckpointError if the bucket is unreachable.
    """
    try:
        chain, _ = chain_of(record, manifest_of, lambda _: None)
    except CheckpointError as error:
        if error.passing:
            raise
        return False
    sizes = {key: size for link in chain for key, size in objects.sizes(link.path).items()}
    wanted = {f"{link.path}/{file.path}": file.size_bytes for link in chain for file in link.manifest.stored_files}
    return wanted.items() <= sizes.items()


def pull_chain(objects: ObjectStore, chain: Sequence[Link], base: Path | None, target: Path) -> None:
    """Write the newest policy of a chain into an empty folder; the caller compares it with its manifest.

    The disk holds two versions of a weight file at a time. Raises FileNotFoundError for an object or a file of ``base``
    that is missing, CheckpointError for a delta that cannot be applied.
    """
    first, newest = chain[0], chain[-1]
    own = [file.path for file in newest.manifest.stored_files if not file.path.endswith(SUFFIX)]
    pairs = [(f"{newest.path}/{name}", confined(target, name)) for name in (*own, MANIFEST_FILE)]
    if first is not newest and base is None:
        replaced = {file.path for file in newest.manifest.files} - set(own)
        pairs += [(f"{first.path}/{name}", confined(target, name)) for name in sorted(replaced)]
    objects.get_all(pairs)
    for link in chain:
        for file in link.manifest.delta.files if link.manifest.delta is not None else ():
            weights = confined(target, file.path.removesuffix(SUFFIX))
            delta, result = confined(target, file.path), weights.with_name(f"{weights.name}.new")
            objects.get(f"{link.path}/{file.path}", delta)
            source = weights if base is None or weights.exists() else confined(base, file.path.removesuffix(SUFFIX))
            apply_delta(source, delta, result)
            delta.unlink()
            os.replace(result, weights)
            if link is newest:
                sync_file(weights)


def without_bases(paths: Collection[str], removed: Sequence[str], base_of: Callable[[str], str | None]) -> list[str]:
    """Return ``removed`` without the policies that the others of ``paths`` are stored as differences to."""
    needed: set[str] = set()
    for path in set(paths) - set(removed):
        base = base_of(path)
        while base is not None and base not in needed:
            needed.add(base)
            base = base_of(base)
    return [path for path in removed if path not in needed]


class BasePaths:
    """Paths of the policies that others in a bucket are stored as differences to; every manifest is read once."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._known: dict[str, str | None] = {}

    def of(self, path: str) -> str | None:
        """Return the path of the base; None for full weights, and for a damaged policy or half of an upload.

        Raises CheckpointError if the bucket is unreachable.
        """
        if path not in self._known:
            key = f"{path}/{MANIFEST_FILE}"
            try:
                manifest = parse_manifest(self._objects.read(key, MAX_MANIFEST_BYTES + 1), key)
            except FileNotFoundError:
                return None
            except CheckpointError as error:
                if error.outside:
                    raise
                return None
            self._known[path] = manifest.delta.base.path if manifest.delta else None
        return self._known[path]
