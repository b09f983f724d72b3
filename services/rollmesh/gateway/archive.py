"""Trained trajectories of the batch files, if this process can read the checkpoint store: rows, pages, previews."""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.config import RunConfig
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.gateway.models.items import BatchOrder, BatchPage, BatchTrajectory
from rollmesh.runtime.request_guard import Busy
from rollmesh.types import Group, Int32Array, Trajectory

Pieces = Callable[[npt.ArrayLike], list[str]]
"""Text that each token adds (``Tokenizer.pieces``)."""

_HEAD_TOKENS = 24
_TAIL_TOKENS = 24
_GAP = " \N{HORIZONTAL ELLIPSIS} "
_MOST_GROUPS = 200_000
"""Number of groups whose batch is remembered."""
_TIMEOUT_SECONDS = 8.0
"""Time limit of one lookup; batch files indexed until then speed up the next lookup."""
_MOST_WAITING = 16
"""Maximum number of lookups in progress."""
_KEPT_BATCHES = 4
"""Lists of batches kept in memory, so that the next page or another order of a listed batch reads no file."""

T = TypeVar("T")
Row = TypeVar("Row")
BatchRow = tuple[BatchTrajectory, tuple[Int32Array, ...]]
"""A trajectory of a batch file without its preview, and the tokens of that: all, or the first and the last ones."""


def rows_of(group: Group) -> list[BatchRow]:
    """Return the rows of a group, in the order of training."""
    return [
        (
            BatchTrajectory(
                id=each.trajectory_id,
                group_id=each.group_id,
                reward=reward_of(each),
                tokens=each.response_token_count,
                policy_versions=list(each.policy_versions),
                finish_reason=None if each.finish_reason is None else each.finish_reason.value,
                preview="",
            ),
            shown_ends(each.response_ids),
        )
        for each in group.trajectories
    ]


def batch_page(
    train_step: int,
    rows: Sequence[BatchRow],
    order: BatchOrder,
    descending: bool,
    first: int,
    limit: int,
    pieces: Pieces | None,
) -> BatchPage:
    """Return the rows ``first`` to ``first + limit`` of a batch in an order; only these are decoded."""
    if order == "batch":
        ordered = rows[::-1] if descending else rows
    else:
        ordered = in_order(rows, descending, lambda row: row[0].reward if order == "reward" else row[0].tokens)
    items = [
        item.model_copy(update={"preview": preview_of(shown, pieces)}) for item, shown in ordered[first : first + limit]
    ]
    return BatchPage(train_step=train_step, items=items, first=first, total=len(rows))


def in_order(rows: Sequence[Row], descending: bool, value: Callable[[Row], float | None]) -> list[Row]:
    """Sort rows by a value; those without one are last in both directions."""
    sign = -1.0 if descending else 1.0
    return sorted(rows, key=lambda row: math.inf if (found := value(row)) is None else sign * found)


def reward_of(trajectory: Trajectory) -> float | None:
    """Return the shaped reward; None without a score."""
    return None if trajectory.outcome is None else trajectory.shaped_reward


def shown_ends(first: Int32Array, last: Int32Array | None = None) -> tuple[Int32Array, ...]:
    """Return the tokens of a preview, from a whole response or from its first and its last part."""
    if last is None and len(first) <= _HEAD_TOKENS + _TAIL_TOKENS:
        return (first,)
    tail = first if last is None else last
    return np.copy(first[:_HEAD_TOKENS]), np.copy(tail[-_TAIL_TOKENS:])  # a view would keep every token in memory


def preview_of(shown: Sequence[Int32Array], pieces: Pieces | None) -> str:
    """Return the text of a preview on one line; token ids without a tokenizer."""
    return _GAP.join(_text(ids, pieces) for ids in shown)


def _text(ids: Int32Array, pieces: Pieces | None) -> str:
    words = [str(token) for token in ids.tolist()] if pieces is None else ["".join(pieces(ids))]
    return " ".join(" ".join(words).split())


class Archived(NamedTuple):
    """A group and its batch."""

    train_step: int
    group: Group


class Archive:
    """Lookup of groups and of whole batches in batch files.

    Reads block, and an object store is slow. Lookups therefore run in a separate thread, and a lookup over its time
    limit raises Busy.
    """

    def __init__(self, config: RunConfig, *, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        self._config = config
        self._timeout_seconds = timeout_seconds
        self._store: CheckpointStore | None = None
        self._steps: OrderedDict[str, int] = OrderedDict()
        self._indexed: set[int] = set()
        self._rows: OrderedDict[int, list[BatchRow]] = OrderedDict()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="archive")
        self._waiting = 0

    async def find(self, group_id: str, hint: int | None) -> Archived | None:
        """Return the group, or None if no batch file contains it; ``hint`` is the step at which it left the queue.

        Raises CheckpointError for a file that is damaged or sealed with another secret, and Busy if the files cannot be
        read within the time limit.
        """
        return await self._in_reader(lambda deadline: self._find(group_id, hint, deadline))

    async def steps(self) -> list[int]:
        """Return the train steps that have a batch file, ascending; Busy like ``find``."""
        return await self._in_reader(lambda _: [] if (store := self._open()) is None else store.batch_steps())

    async def rows(self, train_step: int) -> list[BatchRow] | None:
        """Return the trajectories of a step in the order of training, None without a batch file; raises like ``find``.

        A file that takes longer than the time limit is read to its end, so that a later call finds its rows.
        """
        return await self._in_reader(lambda _: self._read_rows(train_step))

    async def _in_reader(self, read: Callable[[float], T]) -> T:
        """Run a read in the thread of this archive; it receives the deadline."""
        if self._waiting >= _MOST_WAITING:
            raise Busy(f"{self._waiting} lookups in batch files are already in progress", hint="retry in a moment")
        deadline = time.monotonic() + self._timeout_seconds
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._reader, read, deadline)
        self._waiting += 1
        answer.add_done_callback(self._answered)
        try:
            async with asyncio.timeout_at(loop.time() + self._timeout_seconds):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            raise _unread("no answer within the time limit") from error
        except (ConfigError, OSError) as error:
            raise _unread(str(error)) from error
        except CheckpointError as error:
            if error.outside:
                raise _unread(str(error)) from error
            raise

    def _answered(self, answer: asyncio.Future[T]) -> None:
        self._waiting -= 1
        if not answer.cancelled():
            answer.exception()  # retrieve the error: the caller may have left

    def _find(self, group_id: str, hint: int | None, deadline: float) -> Archived | None:
        if time.monotonic() >= deadline:
            return None  # the caller has left
        store = self._open()
        if store is None:
            return None
        step = self._step_of(store, group_id, hint, deadline)
        group = None if step is None else store.read_group(step, group_id)
        return None if step is None or group is None else Archived(train_step=step, group=group)

    def _read_rows(self, train_step: int) -> list[BatchRow] | None:
        if train_step not in self._rows:
            store = self._open()
            if store is None or train_step not in store.batch_steps():
                return None
            self._rows[train_step] = [row for group in store.groups(train_step) for row in rows_of(group)]
        self._rows.move_to_end(train_step)
        while len(self._rows) > _KEPT_BATCHES:
            self._rows.popitem(last=False)
        return self._rows[train_step]

    def _open(self) -> CheckpointStore | None:
        self._store = self._store or readable_checkpoints(self._config)
        return self._store

    def _step_of(self, store: CheckpointStore, group_id: str, hint: int | None, deadline: float) -> int | None:
        # The queue usually knows the step: one batch file is then enough, without a listing.
        if group_id not in self._steps and hint is not None and hint not in self._indexed:
            self._index(store, hint)
        if group_id in self._steps:
            return self._steps[group_id]
        steps = sorted(set(store.batch_steps()) - self._indexed, reverse=True)
        damaged: CheckpointError | None = None
        for done, step in enumerate(steps):
            if time.monotonic() >= deadline:
                raise _unread(f"{done} of {len(steps)} files searched within the time limit")
            damaged = self._index(store, step) or damaged
            if group_id in self._steps:
                return step
        if damaged is not None:  # the group may be in it
            raise damaged
        return None

    def _index(self, store: CheckpointStore, step: int) -> CheckpointError | None:
        """Store the group ids of a batch file; returns what is wrong with one that is missing or damaged."""
        try:
            ids = store.batch_footer(step).group_ids
        except CheckpointError as error:
            if error.outside:
                raise
            return error
        self._indexed.add(step)
        for group_id in ids:
            self._steps[group_id] = step
        while len(self._steps) > _MOST_GROUPS:
            _, removed = self._steps.popitem(last=False)
            self._indexed.discard(removed)
        return None


def readable_checkpoints(config: RunConfig) -> CheckpointStore | None:
    """Open the checkpoints of a run; None without their folder, or without the secret that seals their files.

    Unlike the services of a mesh it creates neither.
    """
    section = config.checkpoints
    known = section.secret is not None or (Path(config.folder) / SECRET_FILE).exists()
    there = section.remote or section.on_this_node(Path(config.folder)).is_dir()
    return open_checkpoints(config) if known and there else None


def _unread(why: str) -> Busy:
    return Busy(f"the batch files cannot be read now: {why}", hint="retry in a moment")
