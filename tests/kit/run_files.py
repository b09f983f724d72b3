"""Run files in the words of the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rollmesh.config import RunConfig, load_run_config
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


def write_run(folder: Path, data: dict[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Write the run file of a folder, which has the run's name, with values of its sections replaced; and load it."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"name": folder.name, "folder": str(folder), **data}
    data |= {name: {**data.get(name, {}), **section} for name, section in sections.items()}
    (folder / "run.yaml").write_text(yaml.safe_dump(data))
    return load_run_config(folder / "run.yaml", environ={})


def made_run(folder: str | Path = "runs/trial", **sections: Any) -> RunConfig:
    """The shortest run file with further sections."""
    least = {"name": "trial", "folder": str(folder), "model": {"path": "recipe:countdown"}}
    return RunConfig.model_validate(least | sections)
