"""Reads behind the REST API: what a live run (``LiveReads``) and a run folder (``report.view``) have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import rollmesh
from rollmesh.config import RunConfig
from rollmesh.config.load import run_file_text
from rollmesh.gateway.archive import Archive, BatchLists
from rollmesh.gateway.models.items import (
    BatchList,
    BatchOrder,
    BatchPage,
    DeadLetterList,
    GeneratorList,
    LogTail,
    PolicyList,
    ProcessList,
    QueueOrder,
    TrajectoryDetail,
    TrajectoryPage,
)
from rollmesh.gateway.models.live import Overview, SeriesAnswer, Timeline
from rollmesh.gateway.models.overview import About, RunSettings
from rollmesh.gateway.run_processes import RunProcesses
from rollmesh.gateway.trajectory_views import open_tokenizer
from rollmesh.scheduling import Schedule


def run_facts(config: RunConfig, *, text: bool) -> About:
    """Return the fixed facts of a run; ``text`` is true if tokens come with their text."""
    schedule = Schedule.from_config(config)
    return About(
        run=config.name,
        version=rollmesh.__version__,
        folder=config.folder,
        train_steps=config.trainer.train_steps,
        group_size=schedule.group_size,
        groups_per_batch=config.schedule.groups_per_batch,
        max_staleness=schedule.max_staleness,
        text=text,
        token_for_reads=config.gateway.token_for_reads,
        sample_seconds=config.gateway.sample_seconds,
    )


class RunReads(ABC):
    """Reads of one run; they raise ``ApiError`` and the errors of the store."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Open the tokenizer, the batch files and the run folder, as far as this process can read them."""
        tokenizer, self._archive = open_tokenizer(config), Archive(config)
        self._pieces = None if tokenizer is None else tokenizer.pieces
        self._lists = BatchLists(self._archive, self._pieces)
        self._processes = RunProcesses(folder)
        self._about = run_facts(config, text=self._pieces is not None)
        self._settings = RunSettings(yaml=run_file_text(config))

    def about(self) -> About:
        """Return the fixed facts of the run."""
        return self._about

    def settings(self) -> RunSettings:
        """Return the resolved run file."""
        return self._settings

    async def batches(self) -> BatchList:
        """Return the train steps that have a batch file."""
        return await self._lists.steps()

    async def batch(self, train_step: int, order: BatchOrder, descending: bool, first: int, limit: int) -> BatchPage:
        """Return some trajectories of one batch file."""
        return await self._lists.page(train_step, order, descending, first, limit)

    async def processes(self) -> ProcessList:
        """Return the processes of the run on this machine."""
        return await self._processes.list()

    async def log(self, name: str, lines: int) -> LogTail:
        """Return the last lines of the log of a process."""
        return await self._processes.log(name, lines)

    @abstractmethod
    def overview(self) -> Overview:
        """Return the newest state."""

    @abstractmethod
    def timeline(self) -> Timeline:
        """Return the rollouts in progress or recently ended."""

    @abstractmethod
    def follow(self, after: int | None) -> AsyncIterator[bytes]:
        """Stream the events after an id."""

    @abstractmethod
    def series(self, names: Sequence[str], points: int) -> SeriesAnswer:
        """Return curves."""

    @abstractmethod
    async def trajectories(
        self, state: str | None, cursor: str | None, limit: int, order: QueueOrder, descending: bool, preview: bool
    ) -> TrajectoryPage:
        """Return one page of the queue."""

    @abstractmethod
    async def trajectory(self, trajectory_id: str, first_token: int, token_limit: int) -> TrajectoryDetail:
        """Return one trajectory, from the queue, the dead letters or a batch file."""

    @abstractmethod
    async def policies(self, limit: int) -> PolicyList:
        """Return announced policies, newest first."""

    @abstractmethod
    async def generators(self) -> GeneratorList:
        """Return the live generators."""

    @abstractmethod
    async def dead_letters(self, limit: int) -> DeadLetterList:
        """Return failed trajectories, newest first."""
