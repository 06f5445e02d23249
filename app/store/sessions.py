"""Sessions with PostgreSQL: each begins with every setting that the statements of the ledger rely on (decision 0082).

A role, a database, ``postgresql.conf`` or a pooler may give a session other values than PostgreSQL's own. So one
statement, sent right after the login, sets them; one that this login may not set ends the session, with its name. They
are not sent with the login: a pooler drops or refuses such parameters.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import asyncpg

from app.runtime.settings.postgres_address import RELIED_UPON, parse_address
from app.store.node_connection import CONNECT_TIMEOUT_S, NodeConnection
from ledger.errors import StartRefusedError

if TYPE_CHECKING:
    Pool = asyncpg.Pool[asyncpg.Record]

_SYNCHRONOUS: Final = "synchronous_commit"
_PID: Final = "SELECT pg_catalog.pg_backend_pid()"
PROBES: Final = 3
"""Connections that are held at once to see whether a pooler keeps sessions apart."""
_NOT_KEPT: Final = (
    "the address of PostgreSQL leads to a pooler that gives the transactions of one session to several of "
    "PostgreSQL's: {}. Settings and prepared statements would be lost. Let it lead to PostgreSQL itself, or to "
    "a pool of sessions (pool_mode = session in PgBouncer; see docs/poolers.md)"
)


async def connect(
    url: str,
    settings: Mapping[str, str] | None = None,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    command_timeout_s: float | None = None,
) -> NodeConnection:
    """A session at ``url`` with ``RELIED_UPON``, and ``settings`` beside or in the place of those.

    ``timeout_s`` bounds the wait for the server unless the address has a ``connect_timeout``.

    Raises:
        ConfigurationError: the address names what is not supported.
        DATABASE_FAULTS: there is none now, or this login may not set a setting, which is named.
    """
    address = parse_address(url)
    wanted = {_SYNCHRONOUS: "on", **RELIED_UPON, **address.settings, **(settings or {})}
    if address.connect_timeout_s is not None:
        timeout_s = address.connect_timeout_s
    connection: NodeConnection = await asyncpg.connect(
        address.url, timeout=timeout_s, command_timeout=command_timeout_s, connection_class=NodeConnection
    )
    try:
        _set_socket_options(connection, address.socket_options)
        connection.lock_timeout = wanted["lock_timeout"]
        await connection.execute(_beginning(wanted, settings or {}), timeout=timeout_s)
    except asyncpg.InsufficientPrivilegeError as error:
        connection.terminate()
        raise asyncpg.InsufficientPrivilegeError(
            f"{error}; it was changed for this login or database: ALTER ROLE or ALTER DATABASE ... RESET it, or "
            "postgresql.conf"
        ) from error
    except BaseException:
        connection.terminate()
        raise
    return connection


async def connect_alone(url: str, *, timeout_s: float) -> NodeConnection:
    """As ``connect``, for a command that no start went before: a pooler that does not keep sessions is refused.

    Raises:
        ConfigurationError, DATABASE_FAULTS: as there.
        StartRefusedError: there is such a pooler.
    """
    connection = await connect(url, timeout_s=timeout_s)
    try:
        await check_sessions_are_kept(connection, url)
    except BaseException:
        connection.terminate()
        raise
    return connection


def pool(url: str, settings: Mapping[str, str] | None = None, *, connections_max: int, timeout_s: float) -> Pool:
    """A pool of such sessions, which opens none before one is asked for. Awaited or entered before it is used."""

    async def opened(*_: object, **_of_the_pool: object) -> asyncpg.Connection[asyncpg.Record]:
        return await connect(url, settings, timeout_s=timeout_s)

    return asyncpg.create_pool(min_size=0, max_size=connections_max, connection_class=NodeConnection, connect=opened)


async def check_sessions_are_kept(connection: NodeConnection, url: str) -> None:
    """See that a pooler in between, if there is one, gives each session one of PostgreSQL's for as long as it lasts.

    A pooler is known by the process id that it made up. One that lends sessions for a transaction lends that of
    ``connection``, which is idle, to another session, or gives it another one then.

    Raises:
        StartRefusedError: it does not, or it has too few sessions for a node.
    """
    own = await connection.fetchval(_PID)
    if own == connection.get_server_pid():
        return
    async with AsyncExitStack() as held:
        for count in range(1, PROBES + 1):
            try:
                other = await connect(url, timeout_s=CONNECT_TIMEOUT_S)
                held.push_async_callback(other.close, timeout=CONNECT_TIMEOUT_S)
                await other.execute("BEGIN", timeout=CONNECT_TIMEOUT_S)
                lent = await other.fetchval(_PID, timeout=CONNECT_TIMEOUT_S)
                now = await connection.fetchval(_PID, timeout=CONNECT_TIMEOUT_S)
            except TimeoutError as error:
                raise StartRefusedError(
                    f"the pooler that the address of PostgreSQL leads to gave no more than {count} sessions "
                    f"within {CONNECT_TIMEOUT_S:g} s: let its pool have as many as a node needs (docs/poolers.md)"
                ) from error
            except asyncpg.PostgresError as error:
                raise StartRefusedError(_NOT_KEPT.format(error.args[0])) from error
            if lent == own or now != own:
                raise StartRefusedError(_NOT_KEPT.format(f"it lent process {own} to another session"))
            await other.execute("ROLLBACK", timeout=CONNECT_TIMEOUT_S)


def _beginning(wanted: Mapping[str, str], exactly: Mapping[str, str]) -> str:
    """The statement that sets what is not so already. A setting that this PostgreSQL does not know is left out where it
    is one of ours to set, and ``synchronous_commit`` is only raised, unless it is among ``exactly``."""
    values = ", ".join(f"({_literal(name)}, {_literal(value)})" for name, value in wanted.items())
    keeps = "" if _SYNCHRONOUS in exactly else f" AND (name <> '{_SYNCHRONOUS}' OR current_setting(name) = 'off')"
    return (
        # By a statement of its own: the next one may take longer than a role allows.
        f"SET statement_timeout = {_literal(wanted['statement_timeout'])};"
        f" SELECT set_config(name, setting, false) FROM (VALUES {values}) AS wanted(name, setting)"
        " WHERE current_setting(name, true) IS DISTINCT FROM setting"
        f" AND (current_setting(name, true) IS NOT NULL OR name NOT IN ({', '.join(map(_literal, RELIED_UPON))}))"
        + keeps
    )


def _literal(text: str) -> str:
    """A literal of PostgreSQL, whatever ``standard_conforming_strings`` is."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _set_socket_options(connection: NodeConnection, options: Mapping[str, int]) -> None:
    """Set options by their names in ``socket``, those that this system has; a socket of this machine has none."""
    transport = connection._transport  # type: ignore[attr-defined]
    given = transport.get_extra_info("socket")
    if not options or given is None or given.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with socket.socket(fileno=os.dup(given.fileno())) as same:
        for name, value in options.items():
            level = socket.SOL_SOCKET if name == "SO_KEEPALIVE" else socket.IPPROTO_TCP
            if hasattr(socket, name) and (value or name == "SO_KEEPALIVE"):
                same.setsockopt(level, getattr(socket, name), value)
