"""Rows of simulated groups, chosen by the samplers of the mesh as ``rollout/prompt_draws.py`` does."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.curriculum.history_table import HistoryTable, prompt_table
from rollmesh.curriculum.sampler_protocol import Draw, PromptSampler
from rollmesh.sim.prompts import SimulatedPrompts
from rollmesh.sim.queue_model import QueueModel
from rollmesh.sim.queue_model.model_records import GroupState

_IN_PROGRESS = (GroupState.OPEN, GroupState.ASIDE)


class SimulatedDraws:
    """Draws of a simulated leader."""

    def __init__(self, prompts: SimulatedPrompts, sampler: PromptSampler, queue: QueueModel, seed: int) -> None:
        self._sampler = sampler
        self._queue = queue
        self._seed = seed
        self._count = prompts.count
        names = [f"p{row}" for row in range(prompts.count)]
        domains: Sequence[str] = [""] * prompts.count
        weights: dict[str, float] = {}
        if prompts.domains is not None:
            domains = [prompts.domains.of(row).name for row in range(prompts.count)]
            weights = {domain.name: domain.weight for domain in prompts.domains.domains}
        self._table = prompt_table(names, domains, [False] * prompts.count, weights)
        self._history = HistoryTable(self._table)

    def refresh(self) -> None:
        """Take the records that have changed, and the prompts in progress, before an admission."""
        history, queue = self._queue.history, self._queue
        self._history.update({name: history.records[name] for name in history.changed})
        history.changed.clear()
        self._history.set_in_progress(
            group.prompt_id for state in _IN_PROGRESS for group in queue.groups[state].values()
        )

    def row(self, position: int) -> int:
        """Return the row of the group at a position."""
        epoch, index = divmod(position, self._count)
        draw = Draw(epoch=epoch, index=index, seed=self._seed)
        row = self._sampler.choose(draw, self._table, self._history.columns, self._queue.trained_step)
        self._history.begin(row)
        return row
