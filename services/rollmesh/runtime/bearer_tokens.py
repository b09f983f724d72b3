"""Bearer tokens of the mesh: the token that clients send and the tokens that servers accept."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from rollmesh.config.security import SecurityConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.file_stamp import Stamp, stamp_of
from rollmesh.runtime.logging import get_logger

_CHECK_INTERVAL_SECONDS = 1.0
"""Minimum time between two checks of a token file."""

MISSING_TOKEN = "security: the call carries no bearer token"
WRONG_TOKEN = "security: this service does not accept the bearer token"


class Tokens:
    """Tokens from the run file, or from a file that is read again when it changes."""

    def __init__(self, tokens: Sequence[str], file: Path | None = None) -> None:
        self._tokens = tuple(tokens)
        self._file = file
        self._stamp: Stamp | None = None
        self._next_check = 0.0
        self.clock: Callable[[], float] = time.monotonic
        if file is not None:
            self._tokens = self._read(file)

    @classmethod
    def from_config(cls, config: SecurityConfig) -> Self | None:
        """Return the configured tokens, None without any; raises ConfigError for an invalid token file."""
        if config.token_file is not None:
            return cls((), Path(config.token_file))
        return cls((config.token.get_secret_value().strip(),)) if config.token is not None else None

    @property
    def sent(self) -> str:
        """Token that clients of this process send."""
        self._refresh()
        return self._tokens[0]

    def refusal(self, authorization: str) -> str:
        """Return the reason to reject an ``Authorization`` value; empty when it is accepted.

        The comparison takes the same time for every token.
        """
        self._refresh()
        if not authorization:
            return MISSING_TOKEN
        given = authorization.encode()
        accepted = [hmac.compare_digest(given, f"Bearer {token}".encode()) for token in self._tokens]
        return "" if any(accepted) else WRONG_TOKEN

    def _refresh(self) -> None:
        if self._file is None or self.clock() < self._next_check:
            return
        self._next_check = self.clock() + _CHECK_INTERVAL_SECONDS
        try:
            if stamp_of(self._file) != self._stamp:
                self._tokens = self._read(self._file)
                get_logger("security").info("tokens_read_again", file=str(self._file), accepted=len(self._tokens))
        except (OSError, ConfigError) as error:
            # Keep the old tokens: a file that is being replaced must not reject every client.
            get_logger("security").error("token_file_not_read", file=str(self._file), message=str(error))

    def _read(self, file: Path) -> tuple[str, ...]:
        try:
            stamp = stamp_of(file)
            tokens = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"security.token_file={file}: cannot be read: {error}") from error
        if not tokens:
            raise ConfigError(f"security.token_file={file}: contains no token; write one token per line")
        self._stamp = stamp
        return tokens
