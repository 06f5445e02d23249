"""PostgreSQL as a node sees it: its address, and its errors while it is down, slow, restarting or failing over.

The address is as users of libpq write it: some parameters are for the driver, some are applied here, some are refused.

``postgresql://user:password@host:port/database?name=value&...`` with the parameters of libpq 18 (its documentation,
34.1.2). Each is applied, or refused by name before the node connects: a parameter must not be ignored silently, and the
driver sends an unknown name to the server as a setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote, unquote, urlsplit

import asyncpg

from ledger.errors import ConfigurationError, refuse

RELIED_UPON: Final[Mapping[str, str]] = {
    "search_path": "pg_catalog, pg_temp",
    "standard_conforming_strings": "on",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "quote_all_identifiers": "off",
    "row_security": "off",
    "session_replication_role": "origin",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "statement_timeout": "0",
    "transaction_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
}
"""Settings of a session: another value would change what the statements of the ledger mean, or end them.

With ``row_security`` off a statement fails where row security would hide rows: hidden rows would be taken for lost."""

CONNECT_TIMEOUT_MAX_S: Final = 600
_KEEPALIVE: Final = {
    "keepalives": "SO_KEEPALIVE",
    "keepalives_idle": "TCP_KEEPIDLE",
    "keepalives_interval": "TCP_KEEPINTVL",
    "keepalives_count": "TCP_KEEPCNT",
    "tcp_user_timeout": "TCP_USER_TIMEOUT",
}
_BY_THE_DRIVER: Final = frozenset(
    {
        *("host", "port", "dbname", "database", "user", "password", "passfile", "service", "krbsrvname", "gsslib"),
        *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "sslpassword", "sslnegotiation"),
        *("ssl_min_protocol_version", "ssl_max_protocol_version", "target_session_attrs"),
    }
)
_HERE: Final = frozenset(
    {
        *("connect_timeout", "hostaddr", "ssl", "application_name", "fallback_application_name", "options"),
        *_KEEPALIVE,
    }
)
_AS_IT_IS: Final[Mapping[str, tuple[str, ...]]] = {
    "client_encoding": ("utf8", "utf-8", "unicode", "auto"),
    "channel_binding": ("disable", "prefer"),
    "gssencmode": ("disable", "prefer"),
    "gssdelegation": ("0",),
    "sslcompression": ("0",),
    "sslsni": ("1",),
    "sslcertmode": ("allow",),
    "load_balance_hosts": ("disable",),
    "replication": ("false", "off", "no", "0"),
    "min_protocol_version": ("3.0",),
    "max_protocol_version": ("3.0", "3.2", "latest"),
}
"""Parameters that may only repeat the value that applies anyway, by name."""
_REFUSED: Final[Mapping[str, str]] = {
    "require_auth": "the driver cannot restrict how the server authenticates; sslmode=verify-full proves the server",
    "requiressl": "libpq dropped it; write sslmode=require",
    "sslcrldir": "name one file with sslcrl",
    "requirepeer": "the driver does not check who owns a socket",
    "scram_client_key": "write password, or passfile",
    "scram_server_key": "write password, or passfile",
    "sslkeylogfile": "the keys of a connection are not written to a file",
    "servicefile": "set PGSERVICEFILE in the environment",
    "oauth_issuer": "the driver does not authenticate with OAuth",
    "oauth_client_id": "the driver does not authenticate with OAuth",
    "oauth_client_secret": "the driver does not authenticate with OAuth",
    "oauth_scope": "the driver does not authenticate with OAuth",
}
NAMES: Final = frozenset({*_BY_THE_DRIVER, *_HERE, *_AS_IT_IS, *_REFUSED})
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(:(?P<port>\d{1,5}))?", re.ASCII)
_FORM: Final = (
    "the address of PostgreSQL must be like postgresql://user:password@host:5432/database; a # or ? in its password is "
    "written %23 or %3F"
)
_OPTION: Final = re.compile(r"(?:-c\s*|--)([A-Za-z_][\w.-]*)=((?:\\.|[^\\\s])*)(?:\s+|$)", re.DOTALL)


class Address(NamedTuple):
    """The address of a PostgreSQL server, and its options of a connection."""

    url: str
    """With parameters of the driver alone."""
    connect_timeout_s: int | None
    """None where the address does not say."""
    settings: Mapping[str, str]
    """Of the session, by name."""
    socket_options: Mapping[str, int]
    """By the name in ``socket``."""


@lru_cache(maxsize=64)
def parse_address(url: str) -> Address:
    """The address that ``url`` is.

    Raises:
        ConfigurationError: it names an unknown or unsupported parameter. The text does not repeat its values.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigurationError(_FORM) from None
    hosts = map(_HOST.fullmatch, parts.netloc.rpartition("@")[2].split(","))
    is_each_valid = all(host is not None and int(host["port"] or 0) <= 65535 for host in hosts)
    if parts.scheme not in ("postgresql", "postgres") or parts.fragment or not is_each_valid:
        raise ConfigurationError(_FORM)
    given = _parameters(parts.query)
    for name, value in given.items():
        _check(name, value)
    driver = {name: value for name, value in given.items() if name in _BY_THE_DRIVER}
    if "ssl" in given:
        driver.setdefault("sslmode", "require")
    if "hostaddr" in given:
        if "host" in driver or parts.netloc.rpartition("@")[2]:
            raise ConfigurationError("the address has host and hostaddr: give one of them")
        driver["host"] = f"[{given['hostaddr']}]" if ":" in given["hostaddr"] else given["hostaddr"]
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in driver.items())
    settings = _options(given.get("options", ""))
    if application := given.get("application_name") or given.get("fallback_application_name"):
        settings["application_name"] = application
    return Address(
        f"{parts.scheme}://{parts.netloc}{parts.path}{query and '?'}{query}",
        min(int(given["connect_timeout"]), CONNECT_TIMEOUT_MAX_S) or None if "connect_timeout" in given else None,
        settings,
        {_KEEPALIVE[name]: int(value) for name, value in given.items() if name in _KEEPALIVE},
    )


def _parameters(query: str) -> dict[str, str]:
    """Values by name; as in libpq a plus sign is no space, and the last of several values wins."""
    given = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigurationError(f"the parameter {unquote(name)!r} of the address has no value")
        given[unquote(name)] = unquote(value)
    return given


def _check(name: str, value: str) -> None:
    """Raises ConfigurationError unless the parameter is supported."""
    near, allowed = get_close_matches(name, NAMES, n=1), _AS_IT_IS.get(name, ())
    meant = f"did you mean {near[0]}?" if near else "a setting of the session is options=-c%20NAME%3DVALUE"
    refuse(
        ConfigurationError,
        (name not in NAMES, f"{name!r} is no parameter of an address of PostgreSQL: {meant}"),
        (name in _REFUSED, f"the parameter {name} of the address is not supported: {_REFUSED.get(name)}"),
        (
            bool(allowed) and value.lower() not in allowed,
            f"the parameter {name} of the address is not supported, unless it is {' or '.join(allowed)}",
        ),
        (
            (name == "connect_timeout" or name in _KEEPALIVE) and not re.fullmatch("[0-9]{1,9}", value),
            f"the parameter {name} of the address must be a whole number, 0 or more",
        ),
        (
            name == "ssl" and value != "true",
            "the parameter ssl of the address can be true; write sslmode for anything else",
        ),
    )


def _options(options: str) -> dict[str, str]:
    """Settings by name of ``-c name=value`` and ``--name=value``, as a server takes them on its command line.

    Raises:
        ConfigurationError: it holds something else, or sets what the ledger sets itself.
    """
    settings: dict[str, str] = {}
    rest = options.strip()
    own = {name.lower() for name in (*RELIED_UPON, "synchronous_commit", "client_encoding")}
    while rest:
        found = _OPTION.match(rest)
        if found is None:
            raise ConfigurationError("the parameter options of the address may hold -c NAME=VALUE, and nothing else")
        name = found[1].replace("-", "_")
        if name.lower() in own or name.lower().startswith("tallystick."):
            raise ConfigurationError(f"options of the address sets {name}, which the ledger sets itself")
        settings[name] = re.sub(r"\\(.)", r"\1", found[2])
        rest = rest[found.end() :]
    return settings


DATABASE_FAULTS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
"""Errors of a statement when its connection breaks or Postgres refuses. The driver's internal error is one: it is
raised when a connection breaks while the driver is between two states."""


def is_of_a_value(error: BaseException) -> bool:
    """Whether Postgres refuses a value (class 22). An exhausted sequence is no such refusal: it refuses every value
    until an administrator extends it."""
    is_of_all = isinstance(error, asyncpg.SequenceGeneratorLimitExceededError)
    return not is_of_all and isinstance(error, asyncpg.PostgresError) and (error.sqlstate or "")[:2] == "22"


def text_of(error: BaseException) -> str:
    """The error's text for logs and checks."""
    return f"{type(error).__name__}: {str(error) or 'no answer in time'}"
