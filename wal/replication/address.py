"""Where a safekeeper listens."""

from __future__ import annotations

from ledger.errors import ConfigurationError


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host is in brackets.

    Raises:
        ConfigurationError: it is neither.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"{address!r} is no HOST:PORT")
    return host.strip("[]"), int(port)
