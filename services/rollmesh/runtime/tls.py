"""Certificates of this process: read from files, checked at the start, and read again when they are rotated."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import grpc

from rollmesh.config.security import TlsConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.file_stamp import Stamp, stamp_of
from rollmesh.runtime.logging import get_logger

_LOOK_SECONDS = 1.0
"""The files are looked at no more often, however many connections come."""
_HANDSHAKE_TURNS = 10
_FIRST_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """What the three files held at one moment, as gRPC and as OpenSSL want it."""

    certificate: bytes
    key: bytes
    ca: bytes
    client: ssl.SSLContext
    """Shows our certificate, and wants one of the authority."""
    server: ssl.SSLContext
    """Shows our certificate; refuses a client's of another authority, but a client need not show one."""
    valid_from: float
    """Start of our certificate's validity (notBefore), in Unix seconds."""
    valid_until: float
    """End of our certificate's validity (notAfter), in Unix seconds. Authorities that signed it may end earlier."""


class TlsFiles:
    """The certificate, key and authority of one process, for its servers and its clients."""

    def __init__(self, certificate: Path, key: Path, ca: Path, server_name: str) -> None:
        self.server_name = server_name
        self._files = {"certificate": certificate, "key": key, "ca": ca}
        self._look_at = 0.0
        self.clock: Callable[[], float] = time.monotonic
        self._stamp, self._material = self._first()

    @classmethod
    def from_config(cls, config: TlsConfig) -> Self | None:
        """The configured files; None without TLS. ConfigError names a file that cannot be used, and why."""
        if config.certificate is None or config.key is None or config.ca is None:
            return None
        return cls(Path(config.certificate), Path(config.key), Path(config.ca), config.server_name)

    @property
    def material(self) -> TlsMaterial:
        """The present content; the same object until a file changes."""
        if self.clock() >= self._look_at:
            self._look_at = self.clock() + _LOOK_SECONDS
            self._refresh()
        return self._material

    def server_credentials(self) -> grpc.ServerCredentials:
        """For gRPC servers: clients must show a certificate of the authority. Rotated files count from then on."""
        first = self.material
        served = [first]

        def newer() -> grpc.ServerCertificateConfiguration | None:
            now = self.material
            if now is served[0]:
                return None
            served[0] = now
            return _grpc_certificates(now)

        # None means unchanged, which the type stubs do not know.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", newer)
        return grpc.dynamic_ssl_server_credentials(_grpc_certificates(first), fetch, require_client_authentication=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one gRPC channel: it keeps these certificates for as long as it lives."""
        now = self.material
        return grpc.ssl_channel_credentials(now.ca, now.key, now.certificate)

    def server_context(self) -> ssl.SSLContext:
        """For an HTTPS server. A client that shows a certificate must have one of the authority, but it need not show
        one. Rotated files count for new handshakes.
        """

        def with_newest_files(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.material.server

        front = _bare_context(ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL)
        front.sni_callback = with_newest_files
        return front

    def client_context(self) -> ssl.SSLContext:
        """For HTTPS clients: shows our certificate, and wants one of the authority for ``server_name``."""
        return self.material.client

    def _context(self, protocol: int, verify: ssl.VerifyMode) -> ssl.SSLContext:
        context = _bare_context(protocol, verify)
        context.load_cert_chain(self._files["certificate"], self._files["key"], password=no_passphrase)
        context.load_verify_locations(self._files["ca"])
        return context

    def _stamps(self) -> tuple[Stamp, ...]:
        return tuple(_stamp(field, file) for field, file in self._files.items())

    def _refresh(self) -> None:
        """Take files that have changed and fit together; the old ones stay otherwise."""
        try:
            stamp = self._stamps()
            if stamp == self._stamp:
                return
            material = self._load()
        except ConfigError as error:
            get_logger("security").error("certificates_not_taken", message=str(error))
            return
        self._stamp, self._material = stamp, material
        get_logger("security").info("certificates_read_again", file=str(self._files["certificate"]))

    def _first(self) -> tuple[tuple[Stamp, ...], TlsMaterial]:
        """What the process starts with; files that are replaced in this very moment are read again."""
        for _ in range(_FIRST_TRIES):
            stamp = self._stamps()
            try:
                return stamp, self._load()
            except ConfigError:
                if self._stamps() == stamp:
                    raise
        return stamp, self._load()

    def _load(self) -> TlsMaterial:
        """The content of the files, all of one moment.

        Raises ConfigError for files that OpenSSL cannot use, or that the rest of the mesh would refuse: better here
        than when a peer closes the connection, with the reason in its log.
        """
        content = self._read()
        try:
            authority = content["ca"].decode("ascii", "replace")
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=authority)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"security.tls.ca={self._files['ca']}: no PEM certificate: {error}") from error
        try:
            client = self._context(ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_REQUIRED)
            strict = self._context(ssl.PROTOCOL_TLS_SERVER, ssl.CERT_REQUIRED)
            server = self._context(ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise ConfigError(
                f"{self._certificate} with security.tls.key={self._files['key']}: {error} (expected PEM files, the key "
                "without a passphrase and of this very certificate)"
            ) from error
        try:
            shown = shake_hands(client, strict, self.server_name)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"{self._certificate}: the mesh would refuse it: {error.verify_message} (it must be signed by "
                f"security.tls.ca={self._files['ca']}, be valid now, name security.tls.server_name={self.server_name}, "
                "and serve for servers and clients)"
            ) from error
        if self._read() != content:
            # OpenSSL reads files itself, so these bytes may be other ones than it has.
            raise ConfigError(f"{self._certificate}: replaced while it was read")
        return TlsMaterial(
            **content,
            client=client,
            server=server,
            valid_from=ssl.cert_time_to_seconds(str(shown["notBefore"])),
            valid_until=ssl.cert_time_to_seconds(str(shown["notAfter"])),
        )

    @property
    def _certificate(self) -> str:
        return f"security.tls.certificate={self._files['certificate']}"

    def _read(self) -> dict[str, bytes]:
        return {field: _content(field, file) for field, file in self._files.items()}


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, server_name: str) -> Mapping[str, object]:
    """A TLS handshake in memory; returns the fields of the server's certificate, which the client has verified.

    Raises SSLCertVerificationError where one side refuses the other's certificate.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server, server_hostname=server_name)
    ends = [asking, server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(_HANDSHAKE_TURNS):
        for end in tuple(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)
        if not ends:
            # Not None: it asked for one and has verified it.
            return cast("Mapping[str, object]", asking.getpeercert())
    raise ssl.SSLError(f"the handshake did not end within {_HANDSHAKE_TURNS} turns")


def _bare_context(protocol: int, verify: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = verify
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        # A resumed session is not verified again: a certificate whose authority has gone would still get in.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def _grpc_certificates(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.ca)


def _content(field: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"security.tls.{field}={file}: cannot be read: {error.strerror}") from error


def _stamp(field: str, file: Path) -> Stamp:
    try:
        return stamp_of(file)
    except OSError as error:
        raise ConfigError(f"security.tls.{field}={file}: cannot be read: {error.strerror}") from error


def no_passphrase() -> str:
    """Answers OpenSSL's question for a passphrase, which it would else ask at the terminal."""
    raise ValueError("the key is protected by a passphrase")
