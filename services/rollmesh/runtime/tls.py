"""Certificates of this process: read from files, verified at startup, and read again after a rotation."""

import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar, cast

import grpc

from rollmesh.config.services import TlsConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.logging import get_logger

T = TypeVar("T")

Stamp = tuple[int, int, int]

_CHECK_INTERVAL_SECONDS = 1.0
"""Minimum time between two checks of the files, independent of the number of connections."""
_HANDSHAKE_TURNS = 10
_LOAD_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """Content of the three files at one time, in the forms that gRPC and OpenSSL require."""

    certificate: bytes
    key: bytes
    ca: bytes
    client: ssl.SSLContext
    """Context of clients: sends this process's certificate and requires a server certificate of the authority."""
    server: ssl.SSLContext
    """Context of servers: client certificates are optional; one of another authority is rejected."""
    valid_from: float
    """Start of the certificate's validity (notBefore), in Unix seconds."""
    valid_until: float
    """End of the certificate's validity (notAfter), in Unix seconds. The authorities may expire earlier."""


class TlsFiles:
    """The certificate, key and authority of one process, for its servers and its clients."""

    def __init__(self, certificate: Path, key: Path, ca: Path, server_name: str) -> None:
        self.server_name = server_name
        self._files = {"certificate": certificate, "key": key, "ca": ca}
        self._next_check = 0.0
        self.clock: Callable[[], float] = time.monotonic
        for _ in range(_LOAD_ATTEMPTS):
            self._stamp = self._stamps()
            try:
                self._material = self._load()
                return
            except ConfigError:
                if self._stamps() == self._stamp:  # otherwise the files are being replaced
                    raise
        self._material = self._load()

    @classmethod
    def from_config(cls, config: TlsConfig) -> Self | None:
        """Read the configured files, None without TLS; raises ConfigError, which names an invalid file."""
        if config.certificate is None or config.key is None or config.ca is None:
            return None
        return cls(Path(config.certificate), Path(config.key), Path(config.ca), config.server_name)

    @property
    def material(self) -> TlsMaterial:
        """Current content; the same object until a file changes."""
        if self.clock() >= self._next_check:
            self._next_check = self.clock() + _CHECK_INTERVAL_SECONDS
            self._refresh()
        return self._material

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of gRPC servers, which require client certificates of the authority.

        Rotated files apply to new connections.
        """
        first = self.material
        served = [first]

        def newer() -> grpc.ServerCertificateConfiguration | None:
            now = self.material
            if now is served[0]:
                return None
            served[0] = now
            return _grpc_certificates(now)

        # None means unchanged; the type stubs do not have it.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", newer)
        return grpc.dynamic_ssl_server_credentials(_grpc_certificates(first), fetch, require_client_authentication=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials of one gRPC channel, which keeps these certificates until it is closed."""
        now = self.material
        return grpc.ssl_channel_credentials(now.ca, now.key, now.certificate)

    def server_context(self) -> ssl.SSLContext:
        """Return the context of an HTTPS server.

        Client certificates are optional, and must be of the authority. Rotated files apply to new handshakes.
        """

        def with_newest_files(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self.material.server

        front = _bare_context(ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL)
        front.sni_callback = with_newest_files
        return front

    def client_context(self) -> ssl.SSLContext:
        """Return the context of HTTPS clients, which sends this process's certificate.

        The server must have a certificate of the authority for ``server_name``.
        """
        return self.material.client

    def _context(self, protocol: int, verify: ssl.VerifyMode) -> ssl.SSLContext:
        context = _bare_context(protocol, verify)
        context.load_cert_chain(self._files["certificate"], self._files["key"], password=no_passphrase)
        context.load_verify_locations(self._files["ca"])
        return context

    def _stamps(self) -> tuple[Stamp, ...]:
        return tuple(_of_file(field, file, stamp_of) for field, file in self._files.items())

    def _refresh(self) -> None:
        """Load changed files; keep the old content when the new files are invalid."""
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

    def _load(self) -> TlsMaterial:
        """Read and verify a consistent content of all files.

        Raises ConfigError for files that OpenSSL or the rest of the mesh would reject. Without this check, a peer would
        close the connection and only its log would have the reason.
        """
        content = self._read()
        try:
            authority = content["ca"].decode("ascii", "replace")
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=authority)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"security.tls.ca={self._files['ca']}: not a PEM certificate: {error}") from error
        try:
            client = self._context(ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_REQUIRED)
            strict = self._context(ssl.PROTOCOL_TLS_SERVER, ssl.CERT_REQUIRED)
            server = self._context(ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise ConfigError(
                f"{self._certificate} with security.tls.key={self._files['key']}: {error} (expected PEM files, the key "
                "without a passphrase and matching the certificate)"
            ) from error
        try:
            fields = shake_hands(client, strict, self.server_name)
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"{self._certificate}: the mesh would reject it: {error.verify_message} (it must be signed by "
                f"security.tls.ca={self._files['ca']}, be valid now, name security.tls.server_name={self.server_name}, "
                "and allow server and client authentication)"
            ) from error
        if self._read() != content:
            # OpenSSL reads the files separately, so its content may differ from these bytes.
            raise ConfigError(f"{self._certificate}: the file was replaced during the read; retry")
        return TlsMaterial(
            **content,
            client=client,
            server=server,
            valid_from=ssl.cert_time_to_seconds(str(fields["notBefore"])),
            valid_until=ssl.cert_time_to_seconds(str(fields["notAfter"])),
        )

    @property
    def _certificate(self) -> str:
        return f"security.tls.certificate={self._files['certificate']}"

    def _read(self) -> dict[str, bytes]:
        return {field: _of_file(field, file, Path.read_bytes) for field, file in self._files.items()}


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, server_name: str) -> Mapping[str, object]:
    """Perform a TLS handshake in memory; returns the fields of the server's certificate, verified by the client.

    Raises SSLCertVerificationError when either side rejects the certificate of the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_end = client.wrap_bio(to_client, to_server, server_hostname=server_name)
    ends = [client_end, server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(_HANDSHAKE_TURNS):
        for end in tuple(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)
        if not ends:
            # Not None: the client requires a certificate and has verified it.
            return cast("Mapping[str, object]", client_end.getpeercert())
    raise ssl.SSLError(f"the handshake did not complete within {_HANDSHAKE_TURNS} turns")


def _bare_context(protocol: int, verify: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = verify
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        # A resumed session is not verified again, so it would accept a certificate of a removed authority.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def _grpc_certificates(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.ca)


def _of_file(field: str, file: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(file)
    except OSError as error:
        raise ConfigError(f"security.tls.{field}={file}: cannot be read: {error.strerror}") from error


def no_passphrase() -> str:
    """Raise ValueError when OpenSSL requires a passphrase, instead of a prompt at the terminal."""
    raise ValueError("the key is protected by a passphrase")


def stamp_of(file: Path) -> Stamp:
    """Return (inode, size, mtime), which changes when the file is replaced or resized; raises OSError if it is missing.

    The time alone is not sufficient, because many file systems store it in steps of some milliseconds. Only a write in
    place that keeps the size depends on the time.
    """
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
