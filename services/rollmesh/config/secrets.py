"""Secrets of the run file: the fields of type ``SecretStr``, which processes receive only in their environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import reduce
from typing import Any

from pydantic import BaseModel, SecretStr

from rollmesh.config.run import RunConfig
from rollmesh.user_code import CODE_FOLDER

ENV_PREFIX = "ROLLMESH_"
"""Prefix of the environment variables that override fields: ``ROLLMESH_A__B`` is ``a.b``."""


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
