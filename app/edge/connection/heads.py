"""The head of a request: its checks, the client's address and scheme from a trusted proxy, and a cache of parsed heads.

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

The heads of a client differ in the path and in the Idempotency-Key; all other lines, the block, equal those of one of
its last requests, byte for byte. The cache keeps the parsed headers of a block, which apply to each request that
arrived whole and alone::

    POST <path> HTTP/1.1                   read here: a short path without anything to decode, and no query
    Idempotency-Key: <visible characters>  read here, taken out of the block: at most one, nothing folded into it
    <block>                                cached
                                           an empty line
    <body>                                 as many bytes as the block says

    0 <= blocks <= BLOCKS_MAX, each of at most BLOCK_BYTES_MAX bytes
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

from app.runtime.settings.types import IpNetwork
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
        self._takes_any_address = not _is_loopback(listen_host)
        self.has_host = lru_cache(HOSTS_REMEMBERED)(self._has_host)

    def _has_host(self, value: bytes) -> bool:
        """Whether the header ``Host`` may have this value."""
        name = _name_of(value)
        is_address = self._takes_any_address and name is not None and _address_of(name) is not None
        return name is not None and (name in self._own or _is_loopback(name) or is_address)

    def has_origin(self, value: bytes, host: bytes) -> bool:
        """Whether a page of this ``Origin`` may change something here, in a request to ``host``."""
        scheme, separator, authority = value.lower().partition(b"://")
        if not separator:
            return False
        port = _DEFAULT_PORTS.get(scheme, b"")
        same = authority.removesuffix(port) == host.strip().lower().removesuffix(port)
        return same or _name_of(authority) in self._named


def check_head(version: str, method: bytes, headers: Iterable[tuple[bytes, bytes]], names: ServedNames) -> None:
    """Return if a head of this HTTP version, with these lower-case headers, may be served.

    Raises:
        ProblemError: it may not.
    """
    hosts = 0
    host = b""
    coding = None
    origins: list[bytes] = []
    for name, value in headers:
        if name == b"host":
            hosts += 1
            host = value
        elif name == b"transfer-encoding":
            coding = value
        elif name == b"origin":
            origins.append(value)
    if version not in ("1.1", "1.0"):
        raise ProblemError(MALFORMED_HTTP, f"HTTP/{version} is not spoken here; send HTTP/1.1")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise ProblemError(MALFORMED_HTTP, f"the request has {hosts or 'no'} Host headers; send one")
    if hosts and not names.has_host(host):
        raise ProblemError(HOST_NOT_ALLOWED, f"Host {_shown(host)} is no name of this service; http.hosts names others")
    if origins and method not in SAFE_METHODS and not all(names.has_origin(origin, host) for origin in origins):
        raise ProblemError(ORIGIN_NOT_ALLOWED, f"a page of {_shown(origins[-1])} may change nothing here")
    if coding is None:
        return
    if version == "1.0":
        raise ProblemError(MALFORMED_HTTP, "HTTP/1.0 has no Transfer-Encoding; send Content-Length, or HTTP/1.1")
    if coding.strip().lower() != b"chunked":
        raise ProblemError(
            TRANSFER_CODING_UNSUPPORTED, f"Transfer-Encoding {_shown(coding)} is not taken; send chunked"
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


def _is_loopback(name: str) -> bool:
    address = _address_of(name)
    return name == "localhost" if address is None else address.is_loopback


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
        """Set ``scheme`` and ``client`` (with port 0) of ``scope`` from the head of a request."""
        addresses: list[bytes] = []
        for name, value in scope["headers"]:
            if name == b"x-forwarded-proto":
                scheme = value.rpartition(b",")[2].strip().lower()
                if scheme in (b"https", b"http"):
                    scope["scheme"] = scheme.decode()
            elif name == b"x-forwarded-for":
                addresses += value.split(b",")
        for address in reversed(addresses):
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


BLOCKS_MAX: Final = 4096
"""A client has one block for each length of its bodies. When the cache is full, it is cleared."""
BLOCK_BYTES_MAX: Final = 1024
_LINE = re.compile(rb"POST (/v1/[A-Za-z0-9._/-]{1,1024}) HTTP/1\.1(?=\r\n)")
_END = b"\r\n\r\n"
_KEY: Final = b"idempotency-key"
_KEY_FIELDS: Final = (b"\r\nIdempotency-Key: ", b"\r\nidempotency-key: ")
"""The usual spellings; a head with another one goes to the parser."""
_is_visible = re.compile(rb"[!-~]+").fullmatch

Fields = list[tuple[bytes, bytes]]
"""Headers: lower-case names, and values."""


class CachedHead(NamedTuple):
    """A request whose head needs no parser."""

    path: bytes
    key: bytes
    """Empty if there is none."""
    headers: Fields
    body: bytes
    authorization: bytes | None
    """Its one value; None if there is none."""


class HeaderCache:
    """The parsed blocks of one listener's clients."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Fields, int, bytes | None]] = {}

    def find(self, data: bytes) -> CachedHead | None:
        """The one request in ``data``, if its block is cached."""
        split = _split(data)
        if split is None:
            return None
        path, key, block, body = split
        known = self._known.get(block)
        if known is None or len(body) != known[1]:
            return None
        fields, _, authorization = known
        headers = [*fields, (_KEY, key)] if key else fields.copy()
        return CachedHead(path, key, headers, body, authorization)

    def remember(self, data: bytes, headers: Fields) -> None:
        """Cache the block of a plain request that the parser found at the start of ``data``, with these ``headers``.
        Nothing is cached if ``data`` holds more than that request, or its spelling is unusual."""
        split = _split(data)
        if split is None:
            return
        _, key, block, body = split
        fields = [field for field in headers if field[0] != _KEY]
        said = [value for name, value in fields if name == b"authorization"]
        if len(said) > 1 or any(fold in block for fold in (b"\r\n ", b"\r\n\t")):
            return
        if dict(headers).get(_KEY, b"") != key or len(body) != int(dict(fields)[b"content-length"]):
            return
        if len(self._known) == BLOCKS_MAX:
            self._known.clear()
        self._known[block] = fields, len(body), said[0] if said else None


def _split(data: bytes) -> tuple[bytes, bytes, bytes, bytes] | None:
    """Path, key, block and body of data that starts with a head of the cacheable form."""
    line = _LINE.match(data)
    if line is None:
        return None
    begin = line.end()
    end = data.find(_END, begin, begin + BLOCK_BYTES_MAX)
    if end < 0:
        return None
    for field in _KEY_FIELDS:
        at = data.find(field, begin, end)
        if at >= 0:
            key_end = data.find(b"\r\n", at + len(field))
            key = data[at + len(field) : key_end]
            if _is_visible(key) is None:
                return None
            return line[1], key, data[begin:at] + data[key_end:end], data[end + len(_END) :]
    return line[1], b"", data[begin:end], data[end + len(_END) :]
