"""The head of a request: its checks, and the client's address and scheme from a trusted proxy.

Two readers of one connection must agree where a request ends (RFC 9112, section 6), so a head that a proxy might read
in another way is refused. A web page must not reach, through a user's browser, a service that its author cannot reach:
neither by DNS rebinding nor from its own origin::

    version              HTTP/1.1, or HTTP/1.0 without Transfer-Encoding
    Host                 exactly one, and a name of ours; HTTP/1.0 may have none, as health checks of load balancers do
    Transfer-Encoding    chunked, once
    Origin               on what changes something: none, that of the Host, or one whose host http.hosts names

These headers are trusted only from the proxies that ``http.trusted_proxies`` names::

    X-Forwarded-Proto    https or http; of several the last, which the proxy itself said
    X-Forwarded-For      addresses, the nearest last; the client is the last that is no trusted proxy
    X-Forwarded-Prefix   the path that the proxy took off, in place of http.root_path; of several the last
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from app.edge.answers import PREFIX
from app.runtime.settings.types import ROOT_PATH, ROOT_PATH_MAX, IpNetwork, is_loopback
from ledger.errors import ProblemError
from ledger.facts.problems import HOST_NOT_ALLOWED, MALFORMED_HTTP, ORIGIN_NOT_ALLOWED, TRANSFER_CODING_UNSUPPORTED

SAFE_METHODS = frozenset({b"GET", b"HEAD", b"OPTIONS"})
HOSTS_REMEMBERED = 256
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}
_HOST = re.compile(rb"(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(:[0-9]{1,5})?")


class ServedNames:
    """The names that the service answers to; ports are ignored.

    Loopback addresses and ``localhost``, the host that it listens on, and the names in ``http.hosts``. A service that
    listens beyond loopback takes any IP address too: only a name can be rebound.
    """

    def __init__(self, listen_host: str, named: Iterable[str]) -> None:
        self._named = frozenset(name.lower() for name in named)
        self._own = self._named | {"localhost", listen_host.lower()}
        self._takes_any_address = not is_loopback(listen_host)
        self.has_host = lru_cache(HOSTS_REMEMBERED)(self._has_host)

    def _has_host(self, value: bytes) -> bool:
        """Whether the header ``Host`` may have this value."""
        name = _name_of(value)
        return name is not None and (
            name in self._own or is_loopback(name) or (self._takes_any_address and _address_of(name) is not None)
        )

    def has_origin(self, value: bytes, host: bytes) -> bool:
        """Whether a page of this ``Origin`` may change something here, in a request to ``host``."""
        scheme, separator, authority = value.lower().partition(b"://")
        port = _DEFAULT_PORTS.get(scheme, b"")
        is_same = authority.removesuffix(port) == host.strip().lower().removesuffix(port)
        return bool(separator) and (is_same or _name_of(authority) in self._named)


def check_head(version: str, method: bytes, headers: Sequence[tuple[bytes, bytes]], names: ServedNames) -> None:
    """Return if a head of this HTTP version, with these lower-case headers, may be served.

    Raises:
        ProblemError: it may not.
    """
    hosts, codings, origins = (
        [value for name, value in headers if name == wanted] for wanted in (b"host", b"transfer-encoding", b"origin")
    )
    host = hosts[0] if hosts else b""
    if version not in ("1.1", "1.0"):
        raise ProblemError(MALFORMED_HTTP, f"HTTP/{version} is not spoken here; send HTTP/1.1")
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise ProblemError(MALFORMED_HTTP, f"the request has {len(hosts) or 'no'} Host headers; send one")
    if hosts and not names.has_host(host):
        raise ProblemError(HOST_NOT_ALLOWED, f"Host {_shown(host)} is no name of this service; http.hosts names others")
    if origins and method not in SAFE_METHODS and not all(names.has_origin(origin, host) for origin in origins):
        raise ProblemError(ORIGIN_NOT_ALLOWED, f"a page of {_shown(origins[-1])} may change nothing here")
    if codings and version == "1.0":
        raise ProblemError(MALFORMED_HTTP, "HTTP/1.0 has no Transfer-Encoding; send Content-Length, or HTTP/1.1")
    if codings and codings[-1].strip().lower() != b"chunked":
        raise ProblemError(
            TRANSFER_CODING_UNSUPPORTED, f"Transfer-Encoding {_shown(codings[-1])} is not taken; send chunked"
        )


def _name_of(value: bytes) -> str | None:
    """The name or address in ``host`` or ``host:port``; None if it is neither."""
    match = _HOST.fullmatch(value.strip().lower())
    return match[1].decode().removesuffix(".").strip("[]") if match else None


def _address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))


ADDRESSES_REMEMBERED = 1024


class TrustedProxies:
    """The proxies that are trusted."""

    def __init__(self, networks: Iterable[IpNetwork]) -> None:
        self._networks = tuple(networks)
        self._is_trusted = lru_cache(ADDRESSES_REMEMBERED)(self._is_within)

    def has(self, client: tuple[str, int] | None) -> bool:
        """Whether the client of a connection is a trusted proxy."""
        return client is not None and self._is_trusted(client[0])

    def believe(self, scope: Any) -> None:
        """Set ``scheme``, ``client`` (with port 0) and ``PREFIX`` of ``scope`` from the head of a request."""
        protocols, forwarded, prefixes = (
            [value for name, value in scope["headers"] if name == wanted]
            for wanted in (b"x-forwarded-proto", b"x-forwarded-for", b"x-forwarded-prefix")
        )
        schemes = [value.rpartition(b",")[2].strip().lower() for value in protocols]
        if known := [scheme.decode() for scheme in schemes if scheme in (b"https", b"http")]:
            scope["scheme"] = known[-1]
        if prefixes:
            prefix = prefixes[-1].rpartition(b",")[2].decode("latin-1").strip().rstrip("/")
            if len(prefix) <= ROOT_PATH_MAX and ROOT_PATH.fullmatch(prefix):
                scope[PREFIX] = prefix
        for address in reversed(b",".join(forwarded).split(b",")):
            host = _host_of(address)
            if host is None:
                break
            scope["client"] = (host, 0)
            if not self._is_trusted(host):
                break

    def _is_within(self, host: str) -> bool:
        address = _address_in(host)
        return address is not None and any(address in network for network in self._networks)


def _host_of(said: bytes) -> str | None:
    """The address in one part of the header, which may have a port; None if there is none."""
    text = said.strip().decode("latin-1")
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    address = _address_in(text)
    return None if address is None else str(address)


def _address_in(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """As ``_address_of``; an IPv4-mapped IPv6 address becomes the IPv4 address."""
    address = _address_of(text)
    return getattr(address, "ipv4_mapped", None) or address
