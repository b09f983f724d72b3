"""Choice and encoding of the weights that a trainer uploads as deltas to its version before.

version     0     1     2     3     4     5        anchor_every = 4
uploaded   full  delta delta delta full  delta     a reader needs the newest full version and the deltas after it
"""

from __future__ import annotations

from pathlib import Path

from rollmesh.checkpoints.durable import confined, make_folder, regular_files, remove_tree
from rollmesh.checkpoints.manifest import BaseReference, Manifest, ManifestFile, WeightDelta
from rollmesh.checkpoints.policies import PolicyDraft
from rollmesh.checkpoints.weight_delta import SUFFIX, write_delta
from rollmesh.types import PolicyRecord

FOLDER = ".deltas"
LARGEST_SHARE = 0.5
"""Share of the weights above which a delta is not worth its chain; the version is uploaded in full."""
_WEIGHTS = ".safetensors"


class DeltaUploads:
    """Deltas of one trainer process below ``root``, the cache of its node."""

    def __init__(self, root: Path, anchor_every: int) -> None:
        self._root = root
        self._anchor_every = anchor_every
        self._newest: tuple[PolicyRecord, Manifest] | None = None
        """Newest version that this process uploaded: the base of the next one."""

    def encode(self, draft: PolicyDraft, folder: Path) -> WeightDelta | None:
        """Write the deltas of a new folder's weights; return None if the version is to be uploaded in full."""
        remove_tree(self._root / FOLDER)
        if self._newest is None or draft.base is not None or draft.policy_version % self._anchor_every == 0:
            return None
        record, manifest = self._newest
        before = {file.path: file for file in manifest.files}
        files: list[ManifestFile] = []
        weights = [name for name in regular_files(folder) if name.endswith(_WEIGHTS)]
        for name in weights:
            file = self._encoded(confined(self._root, record.path), before.get(name), folder / name)
            if file is None:
                return None
            files.append(file)
        if sum(f.size_bytes for f in files) > LARGEST_SHARE * sum(before[name].size_bytes for name in weights):
            return None
        return WeightDelta(base=BaseReference.of(record), files=files)

    def _encoded(self, base: Path, before: ManifestFile | None, new: Path) -> ManifestFile | None:
        """Write one delta; return None if the base has no such file, is evicted, or is damaged here."""
        if before is None or _size(base / before.path) != new.stat().st_size:
            return None
        name = f"{before.path}{SUFFIX}"
        target = confined(self._root / FOLDER, name)
        make_folder(target.parent)
        try:
            written = write_delta(base / before.path, new, target)
        except FileNotFoundError:  # the base was evicted meanwhile
            return None
        if written.base_sha256 != before.sha256:
            return None
        return ManifestFile(path=name, size_bytes=target.stat().st_size, sha256=written.sha256)

    def sources(self, folder: Path, manifest: Manifest) -> list[tuple[Path, str]]:
        """Return the files that the bucket gets of a policy folder, with their names there."""
        deltas = {file.path for file in (manifest.delta.files if manifest.delta else [])}
        names = [file.path for file in manifest.stored_files]
        return [(confined(self._root / FOLDER if name in deltas else folder, name), name) for name in names]

    def uploaded(self, record: PolicyRecord, manifest: Manifest) -> None:
        """Note that the bucket has this version, and delete its deltas here."""
        self._newest = record, manifest
        remove_tree(self._root / FOLDER)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return -1
