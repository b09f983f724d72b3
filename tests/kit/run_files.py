"""Run files in the words of the command line."""

from __future__ import annotations

from typing import Any

from rollmesh.config import RunConfig
from rollmesh.config.load import validate_run_config
from rollmesh.config.yaml_text import parse_yaml


def run_config(fields: str = "", base: str = "name=trial folder=runs/trial model.path=models/tiny") -> RunConfig:
    """The shortest run file with further fields, ``a.b=c`` with spaces between them; a value has none."""
    data: dict[str, Any] = {}
    for field in f"{base} {fields}".split():
        dotted, _, text = field.partition("=")
        *sections, name = dotted.split(".")
        node = data
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = parse_yaml(text)
    return validate_run_config(data, "run.yaml")
