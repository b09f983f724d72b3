"""Documentation of the API as one plain page, made from its OpenAPI document without external resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any


def docs_page(document: Mapping[str, Any]) -> str:
    """Return HTML with every operation and every schema."""
    info = document["info"]
    lines = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(info['title'])}</title></head><body>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info.get('summary', ''))}</p>",
        "<p>Actions need <code>Authorization: Bearer TOKEN</code>; <code>rollmesh status RUN_FOLDER</code> prints the "
        "token. <a href='openapi.json'>openapi.json</a></p>",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            lines += _operation(method, path, operation)
    lines.append("<h2>Schemas</h2>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += _schema(name, schema)
    lines.append("</body></html>")
    return "\n".join(lines)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    lock = " (token)" if operation.get("security") else ""
    yield f"<h2><code>{method.upper()} {escape(path)}</code>{lock}</h2>"
    yield f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>"
    rows = [
        (parameter["name"], parameter["in"], parameter.get("description", ""), _type(parameter["schema"]))
        for parameter in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        rows.append(("body", "body", "", _type(body)))
    if rows:
        yield "<table border='1'><tr><th>name</th><th>in</th><th>meaning</th><th>type</th></tr>"
        for name, where, meaning, kind in rows:
            cells = f"<td><code>{escape(name)}</code></td><td>{escape(where)}</td><td>{escape(meaning)}</td>"
            yield f"<tr>{cells}<td>{kind}</td></tr>"
        yield "</table>"
    yield "<ul>"
    for status, response in sorted(operation["responses"].items()):
        content = response.get("content", {}).get("application/json", {}).get("schema")
        kind = f": {_type(content)}" if content else ""
        yield f"<li>{escape(status)} {escape(response.get('description', ''))}{kind}</li>"
    yield "</ul>"


def _schema(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h3 id='{escape(name)}'>{escape(name)}</h3><p>{escape(schema.get('description', ''))}</p>"
    properties = schema.get("properties", {})
    if properties:
        yield "<table border='1'><tr><th>field</th><th>type</th><th>meaning</th></tr>"
        for field, inner in properties.items():
            meaning = escape(inner.get("description", ""))
            yield f"<tr><td><code>{escape(field)}</code></td><td>{_type(inner)}</td><td>{meaning}</td></tr>"
        yield "</table>"


def _type(schema: Mapping[str, Any]) -> str:
    """Return a short description of a schema, with a link if it has a name."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    for union in ("anyOf", "oneOf", "allOf"):
        if union in schema:
            return " or ".join(_type(inner) for inner in schema[union])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(str(schema['const']))}</code>"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_type(schema['additionalProperties'])}"
    return escape(str(schema.get("type", "anything")))
