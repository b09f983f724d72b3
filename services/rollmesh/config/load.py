"""Read a run file: YAML, then ROLLMESH_* environment variables, then ``--set a.b=c``; the last one wins."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rollmesh.config.run import RunConfig
from rollmesh.errors import ConfigError

_ENV_PREFIX = "ROLLMESH_"
_ENV_NOT_CONFIG = frozenset({"ROLLMESH_RUN_FILE"})


def load_run_config(
    path: str | Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> RunConfig:
    """Load and validate a run file.

    ``overrides`` are ``a.b=c`` strings with YAML values; ``environ`` defaults to the process's and is read as
    ``ROLLMESH_A__B=c``. Raises ConfigError naming every wrong field, its value and what is allowed.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a mapping of sections at the top, got {type(data).__name__}")
    for name, value in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(_ENV_PREFIX) and name not in _ENV_NOT_CONFIG:
            keys = name.removeprefix(_ENV_PREFIX).lower().split("__")
            _set(data, keys, yaml.safe_load(value), name)
    for item in overrides:
        dotted, separator, value = item.partition("=")
        if not separator:
            raise ConfigError(f"--set {item}: expected a.b=value")
        _set(data, dotted.strip().split("."), yaml.safe_load(value), f"--set {item}")
    return validate_run_config(data, str(file))


def validate_run_config(data: Mapping[str, Any], origin: str) -> RunConfig:
    """Validate an already parsed run file; ``origin`` opens the error message."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        lines = [f"{origin}: {error.error_count()} problem(s)"]
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"]) or "(combination)"
            value = problem.get("input")
            seen = "" if isinstance(value, dict) else f" (got {value!r})"
            lines.append(f"  {where}: {problem['msg'].removeprefix('Value error, ')}{seen}")
        raise ConfigError("\n".join(lines)) from error


def write_run_config(config: RunConfig, path: str | Path) -> None:
    """Write the resolved run file without its secrets: what every service of the run reads.

    Services take the secrets from the environment (``ROLLMESH_STORE__PASSWORD``, ``ROLLMESH_CHECKPOINTS__SECRET``).
    """
    data = config.model_dump(mode="json", exclude={"store": {"password"}, "checkpoints": {"secret"}})
    Path(path).write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def _set(data: dict[str, Any], keys: Sequence[str], value: Any, origin: str) -> None:
    node = data
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{origin}: {key} is a value, not a section")
        node = child
    node[keys[-1]] = value
