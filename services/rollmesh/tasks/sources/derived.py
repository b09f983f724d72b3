"""Sources that give the prompts of other sources: a mixture, repeated prompts, prompts with the task of an agent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rollmesh.config.data import MixtureSource
from rollmesh.tasks.sources.row import MESSAGES
from rollmesh.tasks.sources.source_protocol import (
    PromptSource,
    RowSource,
    SourceRows,
    SourceSettings,
    Split,
    open_source,
)
from rollmesh.text import Tokenizer
from rollmesh.types import Prompt

TRAIN_EPOCH = 10_000
"""Prompts of an epoch of the train split, so that every weight is exact to 1e-4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPart:
    """One part of a mixture; its name is the domain of its prompts."""

    name: str
    weight: float
    source: RowSource


class MixturePrompts:
    """Prompts of the parts, evenly interleaved by weight; every part keeps its own order and its own epochs.

    An epoch of the eval split has as many distinct prompts as the weights allow.
    """

    def __init__(self, parts: Sequence[OpenPart], split: Split) -> None:
        self._parts = parts
        self._counts = _train_counts(parts) if split == "train" else _eval_counts(parts)
        self._places, self._ranks = interleaved(self._counts)

    @property
    def epoch_size(self) -> int:
        """Number of prompts in one epoch of the mixture."""
        return len(self._places)

    @property
    def content(self) -> str:
        contents = [(part.name, part.source.content) for part in self._parts]
        return "; ".join(f"{name}: {content}" for name, content in contents if content)

    def prompt(self, epoch: int, index: int) -> Prompt:
        if epoch < 0 or not 0 <= index < len(self._places):
            raise IndexError(f"mixture: no position (epoch {epoch}, index {index})")
        place = int(self._places[index])
        part = self._parts[place]
        position = epoch * self._counts[place] + int(self._ranks[index])
        return _of_part(part, part.source.prompt(*divmod(position, part.source.epoch_size)))

    def rows(self) -> SourceRows:
        rows = [(part, part.source.rows()) for part in self._parts]
        return SourceRows(
            names=[f"{part.name}/{name}" for part, found in rows for name in found.names],
            domains=[part.name for part, found in rows for _ in found.names],
            endless=[endless for _, found in rows for endless in found.endless],
            weights={part.name: part.weight for part in self._parts},
        )

    def drawn(self, row: int, epoch: int, index: int) -> Prompt:
        place = bisect_right(self._first_rows, row) - 1
        part = self._parts[place]
        return _of_part(part, part.source.drawn(row - self._first_rows[place], epoch, index))

    @cached_property
    def _first_rows(self) -> list[int]:
        sizes = [len(part.source.rows().names) for part in self._parts]
        return [0, *accumulate(sizes[:-1])]


def open_mixture(source: MixtureSource, settings: SourceSettings) -> MixturePrompts:
    """Open the parts of a mixture."""
    parts = [OpenPart(name=p.name, weight=p.weight, source=open_source(p.source, settings)) for p in source.parts]
    return MixturePrompts(parts, settings.split)


def _of_part(part: OpenPart, prompt: Prompt) -> Prompt:
    return replace(prompt, prompt_id=f"{part.name}/{prompt.prompt_id}", domain=part.name)


def _train_counts(parts: Sequence[OpenPart]) -> list[int]:
    """Return the prompts of each part in an epoch: shares rounded down, the rest to the largest remainders."""
    shares = [part.weight * TRAIN_EPOCH for part in parts]
    counts = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda at: int(shares[at]) - shares[at])
    for at in by_remainder[: max(0, TRAIN_EPOCH - sum(counts))]:
        counts[at] += 1
    return counts


def _eval_counts(parts: Sequence[OpenPart]) -> list[int]:
    """Return the prompts of each part, at least one: the shares of the largest epoch without a repeated prompt."""
    size = min(TRAIN_EPOCH, min(part.source.epoch_size / part.weight for part in parts))
    return [min(part.source.epoch_size, max(1, round(part.weight * size))) for part in parts]


def interleaved(counts: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return part and rank within the part of every position, both int64 [sum(counts)]."""
    parts = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((ranks + 0.5) / np.array(counts)[parts], kind="stable")
    return parts[order], ranks[order]


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
