"""The connections of a node, which ask the server less than asyncpg's own do.

*What the arrays of built-in types are* is asked once a process, and not once a connection. asyncpg must know the form
of each type before it sends or reads a value. It knows single values of built-in types by itself, but asks the server
for their arrays, three statements for each kind on each connection. The numbers of built-in types are the same in every
database of every version (``FirstNormalObjectId`` in PostgreSQL's ``access/transam.h``).

*To forget what a session holds,* whenever a connection is given back to a pool, is not asked: that takes as long as
most statements that one is borrowed for. Sessions of a pool hold nothing. Settings are those of a transaction, cursors
end with theirs, and who takes a lock of the session gives it back, or ends the session.

*A session that may only read,* or whose statements are cancelled, has settings that a role or a database may have had
when it began, and has no more. So it is ended, and the next one asks anew. So is one whose statement was waited for no
longer: what was parsed, and not yet run, may have begun a transaction that nobody would end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import asyncpg

if TYPE_CHECKING:
    Connection = asyncpg.Connection[asyncpg.Record]
else:
    Connection = asyncpg.Connection

CONNECT_TIMEOUT_S: Final = 5.0
STATEMENT_TIMEOUT_S: Final = 60.0
"""A statement of a node that takes longer counts as a lost connection, unless it says so itself."""
PLANNED_ONCE: Final = {"plan_cache_mode": "force_generic_plan"}
"""Settings of sessions for reads: PostgreSQL plans a prepared statement once a session. What is read is found by key,
so values change no plan; to plan a page of jobs for its values took PostgreSQL as long as to read it."""
AT_A_NODE: Final = {"lock_timeout": "10s", **PLANNED_ONCE}
"""Settings of sessions for what a node asks beside chaining and following: a session that keeps a table locked is
reported, and not waited for as long as a statement may take."""
OF_THE_SESSION: Final = (asyncpg.ReadOnlySQLTransactionError, asyncpg.QueryCanceledError)
"""What PostgreSQL says of a statement that another session may be allowed."""
_SPENDING: Final = (*OF_THE_SESSION, asyncio.CancelledError, TimeoutError)
OID_OF_A_DATABASE_MIN: Final = 16384
"""Numbers from here on are given by a database itself, so in each they mean something else."""


class _NothingRan(NamedTuple):
    """In the place of the statement that asked: with a name, so what was prepared before it still is."""

    name: str = "known"


_known: dict[tuple[int, ...], Any] = {}
"""By numbers of types: the rows that describe them."""


class NodeConnection(Connection):
    """For ``connection_class`` of asyncpg."""

    __slots__ = ("is_spent", "lock_timeout")

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.is_spent = False
        """Whether the session was told what is ``OF_THE_SESSION``, or left in a statement: whoever has it ends it."""
        self.lock_timeout = "0"
        """That of the session, as its settings have it."""

    def limit_statements_to(self, command_timeout_s: float) -> None:
        """From now on no statement takes longer, unless it says so itself."""
        self._config: Any = self._config._replace(command_timeout=command_timeout_s)

    @asynccontextmanager
    async def waiting_for_locks(self, at_most_s: float) -> AsyncIterator[None]:
        """No statement waits longer for a lock meanwhile. Where an error ends it, the connection is to be closed."""
        await self.execute(f"SET lock_timeout = '{at_most_s:g}s'")
        yield
        await self.execute(f"SET lock_timeout = '{self.lock_timeout}'")

    def get_reset_query(self) -> str:
        """No statement: there is nothing to forget."""
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

    async def _introspect_types(
        self,
        typeoids: Collection[int],
        timeout: float | None,  # noqa: ASYNC109 (asyncpg's own)
    ) -> tuple[Any, Any]:
        wanted = tuple(sorted(typeoids))
        if wanted in _known:
            return _known[wanted], _NothingRan()
        rows, statement = await super()._introspect_types(typeoids, timeout)  # type: ignore[misc]
        if wanted[-1] < OID_OF_A_DATABASE_MIN:
            _known[wanted] = rows
        return rows, statement
