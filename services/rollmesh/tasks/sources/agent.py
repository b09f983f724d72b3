"""Prompts for agents outside the mesh: the metadata of each prompt carries its task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollmesh.tasks.sources.row import MESSAGES
from rollmesh.tasks.sources.source_protocol import RowSource, SourceRows
from rollmesh.text import Tokenizer
from rollmesh.types import Prompt

_TEXT = "_prompt"
_PLAIN_TEXT = "_plain_prompt"
"""Metadata key of the prompt's text without special tokens, if the token ids do not contain the whole prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """Task that an agent receives with its prompt."""

    text: str
    """The whole prompt as text. The text of a chat includes its special tokens; the text of a plain prompt leaves out
    those that the tokenizer adds."""
    messages: Sequence[Mapping[str, Any]] | None
    """Chat messages that were rendered into the prompt; None for a plain prompt."""
    metadata: Mapping[str, Any]
    """Remaining fields of the data set, for example the answer or the tests."""


class AgentPrompts:
    """Prompts of another source, with their text and messages in the metadata.

    ``contexts``: with ``task`` the whole prompt is kept, and every session begins with it. With ``free`` only its
    first token is kept, and the agent writes the rest of the context (config.AgentConfig).
    """

    def __init__(self, source: RowSource, tokenizer: Tokenizer, contexts: Literal["task", "free"]) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._contexts = contexts

    @property
    def epoch_size(self) -> int:
        return self._source.epoch_size

    @property
    def content(self) -> str:
        return self._source.content

    def prompt(self, epoch: int, index: int) -> Prompt:
        return self._with_task(self._source.prompt(epoch, index))

    def rows(self) -> SourceRows:
        return self._source.rows()

    def drawn(self, row: int, epoch: int, index: int) -> Prompt:
        return self._with_task(self._source.drawn(row, epoch, index))

    def _with_task(self, prompt: Prompt) -> Prompt:
        text = self._tokenizer.decode(prompt.token_ids, special_tokens=MESSAGES in prompt.metadata)
        metadata = {**prompt.metadata, _TEXT: text}
        if self._contexts == "task":
            return replace(prompt, metadata=metadata)
        metadata[_PLAIN_TEXT] = self._tokenizer.decode(prompt.token_ids)
        return replace(prompt, token_ids=prompt.token_ids[:1], metadata=metadata)


def task_of(prompt: Prompt) -> AgentTask:
    """Read the task from the metadata of a prompt of ``AgentPrompts``."""
    metadata = dict(prompt.metadata)
    metadata.pop(_PLAIN_TEXT, None)
    return AgentTask(text=str(metadata.pop(_TEXT, "")), messages=metadata.pop(MESSAGES, None), metadata=metadata)


def plain_text_of(prompt: Prompt, tokenizer: Tokenizer) -> str:
    """Return the text of the whole prompt without special tokens, also if the agent writes the context."""
    text = prompt.metadata.get(_PLAIN_TEXT)
    return tokenizer.decode(prompt.token_ids) if text is None else str(text)
