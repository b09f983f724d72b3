"""Prompts of a reasoning-gym task, and the score of an answer by the same task (extra: reward)."""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rollmesh.config.data import ReasoningGymSource
from rollmesh.errors import ConfigError, DataError, VerifierError
from rollmesh.tasks.sources.rows import FinitePrompts, Row, RowFormat, prompt_from_row
from rollmesh.tasks.sources.source_protocol import SourceRows, SourceSettings
from rollmesh.tasks.verifiers.extraction import last_tag
from rollmesh.types import Prompt

_PUZZLES_IN_DIGEST = 8
_SEED_SPAN = 2**30
LONGEST_ANSWER = 20_000
"""Limit in characters; a longer answer is cut to its end."""
_NOT_A_NUMBER = re.compile(r"(?<![a-z])nan[ij]?(?![a-z])", re.IGNORECASE)
_TAG = "$type"


class ReasoningGymPrompts(FinitePrompts):
    """Items of one task; every epoch has the same items in a different order.

    Each item of a split has its own seed. The train and eval splits draw seeds from disjoint ranges, so no item
    generated for evaluation is trained on by position. Small tasks can still repeat a question.
    """

    def __init__(self, source: ReasoningGymSource, settings: SourceSettings) -> None:
        """Create the items. Raises ConfigError for an unknown task, for wrong options, or without the extra."""
        self._source = source
        self._settings = settings
        self._form = RowFormat(answer_field=None, verifier_field="verifier", chat=source.chat)
        digest = hashlib.blake2b(f"{settings.seed}".encode(), digest_size=8).digest()
        first_seed = int.from_bytes(digest, "big") % (_SEED_SPAN - source.size)
        seed = first_seed + (_SEED_SPAN if settings.split == "eval" else 0)
        self._items = create_task(source.task, {**source.options, "size": source.size, "seed": seed})
        name = f"reasoning_gym {source.task}"
        super().__init__(name, len(self._items), settings.seed, shuffle=settings.shuffle)

    @property
    def content(self) -> str:
        # Another version of the library may make other puzzles of the same seed.
        items = create_task(self._source.task, {**self._source.options, "size": _PUZZLES_IN_DIGEST, "seed": 0})
        texts = [entry_to_text(items[number]) for number in range(len(items))]
        return f"puzzles {hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()}"

    def rows(self) -> SourceRows:
        count = len(self._items)
        names = [f"{self._source.task}:{number}" for number in range(count)]
        return SourceRows(names=names, domains=[""] * count, endless=[False] * count)

    def drawn(self, row: int, epoch: int, index: int) -> Prompt:
        entry, task = self._items[row], self._source.task
        fields = {
            "prompt": entry["question"],
            "verifier": "reasoning_gym",
            "task": task,
            "options": json.dumps(self._source.options, sort_keys=True),
            "entry": entry_to_text(entry),
        }
        where = f"{task}:{row}"
        filled = Row(fields=fields, where=f"reasoning_gym {where}", prompt_id=where)
        return prompt_from_row(filled, self._form, self._settings)


def create_task(task: str, options: Mapping[str, Any]) -> Any:
    """Create a reasoning-gym dataset. Raises ConfigError with the wrong field."""
    package = _package()
    tasks = package.factory.DATASETS
    if task not in tasks:
        near = [name for name in sorted(tasks) if task[:4] in name] or sorted(tasks)[:8]
        raise ConfigError(f"data.source.task: reasoning-gym has no task {task!r}; for example {', '.join(near)}")
    try:
        return package.create_dataset(task, **options)
    except (TypeError, ValueError, AssertionError, KeyError) as error:
        raise ConfigError(f"data.source.options: {task} rejects {dict(options)!r}: {error}") from error


def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError("reasoning_gym needs its package: pip install 'rollmesh[reward]'") from error
    return reasoning_gym


class ReasoningGymVerifier:
    """Score by the task, usually 0 to 1, of ``<answer>...</answer>`` or, without the tag, of the whole response.

    An answer that the task cannot read scores 0.
    """

    timeout_means_wrong = True

    def __init__(self) -> None:
        """Import the package. Raises ConfigError without the extra."""
        create = _package().create_dataset
        self._task = lru_cache(maxsize=64)(lambda name, options: create(name, size=1, seed=0, **json.loads(options)))

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        """Score one response. Raises VerifierError if the metadata is not from the reasoning-gym source."""
        try:
            name, options, text = (str(prompt_metadata[field]) for field in ("task", "options", "entry"))
            entry = entry_from_text(text)
            task = self._task(name, options)
        except KeyError as error:
            raise VerifierError(f"reasoning_gym: the prompt's metadata has no field {error}") from error
        except (DataError, ValueError, TypeError, AssertionError) as error:
            raise VerifierError(f"reasoning_gym: the prompt's metadata names no task: {error}") from error
        answer = last_tag(response, "answer")
        answer = response.strip() if answer is None else answer
        answer = answer[-LONGEST_ANSWER:]
        if _NOT_A_NUMBER.search(answer) and not _NOT_A_NUMBER.search(str(entry.get("answer"))):
            return 0.0  # not-a-number passes every tolerance check of the library
        try:
            return float(task.score_answer(answer, entry))
        except Exception:
            # An answer that the task cannot read is wrong. A task that cannot score its reference answer is broken.
            task.score_answer(str(entry.get("answer")), entry)
            return 0.0


def entry_to_text(entry: Mapping[str, Any]) -> str:
    """Encode one entry. Raises DataError with the type of a value that has no JSON form."""
    return json.dumps(_plain(entry), ensure_ascii=False)


def entry_from_text(text: str) -> dict[str, Any]:
    """Decode one entry. Raises DataError if the text is not an encoded entry."""
    try:
        value = _rich(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"not an encoded entry: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"not an encoded entry: {type(value).__name__}")
    return value


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [_plain(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {_TAG: "set", "items": sorted((_plain(item) for item in value), key=repr)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != _TAG for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return {_TAG: "dict", "items": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if hasattr(value, "item"):  # numpy scalars
        return _plain(value.item())
    raise DataError(f"reasoning-gym entry: a value of type {type(value).__name__} has no JSON form")


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: _rich(item) for key, item in value.items()}
        case "tuple":
            return tuple(_rich(item) for item in value["items"])
        case "set":
            return {_rich(item) for item in value["items"]}
        case "dict":
            return {_rich(key): _rich(item) for key, item in value["items"]}
        case other:
            raise ValueError(f"unknown tag {other!r}")
