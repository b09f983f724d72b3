"""Chains of deltas in a bucket: what a reader applies, and what must outlive its own version."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rollmesh.checkpoints.durable import confined, sync_file
from rollmesh.checkpoints.manifest import BaseReference, Manifest, WeightDelta
from rollmesh.checkpoints.reasons import Reason
from rollmesh.checkpoints.weight_delta import SUFFIX, apply_delta
from rollmesh.errors import CheckpointError


def older_base(manifest: Manifest) -> BaseReference:
    """Return the base of a delta. Raises CheckpointError (tampered) unless it is an older version."""
    assert manifest.delta is not None, "the caller found a delta"
    base = manifest.delta.base
    if base.policy_version >= manifest.policy_version:
        raise CheckpointError(
            f"policy_version {manifest.policy_version}: its delta is to policy_version {base.policy_version}, which is "
            "not older",
            reason=Reason.TAMPERED,
        )
    return base


def apply_deltas(base: Path, folder: Path, delta: WeightDelta) -> None:
    """Replace the deltas in ``folder`` by the weights that they make of the verified folder ``base``.

    The result is compared with its manifest by the caller. Raises CheckpointError if the base has no such file, or a
    delta cannot be applied.
    """
    for file in delta.files:
        name = file.path.removesuffix(SUFFIX)
        source, target = confined(base, name), confined(folder, name)
        try:
            apply_delta(source, confined(folder, file.path), target)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{source}: missing, the delta {file.path} needs it", reason=Reason.MISSING
            ) from error
        sync_file(target)
        confined(folder, file.path).unlink()


def without_bases(paths: Collection[str], removed: Sequence[str], base_of: Callable[[str], str | None]) -> list[str]:
    """Return ``removed`` without the policies that the others of ``paths`` are stored as differences to."""
    needed: set[str] = set()
    for path in set(paths) - set(removed):
        base = base_of(path)
        while base is not None and base not in needed:
            needed.add(base)
            base = base_of(base)
    return [path for path in removed if path not in needed]
