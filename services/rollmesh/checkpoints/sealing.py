"""Secrets of a run: the key of its seals (HMAC-SHA256 of policies, batch files, states), the token of its HTTP APIs."""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rollmesh.checkpoints.durable import link_new, make_folder, sync_folder
from rollmesh.config import RunConfig
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.file_writes import writing

SECRET_FILE = "secret"
LINEAGE_FILE = "lineage"
_CONTENT_SECONDS = 10.0
_POLL_SECONDS = 0.02


def canonical(data: Mapping[str, Any]) -> bytes:
    """Encode a mapping as canonical JSON: sorted keys, no spaces, ASCII."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def seal(secret: bytes, data: bytes) -> str:
    """Return the HMAC-SHA256 (hex) of ``data``."""
    return hmac.new(secret, data, hashlib.sha256).hexdigest()


def sealed(secret: bytes, data: bytes, tag: str) -> bool:
    """Tell whether ``tag`` is the seal of ``data``, compared in constant time."""
    return hmac.compare_digest(seal(secret, data).encode(), tag.encode())


def run_secret(folder: Path) -> bytes:
    """Return the generated secret of a run: 32 random bytes (hex) in the run folder, readable by the owner only."""
    return random_once(folder / SECRET_FILE).encode()


def lineage(root: Path) -> str:
    """Return the random identity of a checkpoint store, created at its first use. It ties the queue to the store.

    Moving the store or restoring it from a copy keeps the identity. It is not a secret.
    """
    return random_once(root / LINEAGE_FILE)


def random_once(file: Path) -> str:
    """Return the content of a file of 32 random bytes (hex), created by the first call. Raises CheckpointError."""
    text = kept_once(file, secrets.token_hex(32))
    if len(text) < 32 or not text.isascii():
        raise CheckpointError(
            f"{file}: expected at least 32 ASCII characters, found {len(text)}; restore it from a copy, or delete it "
            "if the run has never started"
        )
    return text


def kept_once(file: Path, content: str) -> str:
    """Return the ASCII content of a file, which is created for its owner, with ``content``, if it is missing.

    Safe for concurrent processes: the first process to link its file wins, and all read the same content. On a file
    system without hard links the first process to create the file wins, and the others wait for its content.
    """
    if not file.exists():
        make_folder(file.parent)
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        try:
            _write(temporary, content)
            # Another process may have written its file first; that file is used.
            if not link_new(temporary, file):
                with contextlib.suppress(FileExistsError):
                    _write(file, content)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(file.parent)
    deadline = time.monotonic() + _CONTENT_SECONDS
    while not (text := file.read_text(encoding="ascii", errors="replace").strip()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return text


def _write(file: Path, content: str) -> None:
    """Create a file for the owner only, with one write: a reader finds none of it or all."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with writing(file), os.fdopen(descriptor, "wb", buffering=0) as stream:
        stream.write(content.encode())
        os.fsync(stream.fileno())


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
        return (Path(config.folder) / TOKEN_FILE).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def page_link(config: RunConfig, url: str) -> str:
    """Return the address of the page with the token, which opens the actions; the address alone for no known token."""
    token = known_token(config)
    return link_with_token(url, token) if token else url


def link_with_token(url: str, token: str) -> str:
    """Return the address of the page with a token."""
    return f"{url}?token={quote(token, safe='')}"
