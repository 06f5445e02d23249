"""A certification authority for tests, and what it issues."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVICE = (x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1")))


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    cert: Path
    key: Path

    def take(self, other: Pair) -> None:
        """Be what ``other`` is, one file after the other."""
        self.cert.write_bytes(other.cert.read_bytes())
        self.key.write_bytes(other.key.read_bytes())

    @property
    def serial(self) -> int:
        """Serial number of the certificate."""
        return x509.load_pem_x509_certificate(self.cert.read_bytes()).serial_number


class Authority:
    """Signs certificates; its own is ``ca_file``."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.ca_file = folder / f"{name}.pem"
        built = _builder(self._name, self._name, self._key, timedelta(days=1), timedelta(days=365)).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.ca_file.write_bytes(built.sign(self._key, SHA256()).public_bytes(Encoding.PEM))

    def issue(
        self,
        file: str,
        names: Sequence[x509.GeneralName] = SERVICE,
        *,
        common_name: str | None = None,
        lives: timedelta = timedelta(days=90),
        is_client: bool = False,
        with_rsa: bool = False,
    ) -> Pair:
        """A new certificate, which began a day ago and lives for ``lives`` from now."""
        key = rsa.generate_private_key(65537, 2048) if with_rsa else ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else [])
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if is_client else ExtendedKeyUsageOID.SERVER_AUTH
        built = _builder(subject, self._name, key, timedelta(days=30), lives).add_extension(
            x509.ExtendedKeyUsage([usage]), critical=False
        )
        if names:
            built = built.add_extension(x509.SubjectAlternativeName(names), critical=not common_name)
        pair = Pair(self._folder / f"{file}.pem", self._folder / f"{file}.key")
        pair.cert.write_bytes(built.sign(self._key, SHA256()).public_bytes(Encoding.PEM))
        pair.key.touch(0o600)
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return pair

    def client(self, pair: Pair | None = None) -> ssl.SSLContext:
        """What a client who trusts this authority connects with, and the certificate that it shows."""
        context = ssl.create_default_context(cafile=self.ca_file)
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        return context


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: CertificateIssuerPrivateKeyTypes,
    lived: timedelta,
    lives: timedelta,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - lived)
        .not_valid_after(now + lives)
    )
