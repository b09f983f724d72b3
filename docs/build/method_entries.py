"""Entries of the reference pages about methods of the curriculum and the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from docs.build.field_rows import FieldRow, field_tables, prose
from rollmesh.config.methods import Method
from rollmesh.config.yaml_text import parse_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodEntry:
    """One method as text."""

    name: str
    source: str
    rows: tuple[FieldRow, ...]
    """Its options."""
    example: str
    """Part of a run file."""


def method_entries(
    point: str, methods: Mapping[str, Method], settings: Mapping[str, Sequence[str]]
) -> list[MethodEntry]:
    """Return the entries of a point; ``settings`` has the overrides of each method by ``point/method``."""
    # The two budgets have the same methods.
    key = {"budget": "token_budget", "replay": "replay"}.get(point, point)
    return [
        MethodEntry(
            name=name,
            source=prose(f"Source: {method.source}." + (f" Differs: {method.deviation}." if method.deviation else "")),
            rows=tuple(row for table in field_tables(method.options.model_json_schema()) for row in table.rows),
            example=run_file_part(settings[f"{key}/{name}"]),
        )
        for name, method in methods.items()
    ]


def run_file_part(overrides: Sequence[str]) -> str:
    """Return ``a.b=c`` overrides as a part of a run file."""
    tree: dict[str, Any] = {}
    for override in overrides:
        dotted, _, value = override.partition("=")
        *sections, field = dotted.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[field] = parse_yaml(value)
    return as_yaml(tree)


def as_yaml(tree: Mapping[str, Any]) -> str:
    """Return a part of a run file as YAML text."""
    return yaml.safe_dump(dict(tree), sort_keys=False, width=100, default_flow_style=None).rstrip()
