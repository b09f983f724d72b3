"""Bytes of the policy versions, from the manifests that are left in the run's checkpoint folder."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from rollmesh.checkpoints.manifest import Manifest, parse_manifest
from rollmesh.checkpoints.policies import found_manifests
from rollmesh.errors import CheckpointError
from rollmesh.report.formats import count
from rollmesh.report.recorded_run import RecordedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionBytes:
    """Text on the bytes of each version, for the report."""

    known: dict[int, str]
    older: str
    """Reason why an older version has no manifest there; a version after the newest one was not published."""

    def __getitem__(self, policy_version: int) -> str:
        return self.known.get(policy_version, self.older if policy_version < max(self.known, default=0) else "")


def version_bytes(run: RecordedRun) -> VersionBytes:
    """Read the manifests below the run's checkpoint folder, with an object store those in this node's cache.

    Signatures are not checked, and nothing is fetched. Of two folders with the same version the announced one counts,
    then the newer one.
    """
    remote = run.checkpoint_section.remote
    found = []
    for entry in found_manifests(_folder(run)):
        with contextlib.suppress(CheckpointError):  # unreadable: the audit reports it
            found.append((entry.announced, parse_manifest(entry.data or b"", entry.path)))
    found.sort(key=lambda pair: (pair[0], pair[1].create_time))
    return VersionBytes(
        known={manifest.policy_version: _text(manifest) for _, manifest in found},
        older="not in this cache" if remote else "not kept or unreadable",
    )


def _folder(run: RecordedRun) -> Path:
    if not run.checkpoint_section.remote:
        return run.checkpoints
    cache = run.checkpoint_section.cache_folder
    return Path(cache) if cache else run.path / "checkpoints"


def _text(manifest: Manifest) -> str:
    written = count(sum(file.size_bytes for file in manifest.files))
    if manifest.delta is not None:
        return f"{written} ({count(sum(file.size_bytes for file in manifest.stored_files))} uploaded, as a delta)"
    return f"{written} (adapter)" if manifest.kind == "adapter" else f"{written}"
