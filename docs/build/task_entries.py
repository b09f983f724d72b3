"""Entries of the reference pages about verifiers, prompt sources and environments."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from docs.build.field_rows import REQUIRED, FieldRow, field_tables, prose
from docs.build.method_entries import as_yaml
from docs.build.verifier_examples import VERIFIER_EXAMPLES, VerifierExample
from rollmesh.config.data import (
    CountdownSource,
    JsonlSource,
    MixtureSource,
    ParquetSource,
    PythonSource,
    ReasoningGymSource,
    SourceSection,
)
from rollmesh.tasks.environments.environment_protocol import BUILT_IN as ENVIRONMENTS
from rollmesh.tasks.environments.turn_shape import TurnShape
from rollmesh.tasks.verifiers.extraction import make_extractor
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN as VERIFIERS
from rollmesh.tasks.verifiers.verifier_protocol import built_in_class
from rollmesh.user_code import load_target

_SOURCES: Mapping[type[SourceSection], Mapping[str, Any]] = {
    CountdownSource: {"type": "countdown", "min_numbers": 5, "max_numbers": 8},
    JsonlSource: {"type": "jsonl", "path": "data/train.jsonl", "prompt_field": "question", "chat": True},
    ParquetSource: {"type": "parquet", "path": "data/train.parquet"},
    ReasoningGymSource: {"type": "reasoning_gym", "task": "chain_sum", "options": {"max_terms": 4}},
    PythonSource: {"type": "python", "target": "my_data:rows", "options": {"split": "train"}},
    MixtureSource: {
        "type": "mixture",
        "parts": [
            {"name": "math", "weight": 0.7, "source": {"type": "jsonl", "path": "math.jsonl"}},
            {"name": "code", "weight": 0.3, "source": {"type": "jsonl", "path": "code.jsonl"}},
        ],
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One keyword of a constructor."""

    name: str
    type: str
    default: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry:
    """A verifier or an environment as text."""

    about: str
    options: tuple[Option, ...]
    options_about: str
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierEntry(PartEntry):
    """A verifier as text."""

    timeout: str
    metadata: str
    response: str
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """A prompt source as text."""

    type: str
    meaning: str
    rows: tuple[FieldRow, ...]
    example: str


_SHAPE = "\n\n" + inspect.cleandoc((TurnShape.__doc__ or "").partition("\n")[2]).replace("``", "`")
"""Meaning of the options that environments of other packages share."""


def verifier_entries() -> dict[str, VerifierEntry]:
    """Return the built-in verifiers by name."""
    return {name: _verifier(name) for name in VERIFIERS}


def environment_entries() -> dict[str, PartEntry]:
    """Return the built-in environments by name."""
    return {
        name: PartEntry(
            about=_text(inspect.getdoc(made)),
            options=tuple(_options(made)),
            options_about=_about_options(made)
            + (_SHAPE if "shape" in inspect.signature(made.__init__).parameters else ""),
            example=as_yaml({"rollout": {"program": "environment", "environment": name}}),
        )
        for name, made in ((name, load_target(target, name)) for name, target in ENVIRONMENTS.items())
    }


def source_entries() -> list[SourceEntry]:
    """Return the prompt sources in the order of the run file's section."""
    entries = []
    for section, example in _SOURCES.items():
        schema = section.model_json_schema()
        rows = tuple(row for table in field_tables(schema) for row in table.rows)
        rows += tuple(row for table in _parts(schema) for row in table)
        entries.append(
            SourceEntry(
                type=str(section.model_fields["type"].default),
                meaning=prose(section.__doc__ or ""),
                rows=rows,
                example=as_yaml({"data": {"source": example}}),
            )
        )
    return entries


def extractor_names() -> str:
    """Return the names of ``extract`` with their meanings."""
    return _text(make_extractor.__doc__)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[FieldRow, ...]]:
    part = schema.get("$defs", {}).get("MixturePart")
    for table in field_tables(part) if part else ():
        yield tuple(
            FieldRow(name=f"parts.{row.name}", type=row.type, default=row.default, unit=row.unit, meaning=row.meaning)
            for row in table.rows
        )


def _verifier(name: str) -> VerifierEntry:
    made, example = built_in_class(name), VERIFIER_EXAMPLES.get(name, VerifierExample(response="", reward=None))
    means_wrong = getattr(made, "timeout_means_wrong", None)
    timeout: Mapping[bool | None, str] = {
        True: "means a wrong answer, reward 0",
        False: "has the outcome of `reward.on_timeout`",
        None: "means a wrong answer if it does for all parts",
    }
    reward: dict[str, Any] = {"verifier": name} | ({"options": dict(example.options)} if example.options else {})
    return VerifierEntry(
        about=_text(made.__doc__),
        options=tuple(_options(made)),
        options_about=_about_options(made),
        example=as_yaml({"reward": reward}),
        timeout=timeout[means_wrong],
        metadata=json.dumps(dict(example.metadata)),
        response=example.response,
        reward=example.reward,
    )


def _options(made: Any) -> Iterator[Option]:
    for parameter in inspect.signature(made).parameters.values():
        required = parameter.default is inspect.Parameter.empty
        yield Option(
            name=parameter.name,
            type=_type_text(parameter.annotation).replace("|", "\\|"),
            default=REQUIRED if required else f"`{json.dumps(parameter.default)}`",
        )


def _type_text(annotation: Any) -> str:
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(_type_text, get_args(annotation)))
    return re.sub(r"collections\.abc\.|typing\.", "", inspect.formatannotation(annotation)).replace("NoneType", "None")


def _about_options(made: Any) -> str:
    """Return the docstring of a constructor without its errors, which every constructor has."""
    return re.sub(r"\s*Raises ConfigError[^.]*\.", "", _text(made.__init__.__doc__))


def _text(docstring: str | None) -> str:
    return inspect.cleandoc(docstring or "").replace("``", "`")
