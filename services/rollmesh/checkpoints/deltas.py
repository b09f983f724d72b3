"""Deltas: weights in a bucket as their difference to an older version, chains of them, and their upload."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import zstandard

from rollmesh.checkpoints.durable import confined, make_folder, regular_files, remove_tree, size_of, sync_file
from rollmesh.checkpoints.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestFile,
    WeightDelta,
    parse_manifest,
)
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.checkpoints.policies import PolicyDraft
from rollmesh.errors import CheckpointError, Reason
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
        return WeightDelta(base=record, files=files)

    def _encoded(self, base: Path, before: ManifestFile | None, new: Path) -> ManifestFile | None:
        """Write one delta; return None if the base has no such file, is evicted, or is damaged here."""
        if before is None or size_of(base / before.path) != new.stat().st_size:
            return None
        name = f"{before.path}{SUFFIX}"
        target = confined(self._root / FOLDER, name)
        make_folder(target.parent)
        try:
            sha256, base_sha256 = write_delta(base / before.path, new, target)
        except FileNotFoundError:  # the base was evicted meanwhile
            return None
        if base_sha256 != before.sha256:
            return None
        return ManifestFile(path=name, size_bytes=target.stat().st_size, sha256=sha256)

    def sources(self, folder: Path, manifest: Manifest) -> list[tuple[Path, str]]:
        """Return the files that the bucket gets of a policy folder, with their names there."""
        deltas = {file.path for file in (manifest.delta.files if manifest.delta else [])}
        names = [file.path for file in manifest.stored_files]
        return [(confined(self._root / FOLDER if name in deltas else folder, name), name) for name in names]

    def uploaded(self, record: PolicyRecord, manifest: Manifest) -> None:
        """Note that the bucket has this version, and delete its deltas here."""
        self._newest = record, manifest
        remove_tree(self._root / FOLDER)


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
        if (folder := cached(base)) is not None:
            return links[::-1], folder
        links.append(Link(path=base.path, manifest=manifest_of(base)))
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


SUFFIX = ".delta"
_BLOCK_BYTES = 4 << 20
_LEVEL = 1
"""Level of zstd; higher ones gain little on zeros."""


def write_delta(base: Path, new: Path, delta: Path) -> tuple[str, str]:
    """Write the compressed XOR of two files of the same size; return the sha256 (hex) of delta and base.

    Raises ValueError if the sizes differ.
    """
    digest, base_digest = hashlib.sha256(), hashlib.sha256()
    compress = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
    with base.open("rb") as before, new.open("rb") as after, delta.open("wb") as file:
        for block in _blocks(after):
            old = before.read(len(block))
            base_digest.update(old)
            data = compress.compress(_xor(block, old))
            digest.update(data)
            file.write(data)
        end = compress.flush()
        digest.update(end)
        file.write(end)
    return digest.hexdigest(), base_digest.hexdigest()


def apply_delta(base: Path, delta: Path, target: Path) -> None:
    """Write the file that ``delta`` makes of ``base``, for the caller to compare with its digest.

    The file has the size of the base: a delta of another size raises CheckpointError (tampered), as does one that zstd
    cannot read.
    """
    with base.open("rb") as before, delta.open("rb") as compressed, target.open("xb") as file:
        try:
            with zstandard.ZstdDecompressor().stream_reader(compressed) as difference:
                for block in _blocks(before):
                    file.write(_xor(block, difference.read(len(block))))
                rest = difference.read(1)
        except (zstandard.ZstdError, ValueError) as error:
            raise CheckpointError(f"{delta}: no delta of {base}: {error}", reason=Reason.TAMPERED) from error
    if rest:
        raise CheckpointError(f"{delta}: no delta of {base}: it is longer", reason=Reason.TAMPERED)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(_BLOCK_BYTES):
        yield block


def _xor(left: bytes, right: bytes) -> bytes:
    """Combine two blocks. Raises ValueError if their lengths differ."""
    if len(left) != len(right):
        raise ValueError(f"a block has {len(right)} bytes, expected {len(left)}")
    return np.bitwise_xor(np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)).tobytes()
