"""HMAC-SHA256 with the run's secret: who may write policies, batch files and trainer state."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollmesh.checkpoints.durable import make_folder, sync_folder
from rollmesh.errors import CheckpointError

SECRET_FILE = "secret"


def canonical(data: Mapping[str, Any]) -> bytes:
    """The one JSON text of a mapping: sorted keys, no spaces, ASCII."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def seal(secret: bytes, data: bytes) -> str:
    """HMAC-SHA256 (hex)."""
    return hmac.new(secret, data, hashlib.sha256).hexdigest()


def sealed(secret: bytes, data: bytes, tag: str) -> bool:
    """Whether ``tag`` is the seal of ``data``, compared in constant time."""
    return hmac.compare_digest(seal(secret, data).encode(), tag.encode())


def run_secret(folder: Path) -> bytes:
    """The secret of a run that brings none: 32 random bytes (hex) in the run folder, readable by the owner only.

    Any number of processes may ask at once; the first one to link its file wins and all read the same secret.
    """
    file = folder / SECRET_FILE
    if not file.exists():
        make_folder(folder)
        temporary = folder / f".{SECRET_FILE}.{secrets.token_hex(8)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_hex(32))
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(temporary, file)
        except FileExistsError:
            return run_secret(folder)
        finally:
            temporary.unlink()
        sync_folder(folder)
    text = file.read_text(encoding="ascii").strip()
    if len(text) < 32:
        raise CheckpointError(f"{file}: expected at least 32 characters of secret, found {len(text)}")
    return text.encode()
