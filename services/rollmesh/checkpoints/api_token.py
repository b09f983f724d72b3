"""Bearer token of the HTTP APIs: set in the run file, or generated once per run and stored in the run folder (0600)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from rollmesh.checkpoints.sealing import random_once
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError

TOKEN_FILE = "gateway-token"


def api_token(config: RunConfig) -> str:
    """Return the token of the run, and generate it if it is missing; ConfigError if it cannot be stored."""
    if config.gateway.token is not None:
        return config.gateway.token.get_secret_value().strip()
    try:
        return random_once(Path(config.folder) / TOKEN_FILE)
    except OSError as error:
        raise ConfigError(
            f"gateway.token is not set, and a generated one cannot be stored in folder={config.folder}: {error}; "
            "set ROLLMESH_GATEWAY__TOKEN"
        ) from error


def known_token(config: RunConfig) -> str | None:
    """Return the token if this process can read it; None if only the services have it."""
    if config.gateway.token is not None:
        return config.gateway.token.get_secret_value().strip()
    try:
        return (Path(config.folder) / TOKEN_FILE).read_text(encoding="ascii").strip()
    except OSError:
        return None


def page_link(config: RunConfig, url: str) -> str:
    """Return the address of the page with the token, which opens the actions; the address alone for no known token."""
    token = known_token(config)
    return link_with_token(url, token) if token else url


def link_with_token(url: str, token: str) -> str:
    """Return the address of the page with a token."""
    return f"{url}?token={quote(token, safe='')}"
