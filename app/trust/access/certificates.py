"""Certificates that callers show: their names, and who they are by the settings.

That a certificate is of the configured CA, and counted when the connection was made, TLS has checked by then. A name is
a URI or a DNS name of the certificate (subjectAltName), or the common name of its subject, taken as it stands: nothing
matches a wildcard.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from app.runtime.principals import Grant, Principal

ID_PREFIX = "cert:"
"""What the ids of principals that certificates name begin with."""


class CallerCertificate(NamedTuple):
    """What a connection's certificate says."""

    names: tuple[str, ...]
    expires_s: float

    def names_now(self) -> tuple[str, ...]:
        """Its names; none once it has expired, as a connection may live for longer."""
        return self.names if time.time() < self.expires_s else ()


def shown(certificate: Mapping[str, Any] | None) -> CallerCertificate | None:
    """What a certificate says, as ``ssl.SSLSocket.getpeercert`` has it; None when there is none."""
    if not certificate:
        return None
    alternative = certificate.get("subjectAltName", ())
    found = [name for wanted in ("URI", "DNS") for kind, name in alternative if kind == wanted]
    found += [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    return CallerCertificate(tuple(found), float(ssl.cert_time_to_seconds(certificate["notAfter"])))


def principals_by_name(granted: Iterable[tuple[str, Grant]]) -> Callable[[Sequence[str]], Principal | None]:
    """The principal of a certificate by its names, of which the first that is known counts.

    ``granted`` are names with what they allow; a name may come again.
    """
    grants: dict[str, list[Grant]] = {}
    for name, grant in granted:
        grants.setdefault(name, []).append(grant)
    known = {name: Principal(f"{ID_PREFIX}{name}", "certificate", held) for name, held in grants.items()}
    return lambda names: next((known[name] for name in names if name in known), None)
