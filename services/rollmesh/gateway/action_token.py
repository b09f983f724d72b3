"""The token of the actions: the run file's, or one made per run and kept in the run folder (mode 0600)."""

from __future__ import annotations

from pathlib import Path

from rollmesh.checkpoints.sealing import random_once
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError

TOKEN_FILE = "gateway-token"


def gateway_token(config: RunConfig) -> str:
    """The run's token, made if need be; ConfigError when it can be kept nowhere."""
    if config.gateway.token is not None:
        return config.gateway.token.get_secret_value().strip()
    try:
        return random_once(Path(config.folder) / TOKEN_FILE)
    except OSError as error:
        raise ConfigError(
            f"gateway.token is not set, and none can be kept in folder={config.folder}: {error}; "
            "set ROLLMESH_GATEWAY__TOKEN"
        ) from error


def known_token(config: RunConfig) -> str | None:
    """The run's token as far as this process can know it: None when it was given to the gateway alone."""
    if config.gateway.token is not None:
        return config.gateway.token.get_secret_value().strip()
    try:
        return (Path(config.folder) / TOKEN_FILE).read_text(encoding="ascii").strip()
    except OSError:
        return None
