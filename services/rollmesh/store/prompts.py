"""Client-side cache of the prompts of recent groups, so that prompts admitted by this client are not read again."""

from __future__ import annotations

from collections import OrderedDict

from rollmesh.types import Prompt

_KEPT = 512


class PromptCache:
    """The most recently added prompts, by group id; the prompt of a group never changes."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()

    def get(self, group_id: str) -> Prompt | None:
        """Return the prompt of a group; None when it is not cached."""
        return self._prompts.get(group_id)

    def put(self, group_id: str, prompt: Prompt) -> None:
        """Cache the prompt of a group; the oldest entry is removed when the cache is full."""
        self._prompts[group_id] = prompt
        if len(self._prompts) > _KEPT:
            self._prompts.popitem(last=False)
