"""Security of the ports of one process: certificates, tokens, both or neither."""

from __future__ import annotations

import ipaddress
from typing import Any, Self

import grpc.aio
import httpx

from rollmesh.config.security import SecurityConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.bearer_tokens import Tokens
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tls import TlsFiles


class PortSecurity:
    """Certificates and tokens of one process, for all its servers and clients."""

    def __init__(
        self, tls: TlsFiles | None = None, tokens: Tokens | None = None, *, open_metrics: bool = False
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
            hint = f"its certificate is rejected here: check security.tls.ca, and that it names {self._name}"
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

    @property
    def _name(self) -> str:
        return "" if self.tls is None else self.tls.server_name

    def http_refusal(self, authorization: str, verified_certificate: bool) -> str:
        """Return the reason to reject an HTTP request; empty with a certificate, a token or open metrics."""
        if self._open_metrics or verified_certificate or (self.tls is None and self.tokens is None):
            return ""
        if self.tokens is not None:
            return self.tokens.refusal(authorization)
        return "security: this path requires a client certificate of the mesh's authority"


OPEN = PortSecurity()
"""Port security without certificates and tokens."""


class AdminClient:
    """HTTP client of the services' admin ports (``/metrics``, ``/readyz``, ...) with this process's identity."""

    def __init__(self, security: PortSecurity = OPEN, timeout_seconds: float = 2.0) -> None:
        self._security = security
        self._timeout_seconds = timeout_seconds
        self._state: object = None
        self._client: httpx.AsyncClient | None = None
        self._retired: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in (*self._retired, *([] if self._client is None else [self._client])):
            await client.aclose()

    async def get(self, address: str, path: str) -> httpx.Response:
        """Send GET ``path`` to the admin port at host:port. Raises httpx.HTTPError."""
        client = await self._current()
        security = self._security
        headers = {} if security.sent_token is None else {"Authorization": f"Bearer {security.sent_token}"}
        extensions: dict[str, Any] = {} if security.tls is None else {"sni_hostname": security.tls.server_name}
        return await client.get(f"{security.scheme}://{address}{path}", headers=headers, extensions=extensions)

    async def _current(self) -> httpx.AsyncClient:
        """Return the connection pool; creates a new one after a rotation of the certificates."""
        tls, state = self._security.tls, self._security.channel_state()
        if self._client is not None and state is self._state:
            return self._client
        # The previous pool may have requests in progress; those of older pools have timed out.
        done, self._retired = self._retired, [] if self._client is None else [self._client]
        verify = tls.client_context() if tls is not None else False
        new = self._client = httpx.AsyncClient(verify=verify, timeout=self._timeout_seconds, trust_env=False)
        self._state = state
        for client in done:
            await client.aclose()
        return new


def is_loopback(address: str) -> bool:
    """Tell whether host:port is reachable from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
