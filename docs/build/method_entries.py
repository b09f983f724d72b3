"""Entries of the reference pages about methods of the curriculum and the trainer."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from docs.build.field_rows import FieldRow, field_tables
from rollmesh.config.advantage_methods import AdvantageMethod
from rollmesh.config.loss_methods import LossMethod
from rollmesh.config.methods import Method, Point
from rollmesh.config.old_logprob_methods import OldLogprobMethod
from rollmesh.user_code import load_target


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodEntry:
    """One method as text."""

    name: str
    paragraphs: tuple[str, ...]
    """What it computes, what it needs, its source."""
    rows: tuple[FieldRow, ...]
    """Its options."""
    example: str
    """Part of a run file."""


def method_entries(point: Point[Any]) -> list[MethodEntry]:
    """Return the entries of a point."""
    return [
        MethodEntry(
            name=name,
            paragraphs=(*_definition(point, name), *_needs(method), _source(method)),
            rows=tuple(row for table in field_tables(method.options.model_json_schema()) for row in table.rows),
            example=run_file_part(point.example(name)),
        )
        for name, method in point.methods.items()
    ]


def _definition(point: Point[Any], name: str) -> list[str]:
    method, target = point.methods[name], point.target(name)
    if isinstance(method, OldLogprobMethod):
        return [f"`pi_old` of a token: {method.value.replace('``', '`')}."]
    text = inspect.getdoc(load_target(target, "")) if target else ""
    paragraphs = (text or "").partition(">>>")[0].split("\n\n")
    return [" ".join(paragraph.split()).replace("``", "`") for paragraph in paragraphs if paragraph.strip()]


def _needs(method: Method) -> Iterator[str]:
    """Yield what a row says beyond source and options."""
    if isinstance(method, LossMethod):
        bounds = " and ".join(f"{bound:g}" for bound in method.bounds or ()) or "none"
        dual = "dual clip" if method.has_dual_clip else "no dual clip"
        yield f"Bounds: {bounds}, {dual}. Aggregation: `{method.aggregation}`."
    if isinstance(method, AdvantageMethod):
        if method.aggregation:
            yield f"It requires `aggregation: {method.aggregation}`."
        if method.needs_policy:
            other = " and one of `kl_reference_version`" if method.needs_reference else ""
            yield f"It needs a pass of the policy at the start of the step{other}."


def _source(method: Method) -> str:
    return f"Source: {method.source}." + (f" Differs: {method.deviation}." if method.deviation else "")


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
