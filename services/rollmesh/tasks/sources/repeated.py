"""Prompts that come several times in a row, for runs in which every trajectory is a group of its own."""

from __future__ import annotations

from rollmesh.tasks.sources.source_protocol import PromptSource
from rollmesh.types import Prompt


class RepeatedPrompts:
    """Prompts of another source, each at ``times`` positions in a row of the same epoch."""

    def __init__(self, source: PromptSource, times: int) -> None:
        self._source = source
        self._times = times

    @property
    def epoch_size(self) -> int:
        return self._source.epoch_size * self._times

    @property
    def content(self) -> str:
        return self._source.content

    def prompt(self, epoch: int, index: int) -> Prompt:
        return self._source.prompt(epoch, index // self._times)
