"""TLS 1.3 between nodes and safekeepers, which both show a certificate of one authority, and to etcd.

The certificate of a node names it: its common name, or a DNS name among its alternative names, is the node id. The
certificate of a safekeeper names the host to which nodes connect. Changed files are used for new connections.
"""

from __future__ import annotations

import os
import ssl
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from ledger.errors import ConfigurationError

OTHERS = stat.S_IRWXG | stat.S_IRWXO


class TlsFiles(NamedTuple):
    """Files in PEM: the own certificate, its key without a passphrase, and the authority that signs peer certificates.

    A client that shows no certificate has neither of the first two.
    """

    cert: Path | None
    key: Path | None
    ca: Path

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths that are set."""
        return tuple(path for path in self if path is not None)


class PeerTls:
    """The TLS contexts for connections; thread-safe.

    Raises:
        ConfigurationError: a file cannot be read or parsed, or others can read the key.
    """

    def __init__(self, files: TlsFiles, *, server_side: bool) -> None:
        self._files = files
        self._server_side = server_side
        self._lock = threading.Lock()
        self._stamps = self._stamps_now()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The context of the current files; of the previous ones if they cannot be loaded, for example because only one
        of two is replaced."""
        with self._lock:
            if (stamps := self._stamps_now()) != self._stamps:
                with suppress(ConfigurationError):
                    self._context, self._stamps = self._load(), stamps
            return self._context

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if self._server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        cert, key, ca = self._files
        for path in self._files.paths:
            # A missing file is reported below.
            if path.exists() and not path.is_file():
                raise ConfigurationError(f"{path} is not a regular file, and is not waited for")
        try:
            if key is not None and key.stat().st_mode & OTHERS:
                raise ConfigurationError(
                    f"key file {key} can be reached by others, so others can use this key: chmod 600"
                )
            if cert is not None:
                context.load_cert_chain(cert, key, password=lambda: "")
            context.load_verify_locations(ca)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{', '.join(map(str, self._files.paths))}: no certificate, its unencrypted key and the certificate of "
                f"an authority, in PEM: {error}"
            ) from None
        return context

    def _stamps_now(self) -> list[tuple[int, int]]:
        """Inode and modification time of each file, to detect a change; nothing while a file is missing."""
        with suppress(OSError):
            return [(found.st_ino, found.st_mtime_ns) for found in map(os.stat, self._files.paths)]
        return []


def names_of(connected: ssl.SSLSocket) -> frozenset[str]:
    """The names in the peer's certificate, once the handshake is done."""
    shown = cast(dict[str, Any], connected.getpeercert() or {})
    subject = [value for part in shown.get("subject", ()) for name, value in part if name == "commonName"]
    return frozenset([*subject, *(value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS")])


def reason_of(error: OSError) -> str:
    """Why a connection to a peer failed, as seen from this side."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError) and error.reason:
        reason = error.reason.replace("_", " ").lower()
        if is_damage(error):
            return f"a record of TLS arrived damaged: {reason}"
        if "alert" in reason:
            return f"the peer refuses this side's certificate, or its TLS: {reason}"
        if error.reason == "WRONG_VERSION_NUMBER":
            return "the peer does not speak TLS"
    return str(error) or type(error).__name__


def is_damage(error: OSError) -> bool:
    """Whether either side detected bytes that were damaged on the way."""
    return isinstance(error, ssl.SSLError) and "BAD_RECORD_MAC" in (error.reason or "")
