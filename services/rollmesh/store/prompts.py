"""Prompts of recent groups, kept by the client: those that it admitted itself need no way back from Redis."""

from __future__ import annotations

from collections import OrderedDict

from rollmesh.types import Prompt

_KEPT = 512


class PromptCache:
    """The prompts that were met last, by group id; the prompt of a group never changes."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()

    def get(self, group_id: str) -> Prompt | None:
        """The prompt of a group; None when it has to be read."""
        return self._prompts.get(group_id)

    def put(self, group_id: str, prompt: Prompt) -> None:
        """Keep the prompt of a group, in place of the one that came first."""
        self._prompts[group_id] = prompt
        if len(self._prompts) > _KEPT:
            self._prompts.popitem(last=False)
