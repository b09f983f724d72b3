"""Trained trajectories, from the batch files of the checkpoint store, where this process can read it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.checkpoints.store import CheckpointStore
from rollmesh.config import RunConfig
from rollmesh.errors import CheckpointError
from rollmesh.types import Group

_MOST_GROUPS = 200_000
"""Groups whose batch is remembered."""
_MOST_FOOTERS = 5_000
"""Batch files looked into for one question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """A group and the batch that it was trained in."""

    train_step: int
    group: Group


class Archive:
    """Finds groups in batch files; blocks on the file system, so call it in a thread."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._store: CheckpointStore | None = None
        self._steps: OrderedDict[str, int] = OrderedDict()
        self._indexed: set[int] = set()
        self._lock = threading.Lock()

    def find(self, group_id: str, hint: int | None) -> Archived | None:
        """The group, or None when no batch file has it; ``hint`` is about when it left the queue.

        Raises CheckpointError for a file that is torn or sealed with another secret.
        """
        with self._lock:
            store = self._open()
            if store is None:
                return None
            step = self._step_of(store, group_id, hint)
            group = None if step is None else store.read_group(step, group_id)
            return None if step is None or group is None else Archived(train_step=step, group=group)

    def _open(self) -> CheckpointStore | None:
        if self._store is None:
            section = self._config.checkpoints
            # Without a secret of the run there is nothing to verify a file by, and none is made here.
            known = section.secret is not None or (Path(self._config.folder) / SECRET_FILE).exists()
            root = Path(section.folder) if section.folder else Path(self._config.folder) / "checkpoints"
            if not known or not (section.remote or root.is_dir()):
                return None
            self._store = CheckpointStore.from_config(self._config)
        return self._store

    def _step_of(self, store: CheckpointStore, group_id: str, hint: int | None) -> int | None:
        if group_id in self._steps:
            return self._steps[group_id]
        steps = sorted(set(store.batch_steps()) - self._indexed, key=lambda step: (step != hint, -step))
        for step in steps[:_MOST_FOOTERS]:
            try:
                ids = store.batch_footer(step).group_ids
            except CheckpointError:
                continue  # half-written, or torn: it is no batch (yet)
            self._remember(ids, step)
            if group_id in self._steps:
                return step
        return None

    def _remember(self, group_ids: list[str], step: int) -> None:
        self._indexed.add(step)
        for group_id in group_ids:
            self._steps[group_id] = step
        while len(self._steps) > _MOST_GROUPS:
            _, forgotten = self._steps.popitem(last=False)
            self._indexed.discard(forgotten)
