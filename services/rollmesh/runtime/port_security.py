"""Security of the ports of one process: certificates, tokens, both or neither."""

import hmac
import ipaddress
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import grpc.aio

from rollmesh.config.services import SecurityConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tls import Stamp, TlsFiles, stamp_of

_CHECK_INTERVAL_SECONDS = 1.0
"""Minimum time between two checks of a token file."""
MISSING_TOKEN = "security: the call carries no bearer token"
WRONG_TOKEN = "security: this service does not accept the bearer token"


class PortSecurity:
    """Certificates and tokens of one process, for all its servers and clients."""

    def __init__(
        self, tls: TlsFiles | None = None, tokens: "Tokens | None" = None, *, open_metrics: bool = False
    ) -> None:
        self.tls = tls
        self.tokens = tokens
        self._open_metrics = open_metrics

    @classmethod
    def from_config(cls, config: SecurityConfig) -> Self:
        """Create the port security of a run file; raises ConfigError, which names an invalid file."""
        tls, tokens = TlsFiles.from_config(config.tls), Tokens.from_config(config)
        return cls(tls, tokens, open_metrics=config.open_metrics)

    @property
    def sent_token(self) -> str | None:
        """Bearer token that clients send; None without one."""
        return None if self.tokens is None else self.tokens.sent

    @property
    def scheme(self) -> str:
        """URL scheme of the ports: ``https`` or ``http``."""
        return "http" if self.tls is None else "https"

    def channel_state(self) -> object:
        """Return an object that changes when the certificates are rotated, after which channels must be recreated."""
        return None if self.tls is None else self.tls.material

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Open a gRPC port at host:port (0 picks a free one) and return it; raises ConfigError when it is in use."""
        if self.tokens is not None and self.tls is None and not is_loopback(address):
            get_logger("security").warning(
                "token_in_the_clear", address=address, message="the token is sent unencrypted: set security.tls"
            )
        try:
            if self.tls is not None:
                return server.add_secure_port(address, self.tls.server_credentials())
            return server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"the gRPC port cannot be bound at {address} (network.grpc_port): {error}") from error

    def explain(self, details: str) -> str:
        """Return gRPC's details of a failed connection, with a hint about certificates where one applies."""
        if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
            name = "" if self.tls is None else self.tls.server_name
            hint = f"its certificate is rejected here: check security.tls.ca, and that it names {name}"
        elif "WRONG_VERSION_NUMBER" in details:
            hint = "it does not use TLS: set security.tls there"
        elif "failed to connect" in details and "Socket closed" in details:
            cause = (
                "require TLS, and security.tls is not set here" if self.tls is None else "reject the client certificate"
            )
            hint = f"it closed the connection during the handshake: it may {cause}; see its log"
        else:
            return details
        return f"{details} ({hint})"

    def http_refusal(self, authorization: str, verified_certificate: bool) -> str:
        """Return the reason to reject an HTTP request; empty with a certificate, a token or open metrics."""
        if self._open_metrics or verified_certificate or (self.tls is None and self.tokens is None):
            return ""
        if self.tokens is not None:
            return self.tokens.refusal(authorization)
        return "security: this path requires a client certificate of the mesh's authority"


OPEN = PortSecurity()
"""Port security without certificates and tokens."""


def is_loopback(address: str) -> bool:
    """Tell whether host:port is reachable from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
