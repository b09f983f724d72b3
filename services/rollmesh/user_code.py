"""Objects of a user's code, which a run file names as ``module:attribute``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollmesh.errors import ConfigError

CODE_FOLDER = "ROLLMESH_CODE_FOLDER"
"""Environment variable with the folder of the run file, for the services of the run and their processes."""
_RECORD = "code-folder"


def search_beside(run_file: Path) -> None:
    """Let this process and those that it starts find modules beside the run file.

    For the copy in a run folder that is the run file from which the run was started, if its folder is recorded.
    """
    folder = run_file.resolve().parent
    record = folder / _RECORD
    os.environ[CODE_FOLDER] = record.read_text(encoding="utf-8") if record.exists() else str(folder)


def record_code_folder(run_folder: Path) -> None:
    """Record the folder of the run file in the run folder, for ``search_beside``; it stays as it is if none is set."""
    record, folder = run_folder / _RECORD, os.environ.get(CODE_FOLDER)
    # Services that start at once record the same folder: none of them empties the file that another one reads.
    if folder and not (record.exists() and record.read_text(encoding="utf-8") == folder):
        record.write_text(folder, encoding="utf-8")


def load_target(target: str, field: str) -> Any:
    """Import ``module:attribute``; error messages name ``field``, its field in the run file.

    The folder of the run file and the working directory, where ``rollmesh up`` was started, are searched for modules
    that are not installed.
    Raises ConfigError if the module or the attribute does not exist. Errors inside the module propagate.
    """
    module_name, separator, attribute = target.partition(":")
    if not separator or not module_name or not attribute:
        raise ConfigError(f"{field}: {target!r} must have the form module:name")
    try:
        module = _import(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise
        raise ConfigError(
            f"{field}: no module {error.name!r} (installed, on PYTHONPATH or in {' or '.join(_folders())}) for "
            f"{target!r}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"{field}: module {module_name!r} has no {attribute!r}") from error


def load_function(
    target: str, field: str, inputs: tuple[str, ...], options: Mapping[str, Any], options_field: str = ""
) -> Callable[..., Any]:
    """Import a function of ``inputs``, which takes the options as keywords.

    Raises ConfigError, naming ``field``, if it does not exist or its signature does not fit. ``options_field`` is
    ``FIELD_options`` unless given.
    """
    function: Any = load_target(target, field)
    if not callable(function):
        raise ConfigError(f"{field}: {target} must be a function of ({', '.join(inputs)})")
    try:
        inspect.signature(function).bind(*inputs, **options)
    except (TypeError, ValueError) as error:
        # ValueError: a function of a compiled library has no signature.
        called = ", ".join((*inputs, f"**{options_field or f'{field}_options'}"))
        raise ConfigError(f"{field}: {target} cannot be called as f({called}): {error}") from error
    found: Callable[..., Any] = function
    return found


def _folders() -> list[str]:
    """Return the folders that are searched for modules that are not installed."""
    beside = os.environ.get(CODE_FOLDER)
    return list(dict.fromkeys(([beside] if beside else []) + [os.getcwd()]))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        added = [folder for folder in _folders() if folder not in sys.path]
        if error.name != name.partition(".")[0] or not added:
            raise
        sys.path.extend(added)
        importlib.invalidate_caches()
        return importlib.import_module(name)
