"""Prompts of a reasoning-gym task (extra: reward), which also scores the answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rollmesh.config.data import ReasoningGymSource
from rollmesh.errors import ConfigError
from rollmesh.tasks.entries import entry_to_text
from rollmesh.tasks.sources.permutation import EpochOrders
from rollmesh.tasks.sources.row import Row, RowFormat, prompt_from_row
from rollmesh.tasks.sources.source_protocol import SourceRows, SourceSettings, Split
from rollmesh.types import Prompt

_PUZZLES_IN_DIGEST = 8
_SEED_SPAN = 2**30


class ReasoningGymPrompts:
    """Items of one task; every epoch has the same items in a different order.

    Each item of a split has its own seed. The train and eval splits draw seeds from disjoint ranges, so no item
    generated for evaluation is trained on by position. Small tasks can still repeat a question.
    """

    def __init__(self, source: ReasoningGymSource, settings: SourceSettings) -> None:
        """Create the items. Raises ConfigError for an unknown task, for wrong options, or without the extra."""
        self._source = source
        self._settings = settings
        self._form = RowFormat(answer_field=None, verifier_field="verifier", chat=source.chat)
        seed = _first_seed(settings.seed, settings.split, source.size)
        self._items = create_task(source.task, {**source.options, "size": source.size, "seed": seed})
        self._orders = EpochOrders(len(self._items), settings.seed)

    @property
    def epoch_size(self) -> int:
        return len(self._items)

    @property
    def content(self) -> str:
        # Another version of the library may make other puzzles of the same seed.
        items = create_task(self._source.task, {**self._source.options, "size": _PUZZLES_IN_DIGEST, "seed": 0})
        texts = [entry_to_text(items[number]) for number in range(len(items))]
        return f"puzzles {hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()}"

    def prompt(self, epoch: int, index: int) -> Prompt:
        size, task = len(self._items), self._source.task
        if epoch < 0 or not 0 <= index < size:
            raise IndexError(f"reasoning_gym {task}: no position (epoch {epoch}, index {index})")
        number = self._orders.row(epoch, index) if self._settings.shuffle else index
        return self.drawn(number, epoch, index)

    def rows(self) -> SourceRows:
        count = len(self._items)
        names = [f"{self._source.task}:{number}" for number in range(count)]
        return SourceRows(names=names, domains=[""] * count, endless=[False] * count)

    def drawn(self, row: int, epoch: int, index: int) -> Prompt:
        number, task = row, self._source.task
        entry = self._items[number]
        fields = {
            "prompt": entry["question"],
            "verifier": "reasoning_gym",
            "task": task,
            "options": json.dumps(self._source.options, sort_keys=True),
            "entry": entry_to_text(entry),
        }
        where = f"{task}:{number}"
        filled = Row(fields=fields, where=f"reasoning_gym {where}", prompt_id=where)
        return prompt_from_row(filled, self._form, self._settings)


def create_task(task: str, options: Mapping[str, Any]) -> Any:
    """Create a reasoning-gym dataset. Raises ConfigError with the wrong field."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError("reasoning_gym needs its package: pip install 'rollmesh[reward]'") from error
    if task not in DATASETS:
        near = [name for name in sorted(DATASETS) if task[:4] in name] or sorted(DATASETS)[:8]
        raise ConfigError(f"data.source.task: reasoning-gym has no task {task!r}; for example {', '.join(near)}")
    try:
        return reasoning_gym.create_dataset(task, **options)
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        raise ConfigError(f"data.source.options: {task} rejects {dict(options)!r}: {error}") from error


def _first_seed(seed: int, split: Split, size: int) -> int:
    digest = hashlib.blake2b(f"{seed}".encode(), digest_size=8).digest()
    offset = int.from_bytes(digest, "big") % (_SEED_SPAN - size)
    return offset + (_SEED_SPAN if split == "eval" else 0)
