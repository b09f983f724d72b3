"""Manifests found in a store: the policies that a registry can be restored from, and the unsound ones."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from rollmesh.checkpoints.manifest import MANIFEST_FILE, Manifest, parse_manifest
from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError
from rollmesh.types import PolicyRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundManifest:
    """A manifest in a store, sound or unsound."""

    path: str
    """Path of its folder, relative to the store."""
    data: bytes | None
    """Content of the file; None if an announced folder has no readable manifest."""
    announced: bool

    def manifest(self, secret: bytes) -> Manifest:
        """Parse the manifest. Raises CheckpointError unless it is complete and sealed with this secret."""
        if self.data is None:
            raise CheckpointError(f"{self.path}/{MANIFEST_FILE}: missing or unreadable", reason=Reason.TORN)
        manifest = parse_manifest(self.data, self.path)
        manifest.check_signature(secret)
        return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsoundPolicy:
    """A published folder without a sound policy."""

    path: str
    """Path of the folder, relative to the store."""
    train_step: int
    """Train step in the folder name."""
    policy_version: int | None
    """Version in the manifest; None if it is unreadable."""
    announced: bool
    """True if the registry accepted the policy."""
    reason: str


def sound_records(
    manifests: Iterable[FoundManifest], secret: bytes, *, announced_only: bool = False
) -> list[PolicyRecord]:
    """Return records of all complete folders, one per policy_version, ascending, to restore a registry.

    Of two folders with the same version, the announced folder is preferred, then the newer one. Folders without a valid
    manifest are not policies and are skipped. ``announced_only`` also skips folders without the marker.
    """
    best: dict[int, tuple[bool, datetime, PolicyRecord]] = {}
    for found in manifests:
        try:
            manifest = found.manifest(secret)
        except CheckpointError:
            continue
        record = PolicyRecord(
            policy_version=manifest.policy_version,
            train_step=manifest.train_step,
            path=found.path,
            manifest_digest=hashlib.sha256(found.data or b"").hexdigest(),
        )
        entry = (found.announced, manifest.create_time, record)
        known = best.get(manifest.policy_version)
        if (entry[0] or not announced_only) and (known is None or entry[:2] > known[:2]):
            best[manifest.policy_version] = entry
    return [best[version][2] for version in sorted(best)]


def unsound_policies(manifests: Iterable[FoundManifest], secret: bytes) -> list[UnsoundPolicy]:
    """Return the manifests that ``sound_records`` skips, with the reason."""
    unsound: list[UnsoundPolicy] = []
    for found in manifests:
        try:
            found.manifest(secret)
        except CheckpointError as error:
            claimed = None
            with contextlib.suppress(CheckpointError):
                claimed = parse_manifest(found.data or b"", found.path).policy_version
            step = int(found.path.rpartition("/")[2].partition("-")[0])
            unsound.append(
                UnsoundPolicy(
                    path=found.path,
                    train_step=step,
                    policy_version=claimed,
                    announced=found.announced,
                    reason=str(error),
                )
            )
    return unsound
