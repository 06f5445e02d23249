"""Sessions with PostgreSQL, and the pools that lend them.

*Settings.* A session starts with every setting that the statements of the ledger rely on (decision 0082). A role, a
database, ``postgresql.conf`` or a pooler may give it other values, so one statement, sent right after the login, sets
them. A setting that this login may not set ends the session with an error that names it. Settings are not sent with the
login, because a pooler drops or refuses such parameters.

*No reset.* A connection that returns to a pool is not reset, which would take as long as most statements. Sessions of a
pool keep no state: settings and cursors end with their transaction, and a caller that takes a session lock releases it
or ends the session.

*Spent sessions.* A session that is read-only, or whose statements are cancelled, keeps settings that a role or a
database had when it started. It is closed, and the next caller opens another. So is a session in which a statement was
abandoned: a statement that was parsed but had not run may have started a transaction that no caller would end.

*The pool of a node.* A caller waits briefly for a connection to become free before the pool opens another. A new
connection costs PostgreSQL a process, about 3 ms, and as much again for each table that it reads for the first time;
most statements take less. The first connection is the one that the node started with, which has read the tables
already.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from app.runtime.postgres import RELIED_UPON, parse_address
from app.runtime.tasks import Broadcast
from ledger.errors import StartRefusedError

if TYPE_CHECKING:
    Connection = asyncpg.Connection[asyncpg.Record]
    Pool = asyncpg.Pool[asyncpg.Record]
else:
    Connection = asyncpg.Connection
    Pool = asyncpg.Pool

CONNECT_TIMEOUT_S: Final = 5.0
STATEMENT_TIMEOUT_S: Final = 60.0
"""A statement of a node that takes longer is treated as a lost connection, unless it sets its own timeout."""
PLANNED_ONCE: Final = {"plan_cache_mode": "force_generic_plan"}
"""Settings of sessions for reads: PostgreSQL plans a prepared statement once a session. Reads are by key, so values
change no plan; planning a page of jobs for its values took PostgreSQL as long as reading it."""
AT_A_NODE: Final = {"lock_timeout": "10s", **PLANNED_ONCE}
"""Settings of a node's sessions other than chaining and following: a session that keeps a table locked is reported, and
not waited for until the statement timeout."""
OF_THE_SESSION: Final = (asyncpg.ReadOnlySQLTransactionError, asyncpg.QueryCanceledError)
"""Errors of a statement that may succeed in another session."""
_SPENDING: Final = (*OF_THE_SESSION, asyncio.CancelledError, TimeoutError)


class NodeConnection(Connection):
    """For ``connection_class`` of asyncpg."""

    __slots__ = ("is_spent", "lock_timeout")

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.is_spent = False
        """Whether a statement failed with an error ``OF_THE_SESSION``, or was abandoned: the holder closes the
        session."""
        self.lock_timeout = "0"
        """The session's ``lock_timeout``, from its settings."""

    def limit_statements_to(self, command_timeout_s: float) -> None:
        """Limit each statement, unless it sets its own timeout."""
        self._config: Any = self._config._replace(command_timeout=command_timeout_s)

    @asynccontextmanager
    async def waiting_for_locks(self, at_most_s: float) -> AsyncIterator[None]:
        """Limit the wait of each statement for a lock. If the context ends with an error, the caller must close the
        connection."""
        await self.execute(f"SET lock_timeout = '{at_most_s:g}s'")
        yield
        await self.execute(f"SET lock_timeout = '{self.lock_timeout}'")

    def get_reset_query(self) -> str:
        """No statement: there is no state to reset."""
        return ""

    async def execute(self, *given: Any, **more: Any) -> str:
        """As asyncpg's."""
        try:
            return await super().execute(*given, **more)
        except _SPENDING:
            self.is_spent = True
            raise

    async def _do_execute(self, *given: Any, **more: Any) -> Any:
        try:
            return await super()._do_execute(*given, **more)  # type: ignore[misc]
        except _SPENDING:
            self.is_spent = True
            raise


_SYNCHRONOUS: Final = "synchronous_commit"
_PID: Final = "SELECT pg_catalog.pg_backend_pid()"
PROBES: Final = 3
"""Connections held at once to check whether a pooler keeps sessions apart."""
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
    """A session at ``url`` with ``RELIED_UPON``, extended or overridden by ``settings``.

    ``timeout_s`` bounds the wait for the server unless the address has a ``connect_timeout``.

    Raises:
        ConfigurationError: the address names what is not supported.
        DATABASE_FAULTS: the server is not available, or this login may not set a setting, which is named.
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
    """As ``connect``, for a command without the checks of a node's start: a pooler that does not keep sessions is
    rejected.

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
    """A pool of such sessions, which opens the first on demand. The caller awaits or enters it before use."""

    async def opened(*_: object, **_of_the_pool: object) -> asyncpg.Connection[asyncpg.Record]:
        return await connect(url, settings, timeout_s=timeout_s)

    return asyncpg.create_pool(min_size=0, max_size=connections_max, connection_class=NodeConnection, connect=opened)


async def check_sessions_are_kept(connection: NodeConnection, url: str) -> None:
    """Check that a pooler, if there is one, gives each session its own PostgreSQL session for its whole life.

    A pooler is recognised by the process id that it invents. A pooler that lends sessions for a transaction lends the
    one of ``connection``, which is idle, to another session, or then gives it another one.

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
    """The statement that sets the settings that differ. One of our own settings that this PostgreSQL does not know is
    left out, and ``synchronous_commit`` is only raised, unless it is among ``exactly``."""
    values = ", ".join(f"({_literal(name)}, {_literal(value)})" for name, value in wanted.items())
    keeps = "" if _SYNCHRONOUS in exactly else f" AND (name <> '{_SYNCHRONOUS}' OR current_setting(name) = 'off')"
    return (
        # A separate statement, because the next one may take longer than a role allows.
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
    """Set the options that this system has, by their names in ``socket``; a Unix socket has none."""
    given = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]
    if not options or given is None or given.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with socket.socket(fileno=os.dup(given.fileno())) as same:
        for name, value in options.items():
            level = socket.SOL_SOCKET if name == "SO_KEEPALIVE" else socket.IPPROTO_TCP
            if hasattr(socket, name) and (value or name == "SO_KEEPALIVE"):
                same.setsockopt(level, getattr(socket, name), value)


WAIT_S: Final = 0.02
"""How long a connection that is in use is waited for."""
OPENING_WAIT_S: Final = 0.25
"""The same while another is being opened; they are opened one at a time unless that fails."""


class NodePool(Pool):
    """A pool that begins with the connection ``first``, which it then owns. Belongs to one event loop."""

    def __init__(self, url: str, *, connections_max: int, command_timeout_s: float, first: NodeConnection) -> None:
        super().__init__(
            url,
            connection_class=NodeConnection,
            record_class=asyncpg.Record,
            min_size=1,
            max_size=connections_max,
            max_queries=50_000,
            max_inactive_connection_lifetime=300.0,
            connect=self._open,  # type: ignore[arg-type]
            setup=None,
            init=None,
            reset=None,
            loop=None,
            command_timeout=command_timeout_s,
        )
        self._first: NodeConnection | None = first
        self._is_opening = False
        self._changed = Broadcast()
        """Sent whenever a connection may have become free."""

    async def _open(
        self, url: str, *, command_timeout: float, **_of_the_pool: Any
    ) -> asyncpg.Connection[asyncpg.Record]:
        first, self._first = self._first, None
        if first is not None and not first.is_closed():
            first.limit_statements_to(command_timeout)
            return first
        return await connect(url, AT_A_NODE, command_timeout_s=command_timeout)

    async def _acquire(self, timeout: float | None) -> PoolConnectionProxy[asyncpg.Record]:  # noqa: ASYNC109 (asyncpg's own)
        await self._wait_for_one()
        if self.get_idle_size() or self._is_full():
            return await super()._acquire(timeout)  # type: ignore[misc,no-any-return]
        self._is_opening = True
        try:
            return await super()._acquire(timeout)  # type: ignore[misc,no-any-return]
        finally:
            self._is_opening = False
            self._changed.send()

    async def _wait_for_one(self) -> None:
        """Wait until a connection is free, or the wait is over."""
        began_s = asyncio.get_running_loop().time()
        while not self.get_idle_size() and not self._is_full() and (self._is_opening or self.get_size()):
            wait_s = OPENING_WAIT_S if self._is_opening else WAIT_S
            try:
                async with asyncio.timeout_at(began_s + wait_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _is_full(self) -> bool:
        return self.get_size() == self.get_max_size()

    async def release(
        self,
        connection: PoolConnectionProxy[asyncpg.Record],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 (asyncpg's own)
    ) -> None:
        """As asyncpg's, but a spent session is not lent again."""
        lent: NodeConnection | None = connection._con  # type: ignore[attr-defined]
        if lent is not None and lent.is_spent:
            lent.terminate()
        try:
            await super().release(connection, timeout=timeout)
        finally:
            self._changed.send()
