"""The TLS context of the service, reloaded when its files change.

    protocol    TLS 1.3, or 1.2
    ciphers     ephemeral keys and authenticated encryption only
    callers     may show a certificate issued by ``client_ca``; any other ends the handshake

An open connection keeps its context. Files that do not match each other, or cannot be read, change nothing.

*Certificates of callers.* The handshake has checked that the configured CA issued the certificate and that it was valid
then. A name is a URI or a DNS name of the certificate (subjectAltName), or the common name of its subject. Names are
compared exactly, without wildcards.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from cryptography import x509

from app.runtime.logs import log
from app.runtime.principals import Grant, Principal
from ledger import rfc3339
from ledger.errors import ConfigurationError, reported_as
from signing import files

CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20:@SECLEVEL=2"
"""For TLS 1.2; all ciphers of TLS 1.3 are of this kind."""
LOOK_INTERVAL_S: Final = 2.0
"""Pause between two checks of the files."""
EXPIRY_TOLD_BEFORE: Final = timedelta(days=14)


class TlsFiles(NamedTuple):
    """Files in PEM: the service's certificate with its intermediates, its key, and the CA of callers."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def stamp(self) -> list[tuple[int, ...] | None]:
        """A value that differs once a file has changed."""
        return [_stamp(path) for path in self if path is not None]


class ServerTls:
    """The context of new connections. Belongs to one event loop.

    Raises:
        ConfigurationError: a file cannot be read or has the wrong content, or other users can read the key.
    """

    def __init__(self, given: TlsFiles) -> None:
        self._files = given
        self._stamp = given.stamp()
        self._broken: str | None = None
        self.context, self._expires_at = _loaded(given)

    async def run(self) -> None:
        """Reload the files when they change, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Reload the files if they changed and are complete. Blocks."""
        if (stamp := self._files.stamp()) == self._stamp:
            return
        # The stamp from before the files were read: the next check sees a change made meanwhile.
        self._stamp = stamp
        try:
            self.context, self._expires_at = _loaded(self._files)
        except ConfigurationError as error:
            self._broken = str(error)
            log.error("tls_files_not_taken", error=str(error))
            return
        self._broken = None
        log.info("tls_files_reloaded", expires_at=rfc3339.written(self._expires_at, "seconds"))

    def fault(self) -> str | None:
        """The present or coming fault of the files; None when there is none."""
        if self._broken is not None:
            return f"the certificates read before go on, as the new ones cannot be used: {self._broken}"
        left = self._expires_at - datetime.now(UTC)
        if left > EXPIRY_TOLD_BEFORE:
            return None
        return f"a certificate of tls.cert or auth.client_ca {'expires' if left > timedelta() else 'expired'} at " + (
            rfc3339.written(self._expires_at, "seconds")
        )


def _loaded(given: TlsFiles) -> tuple[ssl.SSLContext, datetime]:
    """The context, and the earliest expiry of its certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    files.read(given.key)
    expires_at = _expires_at(given.cert, "tls.cert")
    with reported_as(
        ConfigurationError,
        f"tls.cert {given.cert} and tls.key {given.key} are no certificate and its unencrypted key in PEM",
        OSError,
        ValueError,
    ):
        context.load_cert_chain(given.cert, given.key, password=lambda: "")
    if given.client_ca is not None:
        expires_at = min(expires_at, _expires_at(given.client_ca, "auth.client_ca"))
        context.load_verify_locations(given.client_ca)
        context.verify_mode = ssl.CERT_OPTIONAL
    return context, expires_at


def _expires_at(path: Path, setting: str) -> datetime:
    """When the first certificate of a file expires.

    Raises:
        ConfigurationError: it cannot be read, or holds none.
    """
    with (
        reported_as(ConfigurationError, f"{setting} {path} cannot be read", OSError),
        reported_as(ConfigurationError, f"{setting} {path} holds no certificates in PEM", ValueError),
    ):
        return min(each.not_valid_after_utc for each in x509.load_pem_x509_certificates(files.read_regular(path)))


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


ID_PREFIX = "cert:"
"""Prefix of the ids of principals that certificates name."""


class CallerCertificate(NamedTuple):
    """The certificate of a connection."""

    names: tuple[str, ...]
    expires_s: float

    def names_now(self) -> tuple[str, ...]:
        """Its names; none once it has expired, because a connection may outlive it."""
        return self.names if time.time() < self.expires_s else ()


def shown(certificate: Mapping[str, Any] | None) -> CallerCertificate | None:
    """The certificate in the form of ``ssl.SSLSocket.getpeercert``; None when there is none."""
    if not certificate:
        return None
    found = [
        name for wanted in ("URI", "DNS") for kind, name in certificate.get("subjectAltName", ()) if kind == wanted
    ]
    found += [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    return CallerCertificate(tuple(found), float(ssl.cert_time_to_seconds(certificate["notAfter"])))


def principals_by_name(granted: Iterable[tuple[str, Grant]]) -> Callable[[Sequence[str]], Principal | None]:
    """A function from the names of a certificate to its principal; the first known name decides.

    ``granted`` maps names to grants; a name may occur several times.
    """
    grants: dict[str, list[Grant]] = {}
    for name, grant in granted:
        grants.setdefault(name, []).append(grant)
    known = {name: Principal(f"{ID_PREFIX}{name}", "certificate", held) for name, held in grants.items()}
    return lambda names: next((known[name] for name in names if name in known), None)
