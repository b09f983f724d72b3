"""Restart of a run folder with other settings, before any batch was cut.

Until the first batch nothing depends on the settings that are fixed for a run. The queue, the initial policy and the
records are moved into a folder beside them, so a typing error in the first start does not occupy the run folder.
"""

from __future__ import annotations

from pathlib import Path

from rollmesh.checkpoints.batches import FOLDER as BATCHES
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.store.embedded import EmbeddedServer

_MOVED = ("redis", "checkpoints", "timeline.jsonl", "evaluations.jsonl", "samples.jsonl", "metrics.jsonl")
"""Redis first: a start after a crash in between finds a queue that is rebuilt from the checkpoints, not the reverse."""


def has_trained(folder: Path) -> bool:
    """Tell whether a batch was cut in a run with local checkpoints, or a train step was recorded."""
    metrics = folder / "metrics.jsonl"
    cut = any((folder / "checkpoints" / BATCHES).glob("*.pb"))
    return cut or (metrics.exists() and metrics.stat().st_size > 0)


def can_be_set_aside(folder: Path, before: RunConfig, now: RunConfig) -> bool:
    """Tell whether a run has not trained, and keeps its queue and its checkpoints in the run folder."""
    local = all(run.store.url is None and run.checkpoints.folder is None for run in (before, now))
    return local and not has_trained(folder)


def set_aside(folder: Path) -> Path:
    """Move the files of an untrained run into a new folder inside its run folder; return that folder.

    The caller holds the folder's lock. Raises ConfigError if the files cannot be moved.
    """
    target = next(path for number in range(1, 10_000) if not (path := folder / f"untrained-{number}").exists())
    EmbeddedServer(folder / "redis").stop()  # left by a killed launcher
    try:
        target.mkdir()
        for name in _MOVED:
            if (folder / name).exists():
                (folder / name).rename(target / name)
    except OSError as error:
        raise ConfigError(f"folder={folder}: the untrained run there cannot be set aside: {error}") from error
    return target
