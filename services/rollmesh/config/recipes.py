"""Models and run files that ship with rollmesh: ``recipe:NAME`` in ``model.path``."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from rollmesh.errors import ConfigError

_SCHEME = "recipe:"


def resolve_model(path: str) -> Path:
    """Folder of a model: ``recipe:NAME`` is the packaged one, anything else a path.

    Raises ConfigError when there is no such folder or it holds no config.json.
    """
    folder = recipe_file(path.removeprefix(_SCHEME), "model") if path.startswith(_SCHEME) else Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path={path}: {folder} holds no config.json; "
            "give a Hugging Face folder on this machine, or recipe:NAME"
        )
    return folder


def recipe_file(recipe: str, name: str) -> Path:
    """A file or folder of a recipe; ConfigError names the recipes there are."""
    root = Path(str(files("rollmesh"))) / "recipes"
    found = root / recipe / name
    if not found.exists():
        there = sorted(p.name for p in root.iterdir() if (p / "model").is_dir())
        raise ConfigError(f"recipe:{recipe}: no {name} there; recipes: {', '.join(there) or 'none'}")
    return found
