"""Reader of run files: YAML, then ROLLMESH_* environment variables, then ``--set a.b=c``; the last value counts."""

import difflib
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from rollmesh.characters import half_characters
from rollmesh.config.run import RunConfig
from rollmesh.config.section import Section
from rollmesh.config.yaml_text import DuplicateKeys, dump_yaml, field_value, parse_yaml
from rollmesh.errors import ConfigError
from rollmesh.file_writes import writing
from rollmesh.user_code import CODE_FOLDER

C = TypeVar("C", bound=Section)

ENV_PREFIX = "ROLLMESH_"
"""Prefix of the environment variables that override fields: ``ROLLMESH_A__B`` is ``a.b``."""
_LEFT_OUT: Mapping[tuple[str, str], str] = {
    ("model", "trust_remote_code"): "only model code of transformers is used",
}
"""Fields that other systems have and a run file does not, with the reason."""
_SENTENCES: Mapping[tuple[str, str], str] = {
    ("name", "string_pattern_mismatch"): "expected 1 to 63 lower-case letters, digits, - or _, with a letter or digit "
    "first, for example my-run",
    ("data.source", "union_tag_not_found"): "has no type; write type: with a space after the colon, and one of "
    "countdown, jsonl, parquet, reasoning_gym, python, mixture",
}
"""Words for errors of pydantic that name no remedy, by field and error type."""
_ENV_NOT_CONFIG = frozenset({"ROLLMESH_RUN_FILE", CODE_FOLDER})


def load_run_config(
    path: str | Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> RunConfig:
    """Load and validate a run file.

    ``overrides`` are ``a.b=c``: a field of text takes c as it is, others read it as YAML. ``environ`` defaults to the
    environment of the process and is read as ``ROLLMESH_A__B=c``. Raises ConfigError, which names every invalid field,
    its value and the allowed ones.
    """
    return load_config(RunConfig, path, overrides, os.environ if environ is None else environ)


def load_config(kind: type[C], path: str | Path, overrides: Sequence[str], environ: Mapping[str, str]) -> C:
    """Load and validate a file of any ``kind`` as ``load_run_config`` does a run file."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    try:
        data = parse_yaml(text, kind)
    except DuplicateKeys as error:
        raise ConfigError(f"{file}: {error}; keep one of them") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a mapping of sections at the top, got {type(data).__name__}")
    origins = {}
    for keys, value, origin in _given(environ, overrides):
        origins[tuple(keys)] = origin
        _set(kind, data, keys, value, origin)
    return _validated(kind, data, str(file), origins)


def _given(environ: Mapping[str, str], overrides: Sequence[str]) -> Iterator[tuple[list[str], str, str]]:
    """Yield keys, text and origin of every value beside the file, in the order in which they are applied."""
    for name, value in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and name not in _ENV_NOT_CONFIG:
            keys = name.removeprefix(ENV_PREFIX).lower().split("__")
            yield keys, value, f"the environment variable {name}"
    for item in overrides:
        dotted, separator, value = item.partition("=")
        if not separator:
            raise ConfigError(f"--set {item}: expected a.b=value")
        yield dotted.strip().split("."), value, f"--set {dotted.strip()}"


def _set(kind: type[Section], data: dict[str, Any], keys: Sequence[str], text: str, origin: str) -> None:
    node = data
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{origin}: {key} is a value, not a section")
    try:
        node[keys[-1]] = text if keys[-1] in _SECRETS else field_value(kind, keys, text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: {text!r} is not a YAML value: {error}") from error


def text_override(field: str, text: object) -> str:
    """Return the override that gives a field this text as it is, also ``null``, quotes and spaces around it."""
    return f"{field}={json.dumps(str(text), ensure_ascii=False)}"


def validate_run_config(data: Mapping[str, Any], origin: str) -> RunConfig:
    """Validate a parsed run file; ``origin`` begins the error message."""
    return _validated(RunConfig, data, origin, {})


def _validated(kind: type[C], data: Mapping[str, Any], origin: str, origins: Mapping[tuple[str, ...], str]) -> C:
    """Validate a parsed file; ``origins`` maps the keys of values from elsewhere (environment) to their place."""
    for path, half in half_characters(data):
        raise ConfigError(f"{origin}: {'.'.join(path)}: {half}{_place(path, origins)}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = [f"{origin}: {error.error_count()} problem(s)"]
        for problem in error.errors():
            lines.append(f"  {_problem(kind, problem)}{_place(problem['loc'], origins)}")
        raise ConfigError("\n".join(lines)) from error


def _place(loc: Sequence[object], origins: Mapping[tuple[str, ...], str]) -> str:
    """Name the place of a value that the run file does not contain."""
    keys = tuple(str(part) for part in loc)
    found = [origin for path, origin in origins.items() if keys[: len(path)] == path or path[: len(keys)] == keys]
    return f", set by {' and '.join(found)}" if found and keys else ""


def _problem(kind: type[Section], problem: ErrorDetails) -> str:
    """Format a problem: the field, the problem, and the value unless it is a secret or a whole section."""
    keys = [str(part) for part in problem["loc"]]
    where = ".".join(keys) or "(combination)"
    if sentence := _SENTENCES.get((where, problem["type"])):
        return f"{where}: {sentence} (got {problem.get('input')!r})"
    value = problem.get("input")
    hidden = isinstance(value, dict) or bool(_SECRETS.intersection(keys))
    seen = "" if hidden else f" (got {value!r})"
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key{_similar(kind, keys)}{seen}"
    words = problem["msg"].removeprefix("Value error, ").replace("valid tuple", "list").replace("Tuple", "List")
    return f"{where}: {words}{seen}"


def _similar(kind: type[BaseModel], keys: Sequence[str]) -> str:
    """Return a hint for an unknown key: why there is none, the closest key of its section, or all keys."""
    if len(keys) == 2 and (reason := _LEFT_OUT.get((keys[0], keys[1]))):
        return f"; {reason}"
    section = kind
    for key in keys[:-1]:
        field = section.model_fields.get(key)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return ""
        section = field.annotation
    names = sorted(section.model_fields)
    near = difflib.get_close_matches(keys[-1], names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(names)}"


def run_file_text(config: Section) -> str:
    """Return the resolved run file without its secrets."""
    data: Any = config.model_dump(mode="json")
    for *sections, name in _secret_paths(type(config)):
        del reduce(getitem, sections, data)[name]
    return dump_yaml(data)


def write_run_config(config: Section, path: str | Path) -> None:
    """Write the resolved run file without its secrets, for the services of the run.

    Services read the secrets from the environment, as ``secret_environment`` returns them.
    """
    text = run_file_text(config)
    # Atomic: ranks of the trainer write the file at the same time, and commands may be reading it. The process id is
    # not unique: in pods that share the folder every process has id 1.
    temporary = Path(f"{path}.{uuid.uuid4().hex}.tmp")
    try:
        with writing(path):
            temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _secret_paths(section: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if kind == SecretStr | None:
            yield (*above, name)
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _secret_paths(kind, (*above, name))


SECRETS = tuple(_secret_paths(RunConfig))
"""Sections and name of every secret field."""


def secret_environment(config: RunConfig) -> dict[str, str]:
    """Return the secrets that are set, by the environment variable from which a process reads each."""
    run: Any = config
    values = {ENV_PREFIX + "__".join(path).upper(): reduce(getattr, path, run) for path in SECRETS}
    return {variable: secret.get_secret_value() for variable, secret in values.items() if secret is not None}


def inherited_environment() -> dict[str, str]:
    """Return the variables of this process that a process started by it inherits: all but those of fields.

    The resolved run file of a service contains their values, and those of ``--set``, which count more. A process of
    user code must not read the secrets among them.
    """
    return {name: value for name, value in os.environ.items() if name == CODE_FOLDER or not name.startswith(ENV_PREFIX)}


_SECRETS = frozenset(name for *_, name in SECRETS)
"""Secret fields: their values are not parsed as YAML and never shown."""
