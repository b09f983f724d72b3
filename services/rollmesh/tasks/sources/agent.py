"""Prompts of a run whose rollouts are made by agents outside of the mesh: the task travels with the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollmesh.tasks.sources.row import MESSAGES
from rollmesh.tasks.sources.source_protocol import PromptSource
from rollmesh.text import Tokenizer
from rollmesh.types import Prompt

_TEXT = "_prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """What an agent is told of its prompt."""

    text: str
    """The whole prompt as text: of a chat with its special tokens spelled out, of a plain prompt without those that
    the tokenizer adds by itself."""
    messages: Sequence[Mapping[str, Any]] | None
    """The chat messages that it was rendered from; None for a plain prompt."""
    metadata: Mapping[str, Any]
    """What the data set says besides: the answer, the tests."""


class AgentPrompts:
    """Another source's prompts with their text and messages in the metadata.

    ``contexts``: ``task`` keeps the prompt, with which every session begins; ``free`` keeps its first token only, and
    the agent writes what follows (config.AgentConfig).
    """

    def __init__(self, source: PromptSource, tokenizer: Tokenizer, contexts: Literal["task", "free"]) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._contexts = contexts

    @property
    def epoch_size(self) -> int:
        """Prompts of one epoch."""
        return self._source.epoch_size

    def prompt(self, epoch: int, index: int) -> Prompt:
        """The prompt at a position of the cursor."""
        prompt = self._source.prompt(epoch, index)
        text = self._tokenizer.decode(prompt.token_ids, special_tokens=MESSAGES in prompt.metadata)
        ids = prompt.token_ids if self._contexts == "task" else prompt.token_ids[:1]
        return replace(prompt, token_ids=ids, metadata={**prompt.metadata, _TEXT: text})


def task_of(prompt: Prompt) -> AgentTask:
    """Read the task back from a prompt of ``AgentPrompts``."""
    metadata = dict(prompt.metadata)
    return AgentTask(text=str(metadata.pop(_TEXT, "")), messages=metadata.pop(MESSAGES, None), metadata=metadata)
