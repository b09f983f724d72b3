"""HMAC-SHA256 with the run's secret, to authenticate policies, batch files and trainer state."""

from __future__ import annotations

import contextlib
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
LINEAGE_FILE = "lineage"


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
    """Return the content of a file of 32 random bytes (hex); create the file if it is missing.

    Safe for concurrent processes: the first process to link its file wins, and all read the same content.
    """
    if not file.exists():
        make_folder(file.parent)
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(secrets.token_hex(32))
            stream.flush()
            os.fsync(stream.fileno())
        # Another process may have linked its file first; that file is used.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, file)
        temporary.unlink()
        sync_folder(file.parent)
    text = file.read_text(encoding="ascii").strip()
    if len(text) < 32:
        raise CheckpointError(f"{file}: expected at least 32 characters, found {len(text)}")
    return text
