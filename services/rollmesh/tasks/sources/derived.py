"""Sources that give the prompts of other sources: a mixture, repeated prompts, prompts with the task of an agent."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rollmesh.config import RunConfig
from rollmesh.config.data import MixtureSource
from rollmesh.tasks.sources.rows import MESSAGES
from rollmesh.tasks.sources.source_protocol import (
    OnChecked,
    PromptSource,
    RowSource,
    SourceRows,
    SourceSettings,
    Split,
    build_prompt_source,
    open_source,
)
from rollmesh.text import Tokenizer
from rollmesh.types import Prompt

TRAIN_EPOCH = 10_000
"""Prompts of an epoch of the train split, so that every weight is exact to 1e-4."""
_TEXT = "_prompt"
_PLAIN_TEXT = "_plain_prompt"
"""Metadata key of the prompt's text without special tokens, if the token ids do not contain the whole prompt."""


class MixturePrompts:
    """Prompts of the parts, evenly interleaved by weight; every part keeps its own order and its own epochs.

    An epoch of the eval split has as many distinct prompts as the weights allow.
    """

    def __init__(self, source: MixtureSource, settings: SourceSettings) -> None:
        """Open the parts. Raises DataError and ConfigError as each of them does."""
        self._parts = source.parts
        self._sources = [open_source(part.source, settings) for part in source.parts]
        weights, sizes = [part.weight for part in source.parts], [opened.epoch_size for opened in self._sources]
        if settings.split == "train":
            # Shares are rounded down, and the rest goes to the largest remainders.
            shares = [weight * TRAIN_EPOCH for weight in weights]
            self._counts = [max(1, int(share)) for share in shares]
            by_remainder = sorted(range(len(shares)), key=lambda at: int(shares[at]) - shares[at])
            for at in by_remainder[: max(0, TRAIN_EPOCH - sum(self._counts))]:
                self._counts[at] += 1
        else:
            # The shares of the largest epoch without a repeated prompt.
            most = min(TRAIN_EPOCH, min(size / weight for size, weight in zip(sizes, weights, strict=True)))
            self._counts = [min(n, max(1, round(weight * most))) for n, weight in zip(sizes, weights, strict=True)]
        self._places, self._ranks = interleaved(self._counts)

    @property
    def epoch_size(self) -> int:
        return len(self._places)

    @property
    def content(self) -> str:
        contents = [(part.name, opened.content) for part, opened in zip(self._parts, self._sources, strict=True)]
        return "; ".join(f"{name}: {content}" for name, content in contents if content)

    def prompt(self, epoch: int, index: int) -> Prompt:
        if epoch < 0 or not 0 <= index < len(self._places):
            raise IndexError(f"mixture: no position (epoch {epoch}, index {index})")
        place = int(self._places[index])
        position = epoch * self._counts[place] + int(self._ranks[index])
        opened = self._sources[place]
        return self._named(place, opened.prompt(*divmod(position, opened.epoch_size)))

    def rows(self) -> SourceRows:
        rows = [(part, opened.rows()) for part, opened in zip(self._parts, self._sources, strict=True)]
        return SourceRows(
            names=[f"{part.name}/{name}" for part, found in rows for name in found.names],
            domains=[part.name for part, found in rows for _ in found.names],
            endless=[endless for _, found in rows for endless in found.endless],
            weights={part.name: part.weight for part in self._parts},
        )

    def drawn(self, row: int, epoch: int, index: int) -> Prompt:
        place = bisect_right(self._first_rows, row) - 1
        return self._named(place, self._sources[place].drawn(row - self._first_rows[place], epoch, index))

    def _named(self, place: int, prompt: Prompt) -> Prompt:
        name = self._parts[place].name
        return replace(prompt, prompt_id=f"{name}/{prompt.prompt_id}", domain=name)

    @cached_property
    def _first_rows(self) -> list[int]:
        sizes = [len(opened.rows().names) for opened in self._sources]
        return [0, *accumulate(sizes[:-1])]


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


def run_prompts(
    config: RunConfig, tokenizer: Tokenizer, split: Split, on_checked: OnChecked | None = None
) -> RowSource:
    """Open the prompts of a run's split, for agents with their tasks; DataError and ConfigError as for every source."""
    is_agent = config.rollout.program == "agent"
    seed = config.seed if split == "train" else config.evaluation.seed
    source = build_prompt_source(config.data, tokenizer, seed, split, keep_messages=is_agent, on_checked=on_checked)
    return AgentPrompts(source, tokenizer, config.rollout.agent.contexts) if is_agent else source


def task_of(prompt: Prompt) -> AgentTask:
    """Read the task from the metadata of a prompt of ``AgentPrompts``."""
    metadata = dict(prompt.metadata)
    metadata.pop(_PLAIN_TEXT, None)
    return AgentTask(text=str(metadata.pop(_TEXT, "")), messages=metadata.pop(MESSAGES, None), metadata=metadata)


def plain_text_of(prompt: Prompt, tokenizer: Tokenizer) -> str:
    """Return the text of the whole prompt without special tokens, also if the agent writes the context."""
    text = prompt.metadata.get(_PLAIN_TEXT)
    return tokenizer.decode(prompt.token_ids) if text is None else str(text)
