"""All SQL of the service. One function a statement or a few that belong together; transactions are the caller's."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from asyncpg import Connection as DedicatedConnection
    from asyncpg import Record
    from asyncpg.pool import PoolConnectionProxy

Connection: TypeAlias = "DedicatedConnection[Record] | PoolConnectionProxy[Record]"
"""A connection as the functions here take it: dedicated or borrowed from a pool."""
