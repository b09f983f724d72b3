"""Models and run files that ship with rollmesh: ``recipe:NAME`` in ``model.path``."""

import re
from importlib.resources import files
from pathlib import Path

from rollmesh.errors import ConfigError

_SCHEME = "recipe:"
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
"""Name of a model on the Hugging Face Hub, for example Qwen/Qwen3-0.6B."""


def resolve_model(path: str, field: str = "model.path") -> Path:
    """Return the folder of a model: ``recipe:NAME`` is a packaged model, any other value a path.

    Raises ConfigError when the folder does not exist or contains no config.json.
    """
    folder = recipe_file(path.removeprefix(_SCHEME), "model") if path.startswith(_SCHEME) else Path(path)
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{field}={path}: {folder} contains an adapter (adapter_config.json), and a run starts from full "
            "weights; merge it into its base with peft's merge_and_unload (of a run: rollmesh export), and name the "
            "merged folder"
        )
    if not (folder / "config.json").is_file():
        name = folder.name
        remedy = (
            f"download it first: hf download {path} --local-dir models/{name}; then set {field}: models/{name}"
            if _HUB_NAME.match(path) and not folder.exists()
            else "set a Hugging Face folder on this machine, or recipe:NAME"
        )
        raise ConfigError(f"{field}={path}: {folder} contains no config.json; {remedy}")
    return folder


def recipe_file(recipe: str, name: str) -> Path:
    """Return a file or folder of a recipe; raises ConfigError, which lists the existing recipes."""
    root = Path(str(files("rollmesh"))) / "recipes"
    found = root / recipe / name
    if not found.exists():
        existing = sorted(p.name for p in root.iterdir() if (p / "model").is_dir())
        raise ConfigError(f"recipe:{recipe}: it has no {name}; existing recipes: {', '.join(existing) or 'none'}")
    return found
