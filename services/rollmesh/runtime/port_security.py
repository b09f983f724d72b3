"""What guards the ports of one process: certificates, tokens, both or neither."""

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
    """Certificates and tokens of one process, for every server and client in it."""

    def __init__(
        self, tls: TlsFiles | None = None, tokens: Tokens | None = None, *, open_metrics: bool = False
    ) -> None:
        self.tls = tls
        self.tokens = tokens
        self._open_metrics = open_metrics

    @classmethod
    def from_config(cls, config: SecurityConfig) -> Self:
        """What the run file asks for. Raises ConfigError naming a file that cannot be used."""
        tls, tokens = TlsFiles.from_config(config.tls), Tokens.from_config(config)
        return cls(tls, tokens, open_metrics=config.open_metrics)

    @property
    def sent_token(self) -> str | None:
        """The bearer token that clients send; None when there is none."""
        return None if self.tokens is None else self.tokens.sent

    @property
    def scheme(self) -> str:
        """``https`` or ``http``."""
        return "http" if self.tls is None else "https"

    def channel_state(self) -> object:
        """Changes when channels made before should be made anew: their certificates have been rotated."""
        return None if self.tls is None else self.tls.material

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Open a gRPC port at host:port (0 picks a free one); returns the port. ConfigError when it is taken."""
        if self.tokens is not None and self.tls is None and not is_loopback(address):
            get_logger("security").warning(
                "token_in_the_clear", address=address, message="whoever is on the way reads it: set security.tls"
            )
        try:
            if self.tls is not None:
                return server.add_secure_port(address, self.tls.server_credentials())
            return server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"the gRPC port cannot be bound at {address} (network.grpc_port): {error}") from error

    def explain(self, details: str) -> str:
        """What gRPC says about a failed connection, with what it may mean for certificates."""
        if "CERTIFICATE_VERIFY_FAILED" in details or "Hostname Verification" in details:
            hint = f"its certificate is not accepted here: see security.tls.ca, and whether it names {self._name}"
        elif "WRONG_VERSION_NUMBER" in details:
            hint = "it speaks no TLS: security.tls is not set there"
        elif "failed to connect" in details and "Socket closed" in details:
            ours = "want TLS, and security.tls is not set here" if self.tls is None else "refuse our certificate"
            hint = f"it closed the connection during the handshake: it may {ours}; its log says more"
        else:
            return details
        return f"{details} ({hint})"

    @property
    def _name(self) -> str:
        return "" if self.tls is None else self.tls.server_name

    def http_refusal(self, authorization: str, verified_certificate: bool) -> str:
        """Why an HTTP request may not see ``/metrics``; empty when it may: a certificate or a token suffices."""
        if self._open_metrics or verified_certificate or (self.tls is None and self.tokens is None):
            return ""
        if self.tokens is not None:
            return self.tokens.refusal(authorization)
        return "security: this path needs a client certificate of the mesh's authority"


OPEN = PortSecurity()
"""Ports without protection."""


class AdminClient:
    """Asks the admin ports of the services (``/metrics``, ``/readyz``, ...) with this process's identity."""

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
        """GET ``path`` of the admin port at host:port. Raises httpx.HTTPError."""
        client = await self._current()
        security = self._security
        headers = {} if security.sent_token is None else {"Authorization": f"Bearer {security.sent_token}"}
        extensions: dict[str, Any] = {} if security.tls is None else {"sni_hostname": security.tls.server_name}
        return await client.get(f"{security.scheme}://{address}{path}", headers=headers, extensions=extensions)

    async def _current(self) -> httpx.AsyncClient:
        """The connection pool; a new one when the certificates have been rotated."""
        tls, state = self._security.tls, self._security.channel_state()
        if self._client is not None and state is self._state:
            return self._client
        # The pool before this one may still be asking; those before it have run into their time-out.
        done, self._retired = self._retired, [] if self._client is None else [self._client]
        verify = tls.client_context() if tls is not None else False
        new = self._client = httpx.AsyncClient(verify=verify, timeout=self._timeout_seconds, trust_env=False)
        self._state = state
        for client in done:
            await client.aclose()
        return new


def is_loopback(address: str) -> bool:
    """Whether host:port can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
