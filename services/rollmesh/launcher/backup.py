"""Backup of a run from which a new mesh can continue, taken while the run trains.

A backup contains the run folder and the checkpoints. It omits the queue: the trainer reports the trained groups to an
empty queue. Complete files never change, so the copy order alone ensures consistency: states, then policies, then
batch files. After a restore, as after a crash, a batch file newer than the newest state is trained again. Another
order could copy a state without its batch files. If the run is rolled back during the copy, all of it is copied again:
policies and batch files from after a rollback, with a state from before it, would undo the rollback.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rollmesh.checkpoints.batches import FOLDER as BATCHES
from rollmesh.checkpoints.bucket import BucketStore
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.committed import COMMITTED_FILE, CommittedState
from rollmesh.checkpoints.committed import FOLDER as STATES
from rollmesh.checkpoints.manifest import MANIFEST_FILE
from rollmesh.checkpoints.policies import ANNOUNCED_FILE
from rollmesh.checkpoints.policies import FOLDER as POLICIES
from rollmesh.checkpoints.sealing import LINEAGE_FILE, SECRET_FILE
from rollmesh.config import load_run_config, write_run_config
from rollmesh.errors import ConfigError
from rollmesh.file_writes import write_text
from rollmesh.launcher.run_folder import RunFolder

_RECORDS = ("metrics.jsonl", "samples.jsonl", "timeline.jsonl", "evaluations.jsonl")
_ATTEMPTS = 5


@dataclass(slots=True)
class BackupReport:
    """Result of one backup."""

    files: int = 0
    """Files copied by this backup; files of an earlier backup are not copied again."""
    bytes: int = 0
    removed: int = 0
    """Folders removed from the backup because the run has pruned them."""
    train_step: int = 0
    """Train step from which a restored run continues; 0 when the run has no committed state yet."""


def back_up(folder: RunFolder, checkpoints: CheckpointStore, destination: Path) -> BackupReport:
    """Update ``destination`` from the run; the result is itself a run folder, which contains its checkpoints.

    Raises ConfigError when the destination is inside the run or belongs to another run, or when the checkpoints are in
    an object store; OSError when it cannot be written.
    """
    if isinstance(checkpoints, BucketStore):
        raise ConfigError(
            f"checkpoints.folder={checkpoints.objects.url} is an object store: copy it with that store's tools "
            "(states first, then policies, then batches; all of it again if the run is rolled back meanwhile), and the "
            "run folder without its checkpoints"
        )
    root, target = checkpoints.root, destination / "checkpoints"
    _reject_destination(folder.path, root, destination)
    report = BackupReport()
    target.mkdir(parents=True, exist_ok=True)
    target = target.resolve()  # as the paths of its states are
    lineage = checkpoints.lineage()
    write_text(target / LINEAGE_FILE, lineage)
    if (folder.path / SECRET_FILE).exists():
        _copy(folder.path / SECRET_FILE, destination / SECRET_FILE, report)
    copied = checkpoints.at(target)
    for name in copied.judged_states().unsound:  # damaged copies of an earlier backup
        shutil.rmtree(target / STATES / name)
    # What this copy adds stays in the backup until the next one, even if the run prunes it meanwhile.
    copies = [(root / kind, path) for kind in (STATES, POLICIES) for path in _folders(target / kind)]
    pruned = [path for source, path in copies if not (source / path.name).exists()]
    for _ in range(_ATTEMPTS):
        # The newest first: the run prunes the oldest one next.
        _copy_folders(reversed(_folders(root / STATES)), target / STATES, COMMITTED_FILE, report)
        newest = next((state for state in copied.committed_states() if state.folder not in pruned), None)
        if newest is None and checkpoints.latest_committed() is not None:
            continue
        _copy_folders(_folders(root / POLICIES), target / POLICIES, MANIFEST_FILE, report, late=ANNOUNCED_FILE)
        (target / BATCHES).mkdir(exist_ok=True)
        for file in sorted((root / BATCHES).glob("*.pb")):
            if not (target / BATCHES / file.name).exists():
                _copy(file, target / BATCHES / file.name, report)
        if _rollbacks(newest) >= _rollbacks(checkpoints.latest_committed()):
            break
    else:
        raise ConfigError(
            f"{root}: in each of {_ATTEMPTS} copies the states were pruned or the run was rolled back: back up again"
        )
    config = load_run_config(folder.config_file, environ={})
    here = config.model_copy(update={"checkpoints": config.checkpoints.model_copy(update={"folder": None})})
    write_run_config(here, destination / folder.config_file.name)
    for name in _RECORDS:
        with contextlib.suppress(FileNotFoundError):
            _copy(folder.path / name, destination / name, report)
    for path in pruned:
        shutil.rmtree(path)
    report.removed = len(pruned)
    report.train_step = 0 if newest is None else newest.train_step
    return report


def _rollbacks(state: CommittedState | None) -> int:
    """Return the rollbacks before a state; -1 without a state."""
    return -1 if state is None else state.record.rollback_count


def _reject_destination(run: Path, root: Path, destination: Path) -> None:
    for inside in (run, root):
        if destination.resolve().is_relative_to(inside):
            raise ConfigError(f"destination {destination} lies inside {inside}: choose a folder on another disk")
    lineage = destination / "checkpoints" / LINEAGE_FILE
    if lineage.exists() and lineage.read_text() != (root / LINEAGE_FILE).read_text():
        raise ConfigError(f"destination {destination} holds the backup of another run: choose another folder")


def _copy_folders(folders: Iterable[Path], target: Path, marker: str, report: BackupReport, late: str = "") -> None:
    """Copy the folders that contain ``marker``; the file ``late`` may appear in a folder after its marker."""
    for folder in folders:
        copied = target / folder.name
        try:
            if not copied.exists() and (folder / marker).exists():
                _copy_tree(folder, copied, report)
            elif late and (folder / late).exists() and not (copied / late).exists():
                _copy(folder / late, copied / late, report)
        except FileNotFoundError:  # pruned during the copy
            continue


def _copy_tree(source: Path, target: Path, report: BackupReport) -> None:
    """Copy a folder under a temporary name first, so that an interrupted backup contains no partial folder."""
    unfinished = target.with_name(f".{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    try:
        for file in files:
            copied = unfinished / file.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            _copy(file, copied, report)
        os.replace(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy(source: Path, target: Path, report: BackupReport) -> None:
    unfinished = target.with_name(f".{target.name}.copy")
    shutil.copy2(source, unfinished)
    with unfinished.open("rb") as copied:
        os.fsync(copied.fileno())
    os.replace(unfinished, target)
    report.files += 1
    report.bytes += target.stat().st_size


def _folders(parent: Path) -> list[Path]:
    if not parent.exists():
        return []
    return sorted(p for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))
