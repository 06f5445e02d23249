"""What a proxy says of the client behind it: believed of those that ``http.trusted_proxies`` names, of nobody else.

X-Forwarded-Proto   https or http; of several the last, which the proxy itself said
X-Forwarded-For     addresses, the nearest last; the client is the last that is no trusted proxy
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from app.runtime.settings.types import IpNetwork

ADDRESSES_REMEMBERED = 1024


class TrustedProxies:
    """The proxies that are believed."""

    def __init__(self, networks: Iterable[IpNetwork]) -> None:
        self._networks = tuple(networks)
        self._is_trusted = lru_cache(ADDRESSES_REMEMBERED)(self._is_within)

    def has(self, client: tuple[str, int] | None) -> bool:
        """Whether the client of a connection is one of them."""
        return client is not None and self._is_trusted(client[0])

    def believe(self, scope: Any) -> None:
        """Put what the head of a request says into ``scope``: its ``scheme``, and its ``client``, of port 0."""
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
        address = _address_of(host)
        return address is not None and any(address in network for network in self._networks)


def _host_of(said: bytes) -> str | None:
    """The address in one part of the header, which may have a port; None when there is none."""
    text = said.strip().decode("latin-1")
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    address = _address_of(text)
    return None if address is None else str(address)


def _address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
