"""Entries of the reference pages about methods of the curriculum and the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from docs.build.field_rows import FieldRow, field_tables, prose
from rollmesh.config.methods import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodEntry:
    """One method as text."""

    name: str
    source: str
    rows: tuple[FieldRow, ...]
    """Its options."""
    example: str
    """Part of a run file."""


def method_entries(point: Point[Any]) -> list[MethodEntry]:
    """Return the entries of a point."""
    return [
        MethodEntry(
            name=name,
            source=prose(f"Source: {method.source}." + (f" Differs: {method.deviation}." if method.deviation else "")),
            rows=tuple(row for table in field_tables(method.options.model_json_schema()) for row in table.rows),
            example=run_file_part(point.example(name)),
        )
        for name, method in point.methods.items()
    ]


def run_file_part(fields: Mapping[str, Any]) -> str:
    """Return values by dotted field as a part of a run file."""
    tree: dict[str, Any] = {}
    for dotted, value in fields.items():
        *sections, field = dotted.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[field] = value
    return as_yaml(tree)


def as_yaml(tree: Mapping[str, Any]) -> str:
    """Return a part of a run file as YAML text."""
    return yaml.safe_dump(dict(tree), sort_keys=False, width=100, default_flow_style=None).rstrip()
