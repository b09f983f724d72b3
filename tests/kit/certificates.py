"""Real certificates for tests: an authority, and what it signs."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """The three files of one process, as ``security.tls`` wants them."""

    certificate: Path
    key: Path
    ca: Path

    def section(self) -> dict[str, str]:
        return {"certificate": str(self.certificate), "key": str(self.key), "ca": str(self.ca)}

    def replace_by(self, other: "Certificate") -> None:
        """Rotate: put other certificates into these very files."""
        for field in ("certificate", "key", "ca"):
            mine: Path = getattr(self, field)
            new = mine.with_suffix(".new")
            new.write_bytes(getattr(other, field).read_bytes())
            new.replace(mine)


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: Path, name: str = "rollmesh test authority") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        public = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        own = (
            _builder(self._name, self._name, self._key.public_key(), -_DAY, 10 * _DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(public, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.file = folder / "ca.crt"
        self.file.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, dns: tuple[str, ...] = ("rollmesh", "localhost"), *, expired: bool = False, days: float = 5
    ) -> Certificate:
        """A certificate for servers and clients, named ``dns`` and 127.0.0.1, for so many days to come."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        since, until = (-3 * _DAY, -_DAY) if expired else (-_DAY, days * _DAY)
        names = [*map(x509.DNSName, dns), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        signed = (
            _builder(subject, self._name, key.public_key(), since, until)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        home = self.folder / name
        home.mkdir()
        found = Certificate(certificate=home / "tls.crt", key=home / "tls.key", ca=home / "ca.crt")
        found.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        found.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        found.ca.write_bytes(self.file.read_bytes())
        return found


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    since: datetime.timedelta,
    until: datetime.timedelta,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + since)
        .not_valid_after(now + until)
    )
