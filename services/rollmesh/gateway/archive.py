"""Trained trajectories, from the batch files of the checkpoint store, where this process can read it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.reasons import Reason
from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.config import RunConfig
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.gateway.api_errors import Busy
from rollmesh.types import Group

_MOST_GROUPS = 200_000
"""Groups whose batch is remembered."""
_PATIENCE_SECONDS = 8.0
"""How long a person waits for an answer; what was learned until then is there for the next question."""
_MOST_WAITING = 16
"""Questions under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """A group and the batch that it was trained in."""

    train_step: int
    group: Group


class Archive:
    """Finds groups in batch files.

    Reading blocks, in an object store for long: it has a thread of its own, so that nothing else of the gateway waits
    for it, and whoever has waited for long enough is told to ask again.
    """

    def __init__(self, config: RunConfig, *, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        self._config = config
        self._patience_seconds = patience_seconds
        self._store: CheckpointStore | None = None
        self._steps: OrderedDict[str, int] = OrderedDict()
        self._indexed: set[int] = set()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="archive")
        self._waiting = 0

    async def find(self, group_id: str, hint: int | None) -> Archived | None:
        """The group, or None when no batch file has it; ``hint`` is the step at which it left the queue.

        Raises CheckpointError for a file that is torn or sealed with another secret, Busy when the files cannot be
        read, or not soon enough.
        """
        if self._waiting >= _MOST_WAITING:
            raise Busy(f"{self._waiting} questions about batch files are waiting already", hint="ask again in a moment")
        deadline = time.monotonic() + self._patience_seconds
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._reader, self._find, group_id, hint, deadline)
        self._waiting += 1
        answer.add_done_callback(self._answered)
        try:
            async with asyncio.timeout_at(loop.time() + self._patience_seconds):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            raise _unread("they have not answered in time") from error
        except ConfigError as error:
            raise _unread(str(error)) from error
        except CheckpointError as error:
            if error.reason == Reason.UNREACHABLE:
                raise _unread(str(error)) from error
            raise

    def _answered(self, answer: asyncio.Future[Archived | None]) -> None:
        self._waiting -= 1
        if not answer.cancelled():
            answer.exception()  # nobody may be left to hear it

    def _find(self, group_id: str, hint: int | None, deadline: float) -> Archived | None:
        if time.monotonic() >= deadline:
            return None  # whoever asked has gone
        store = self._open()
        if store is None:
            return None
        step = self._step_of(store, group_id, hint, deadline)
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

    def _step_of(self, store: CheckpointStore, group_id: str, hint: int | None, deadline: float) -> int | None:
        # Mostly the queue still knows the step: then nothing has to be listed, nor any other file opened.
        if group_id not in self._steps and hint is not None and hint not in self._indexed:
            self._index(store, hint)
        if group_id in self._steps:
            return self._steps[group_id]
        steps = sorted(set(store.batch_steps()) - self._indexed, reverse=True)
        for done, step in enumerate(steps):
            if time.monotonic() >= deadline:
                raise _unread(f"{done} of {len(steps)} that had to be searched are searched")
            self._index(store, step)
            if group_id in self._steps:
                return step
        return None

    def _index(self, store: CheckpointStore, step: int) -> None:
        """Learn which groups a batch file has."""
        try:
            ids = store.batch_footer(step).group_ids
        except CheckpointError as error:
            if error.reason == Reason.UNREACHABLE:
                raise
            return  # missing, half-written, or torn: it is no batch (yet)
        self._indexed.add(step)
        for group_id in ids:
            self._steps[group_id] = step
        while len(self._steps) > _MOST_GROUPS:
            _, forgotten = self._steps.popitem(last=False)
            self._indexed.discard(forgotten)


def _unread(why: str) -> Busy:
    return Busy(f"the batch files cannot be read now: {why}", hint="ask again in a moment")
