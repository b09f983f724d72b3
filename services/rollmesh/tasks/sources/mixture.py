"""Prompts of several sources, each a domain with a weight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from rollmesh.tasks.sources.source_protocol import RowSource, SourceRows, Split
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
