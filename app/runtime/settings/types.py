"""What the value of a setting may be: durations, sizes and addresses as a person writes them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import methodcaller
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, SecretStr
from pydantic_settings import NoDecode

from app.runtime.postgres import parse_address
from ledger.errors import ConfigurationError, InvalidInputError, reported_as
from ledger.names import GATE, NODE_ID, TENANTS, anchored
from ledger.text import secret_text
from signing import private_keys
from signing.files import path_of
from signing.note import WitnessKey

Item = TypeVar("Item")

_UNIT_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?P<amount>\d+(?:\.\d+)?) ?(?P<unit>us|ms|s|m|h|d)")
_CLOCK_DURATION = re.compile(r"(?:(?P<d>\d{1,5})\.)?(?P<h>\d{2}):(?P<m>[0-5]\d):(?P<s>[0-5]\d(?:\.\d{1,6})?)")
_UNIT_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = re.compile(r"(?P<amount>\d{1,18}) ?(?P<unit>B|KiB|MiB|GiB)?")
_HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?", re.ASCII)
_URL_HOST = r"(?P<host>[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>\d{1,5}))?"
_FETCHED_URL = re.compile(rf"(?P<scheme>https?)://{_URL_HOST}(?:/[!-~]{{0,2000}})?", re.ASCII)
_SYSLOG_URL = re.compile(rf"syslog\+tls://{_URL_HOST}", re.ASCII)


def parse_duration(value: object) -> timedelta:
    """The span that ``5s``, ``500ms``, ``1.5h``, ``7d`` or ``[d.]hh:mm:ss`` stands for.

    Raises:
        ValueError: none of these.
    """
    if isinstance(value, timedelta):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if match := _DURATION.fullmatch(text):
        return timedelta(seconds=float(match["amount"]) * _UNIT_SECONDS[match["unit"]])
    if match := _CLOCK_DURATION.fullmatch(text):
        return timedelta(
            days=int(match["d"] or 0),
            hours=int(match["h"]),
            minutes=int(match["m"]),
            seconds=float(match["s"]),
        )
    raise ValueError("a duration is a number with us, ms, s, m, h or d, such as 500ms, or hh:mm:ss")


def parse_size(value: object) -> int:
    """The bytes that ``64 MiB``, ``512 KiB`` or a plain number stand for.

    Raises:
        ValueError: none of these.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("a size is a whole number of bytes, or one with B, KiB, MiB or GiB, such as 64 MiB")
    return int(match["amount"]) * _UNIT_BYTES[match["unit"] or "B"]


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a duration or a size may be, as a person writes them."""

    low: str
    high: str
    parse: Callable[[object], Any]

    def __call__(self, value: Any) -> Any:
        """``value``, which lies between both.

        Raises:
            ValueError: it does not.
        """
        if not self.parse(self.low) <= value <= self.parse(self.high):
            raise ValueError(f"must lie between {self.low} and {self.high}")
        return value


def duration_s(option: str, text: str, bounds: Bounds) -> float:
    """Seconds of a duration such as ``7d`` that ``option`` of a command has.

    Raises:
        ConfigurationError: it is no duration, or out of bounds.
    """
    with reported_as(ConfigurationError, f"{option} {text!r}", ValueError):
        duration: timedelta = bounds(parse_duration(text))
    return duration.total_seconds()


def between(low: str, high: str) -> AfterValidator:
    """A duration in these bounds."""
    return AfterValidator(Bounds(low, high, parse_duration))


def sized(low: str, high: str) -> AfterValidator:
    """A size in these bounds."""
    return AfterValidator(Bounds(low, high, parse_size))


def _one_line(value: str, check: Callable[[str], object] = str) -> str:
    """A secret as it is used, if ``check`` takes it; pydantic names the setting."""
    try:
        text = secret_text(value, "what is set")
        check(text)
        return text
    except ConfigurationError as error:
        raise ValueError(str(error)) from None


def _secret(value: SecretStr) -> SecretStr:
    return SecretStr(_one_line(value.get_secret_value()))


def _fitting(fits: Callable[[str], object], words: str) -> AfterValidator:
    """A text that ``fits``; ``words`` say what it must be."""

    def check(value: str) -> str:
        if not fits(value):
            raise ValueError(words)
        return value

    return AfterValidator(check)


def comma_separated(value: object) -> object:
    """The list that text stands for in the environment; what is no text as it is."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _witness(value: object) -> WitnessKey:
    try:
        return WitnessKey.parse(value if isinstance(value, str) else "")
    except InvalidInputError as error:
        raise ValueError(f"must be a verifier key such as name+hash+base64 of type 4: {error}") from None


def _network(value: object) -> IpNetwork:
    try:
        return ipaddress.ip_network(value if isinstance(value, str) else "")
    except ValueError:
        raise ValueError("must be an address or a network, such as 10.0.0.7 or 10.0.0.0/24") from None


def _is_listen_address(value: str) -> bool:
    host, _, port = value.rpartition(":")
    return host != "" and port.isascii() and port.isdigit() and int(port) <= 65535


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a service at this address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_fetched_url(value: str) -> bool:
    """Whether what is behind this URL may be believed: it is one of https, or of http on this machine."""
    url = _FETCHED_URL.fullmatch(value)
    if url is None or not _has_place(url):
        return False
    return url["scheme"] == "https" or url["host"].lower() in {"localhost", "127.0.0.1", "[::1]"}


def is_syslog_url(value: str) -> bool:
    """Whether it names a syslog server that is reached over TLS: ``syslog+tls://HOST[:PORT]``."""
    url = _SYSLOG_URL.fullmatch(value)
    return url is not None and _has_place(url)


def _has_place(url: re.Match[str]) -> bool:
    """Whether the port is one, and the host an address or a name, also one that Punycode spells."""
    if int(url["port"] or 0) > 65535:
        return False
    # Imported here: it takes a while, and most settings have no such URL.
    import httpx

    try:
        return bool(httpx.URL(url[0]).host)
    except (httpx.InvalidURL, UnicodeError, IndexError):
        return False


def _is_key_place(value: str) -> bool:
    try:
        return private_keys.is_remote(value) or path_of(value) is not None
    except ConfigurationError:
        return False


Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
CommaSeparated = Annotated[list[Item], NoDecode, BeforeValidator(comma_separated)]
"""A list, in the environment separated by commas."""
Size = Annotated[int, BeforeValidator(parse_size)]
ListenAddress = Annotated[str, _fitting(_is_listen_address, "must be host:port, such as 127.0.0.1:8080 or [::1]:8080")]
"""``host:port``."""
HostName = Annotated[
    str,
    _fitting(
        _HOST_NAME.fullmatch,
        "must be a host name or an address without scheme and port, such as ledger.example.org",
    ),
    AfterValidator(methodcaller("strip", "[]")),
]
"""A host as the header ``Host`` names it, without a port."""
KeyPlace = Annotated[
    str,
    _fitting(
        _is_key_place,
        "must be a folder, such as file:/etc/tallystick/keys, or the beginning of a key URI, such as awskms:",
    ),
]
"""A folder of key files, or the beginning of the URIs of keys outside of files."""
ROOT_PATH: Final = re.compile(r"(?:/[A-Za-z0-9._~-]+)*", re.ASCII)
ROOT_PATH_MAX: Final = 128
RootPath = Annotated[
    str,
    _fitting(
        ROOT_PATH.fullmatch,
        "must be a path that begins with a slash and ends without one, such as /ledger",
    ),
]
"""A prefix of paths; empty for none."""
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
Network = Annotated[IpNetwork, PlainValidator(_network)]
"""An address, or those that begin alike."""
Witness = Annotated[WitnessKey, PlainValidator(_witness)]
Secret = Annotated[SecretStr, AfterValidator(_secret)]
"""Shown nowhere; the end of a line behind it is no part of it."""
DatabaseUrl = Annotated[str, AfterValidator(partial(_one_line, check=parse_address))]
TenantsPattern = Annotated[
    str,
    _fitting(
        re.compile(TENANTS).fullmatch,
        "must be a tenant, the beginning of some and *, such as team-*, or * for all",
    ),
    Field(json_schema_extra={"pattern": anchored(TENANTS), "examples": ["team-*"]}),
]
"""A tenant, the beginning of tenants and ``*``, or ``*`` for all."""
PATTERNS_MAX = 100
"""Patterns of tenants in one list."""
FetchedUrl = Annotated[
    str,
    _fitting(is_fetched_url, "must be an https:// URL without a user; http:// only of localhost, 127.0.0.1 or [::1]"),
]
"""Whence the service fetches what it then believes."""
ReceiverUrl = Annotated[
    str,
    _fitting(
        lambda value: is_fetched_url(value) or is_syslog_url(value),
        "must be an https:// URL without a user, http:// only of localhost, 127.0.0.1 or [::1], or "
        "syslog+tls://HOST:PORT",
    ),
]
"""Where webhooks are delivered to."""
AuthorityUrl = Annotated[
    str,
    _fitting(
        re.compile(r"https?://[!-?A-~]{1,2000}").fullmatch,
        "must be an http:// or https:// URL without a user: it is on record beside each time stamp",
    ),
]
"""A time-stamping authority."""
TraceUrl = Annotated[
    str,
    _fitting(
        re.compile(r"(?=.*\{trace_id\})https?://[!-.0-?A-z|~]{1,255}/(?:[!-z|~]|\{trace_id\}){1,2000}").fullmatch,
        "must be an https:// or http:// URL without a user whose path, query or fragment has {trace_id}, such as "
        "https://jaeger.example/trace/{trace_id}",
    ),
]
"""Where a trace is shown."""
SpansUrl = Annotated[
    str,
    _fitting(
        re.compile(r"https?://[!-?A-~]{1,2000}").fullmatch,
        "must be an https:// or http:// URL without a user, such as http://127.0.0.1:4318/v1/traces",
    ),
]
"""A receiver of OTLP/HTTP."""
NodeId = Annotated[str, Field(pattern=anchored(NODE_ID))]
JobIdPart = Annotated[str, Field(pattern=anchored(GATE))]
