"""Certificates that callers show: their names, and who they are by the settings.

That a certificate is of the configured CA, and counted when the connection was made, TLS has checked by then. A name is
a URI or a DNS name of the certificate (subjectAltName), or the common name of its subject, taken as it stands: nothing
matches a wildcard.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from app.access.principals import Grant, Principal, grant_of
from ledger.errors import ConfigurationError, InvalidInputError

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


def principals_by_name(
    entries: Iterable[tuple[str, Collection[str], Collection[str]]],
) -> Callable[[Sequence[str]], Principal | None]:
    """The principal of a certificate by its names, of which the first that is known counts.

    ``entries`` are names, each with rights and the patterns of tenants they are for; a name may come again.

    Raises:
        ConfigurationError: there is no such right, or no such pattern of tenants.
    """
    grants: dict[str, list[Grant]] = {}
    for name, rights, tenants in entries:
        try:
            grants.setdefault(name, []).append(grant_of(rights, tenants))
        except InvalidInputError as error:
            raise ConfigurationError(f"auth.certificates: {name}: {error}") from None
    known = {name: Principal(f"{ID_PREFIX}{name}", "certificate", granted) for name, granted in grants.items()}
    return lambda names: next((known[name] for name in names if name in known), None)
