"""A copy of a run that a new mesh can go on from, taken while the run trains.

What counts is in the run folder and the checkpoint store; the queue is not copied, because a trainer tells an empty
one what has been trained. Files there never change once they are complete, so their order is all that consistency
needs: states, then policies, then batch files. A batch file that is newer than the newest state is trained again after
a restore, as after a crash; a state that is newer than the batch files could not be.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmesh.checkpoints.batches import FOLDER as BATCHES
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.committed import COMMITTED_FILE
from rollmesh.checkpoints.committed import FOLDER as STATES
from rollmesh.checkpoints.manifest import MANIFEST_FILE
from rollmesh.checkpoints.policies import ANNOUNCED_FILE
from rollmesh.checkpoints.policies import FOLDER as POLICIES
from rollmesh.checkpoints.sealing import LINEAGE_FILE, SECRET_FILE
from rollmesh.errors import ConfigError
from rollmesh.launcher.run_folder import RunFolder

_RECORDS = ("config.yaml", "metrics.jsonl", "samples.jsonl", "timeline.jsonl", "evaluations.jsonl")
_ATTEMPTS = 5


@dataclass(slots=True)
class BackupReport:
    """What one backup did."""

    files: int = 0
    """Files copied now; those of an earlier backup are left as they are."""
    bytes: int = 0
    removed: int = 0
    """Entries removed from the backup because the run has pruned them."""
    train_step: int = 0
    """Train step that a restore goes on from; 0 when the run had no committed state yet."""


def back_up(folder: RunFolder, checkpoints: CheckpointStore, destination: Path) -> BackupReport:
    """Bring ``destination`` up to date with the run; it is a run folder itself afterwards.

    Raises ConfigError for a destination inside the run or of another run, OSError when it cannot be written.
    """
    if checkpoints.mirror is not None:
        raise ConfigError(
            f"checkpoints.folder={checkpoints.mirror.objects.url} is an object store: copy it with its own tools "
            "(states first, then policies, then batches), and the run folder without its checkpoints"
        )
    root, target = checkpoints.root, destination / "checkpoints"
    _refuse_strangers(folder.path, root, destination)
    report = BackupReport()
    target.mkdir(parents=True, exist_ok=True)
    lineage = checkpoints.lineage()
    (target / LINEAGE_FILE).write_text(lineage)
    if (folder.path / SECRET_FILE).exists():
        _copy(folder.path / SECRET_FILE, destination / SECRET_FILE, report)
    for _ in range(_ATTEMPTS):
        _copy_folders(root / STATES, target / STATES, COMMITTED_FILE, report)
        if any((target / STATES).glob(f"*/{COMMITTED_FILE}")) or checkpoints.latest_committed() is None:
            break
    else:
        raise ConfigError(f"{root}: its states were pruned {_ATTEMPTS} times while they were read: keep more of them")
    _copy_folders(root / POLICIES, target / POLICIES, MANIFEST_FILE, report, late=ANNOUNCED_FILE)
    _copy_batches(root / BATCHES, target / BATCHES, report)
    for name in _RECORDS:
        with contextlib.suppress(FileNotFoundError):
            _copy(folder.path / name, destination / name, report)
    for kind in (STATES, POLICIES):
        report.removed += _remove_pruned(root / kind, target / kind)
    newest = checkpoints.at(target).latest_committed()
    report.train_step = 0 if newest is None else newest.train_step
    return report


def _refuse_strangers(run: Path, root: Path, destination: Path) -> None:
    for inside in (run, root):
        if destination.resolve().is_relative_to(inside):
            raise ConfigError(f"destination {destination} lies inside {inside}: choose a folder on another disk")
    there = destination / "checkpoints" / LINEAGE_FILE
    if there.exists() and there.read_text() != (root / LINEAGE_FILE).read_text():
        raise ConfigError(f"destination {destination} holds the backup of another run: choose another folder")


def _copy_folders(source: Path, target: Path, marker: str, report: BackupReport, late: str = "") -> None:
    """Copy complete folders (those with their ``marker``); ``late`` may be added to a folder after its marker."""
    for folder in _folders(source):
        there = target / folder.name
        try:
            if not there.exists() and (folder / marker).exists():
                _copy_tree(folder, there, report)
            elif late and (folder / late).exists() and not (there / late).exists():
                _copy(folder / late, there / late, report)
        except FileNotFoundError:  # pruned while it was read
            continue


def _copy_tree(source: Path, target: Path, report: BackupReport) -> None:
    """Copy a folder under another name first, so that a backup that was cut off holds no half of one."""
    unfinished = target.with_name(f".{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    try:
        for file in files:
            there = unfinished / file.relative_to(source)
            there.parent.mkdir(parents=True, exist_ok=True)
            _copy(file, there, report)
        os.replace(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy_batches(source: Path, target: Path, report: BackupReport) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.glob("*.pb")):
        if not (target / file.name).exists():
            _copy(file, target / file.name, report)


def _copy(source: Path, target: Path, report: BackupReport) -> None:
    unfinished = target.with_name(f".{target.name}.copy")
    shutil.copy2(source, unfinished)
    with unfinished.open("rb") as copied:
        os.fsync(copied.fileno())
    os.replace(unfinished, target)
    report.files += 1
    report.bytes += target.stat().st_size


def _remove_pruned(source: Path, target: Path) -> int:
    gone = [folder for folder in _folders(target) if not (source / folder.name).exists()]
    for folder in gone:
        shutil.rmtree(folder)
    return len(gone)


def _folders(parent: Path) -> Iterator[Path]:
    if parent.exists():
        yield from sorted(p for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))
