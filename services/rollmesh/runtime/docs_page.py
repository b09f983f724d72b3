"""Documentation of the API as one plain page, made from its OpenAPI document without external resources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import ChainableUndefined, Environment, PackageLoader


def docs_page(document: Mapping[str, Any]) -> str:
    """Return HTML with every operation and every schema."""
    environment = Environment(
        loader=PackageLoader("rollmesh.runtime"),
        autoescape=True,
        undefined=ChainableUndefined,  # most parts of an OpenAPI document are optional
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("docs_page.html.j2").render(document)
