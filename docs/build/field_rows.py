"""Rows of a table of fields, from the JSON Schema of a section."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]

_UNITS: Mapping[str, str] = {
    "seconds": "s",
    "bytes": "bytes",
    "tokens": "tokens",
    "steps": "train steps",
    "versions": "policy versions",
    "batches": "batches",
    "groups": "groups",
    "members": "trajectories",
    "turns": "turns",
    "ratio": "share, 0 to 1",
    "share": "share, 0 to 1",
}
"""Units by the last word of a field's name."""
_TYPES: Mapping[str, str] = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "array": "list",
    "object": "mapping",
    "null": "null",
}
_BOUNDS: Mapping[str, str] = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRow:
    """One field as text."""

    name: str
    type: str
    default: str
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTable:
    """The fields of one section."""

    path: str
    """Dotted name of the section; empty for the top of the run file."""
    meaning: str
    rows: tuple[FieldRow, ...]


def field_tables(schema: Schema, path: str = "", meaning: str = "") -> Iterator[FieldTable]:
    """Yield the table of a schema's own fields, then those of its sections, in the order of the file."""
    return _tables(schema, schema.get("$defs", {}), path, meaning or schema.get("description", ""))


def _tables(schema: Schema, defs: Schema, path: str, meaning: str) -> Iterator[FieldTable]:
    sections: list[tuple[str, Schema]] = []
    rows = []
    for name, field in schema.get("properties", {}).items():
        if section := _section(field, defs):
            sections.append((name, section))
        if not section or "default" in field:
            rows.append(_row(name, field, name in schema.get("required", ())))
    if rows:
        yield FieldTable(path=path, meaning=prose(meaning), rows=tuple(rows))
    for name, section in sections:
        about = schema["properties"][name].get("description") or section.get("description", "")
        yield from _tables(section, defs, f"{path}.{name}" if path else name, about)


def _section(field: Schema, defs: Schema) -> Schema | None:
    """Return the schema of a field that is one section, or a section or null; None for any other field."""
    references = [kind["$ref"] for kind in (field, *field.get("anyOf", ())) if "$ref" in kind]
    found: Schema | None = defs[references[0].rpartition("/")[2]] if len(references) == 1 else None
    return found if found is not None and "properties" in found else None


def _row(name: str, field: Schema, required: bool) -> FieldRow:
    return FieldRow(
        name=name,
        type=_type(field),
        default=REQUIRED if required else _default(field),
        unit=_UNITS.get(name.rpartition("_")[2], ""),
        meaning=prose(field.get("description", "")),
    )


def _default(field: Schema) -> str:
    if "default" in field:
        return f"`{json.dumps(field['default'])}`"
    return "`{}`" if field.get("type") == "object" else "`[]`" if field.get("type") == "array" else ""


def _type(field: Schema) -> str:
    if options := field.get("anyOf"):
        return " or ".join(_type(option) for option in options)
    if field.get("oneOf"):
        return "section by its `type`"
    if "$ref" in field:
        return "section"
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    kind = "secret text" if field.get("format") == "password" else _TYPES.get(field.get("type", ""), "any value")
    if field.get("type") == "array" and "items" in field:
        kind = f"list of: {_type(field['items'])}"
    bounds = " and ".join(f"{sign} {field[key]:,}" for key, sign in _BOUNDS.items() if key in field)
    return f"{kind} {bounds}".strip()


def prose(text: str) -> str:
    """Return a docstring as one line of Markdown."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")
