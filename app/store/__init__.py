"""All SQL of the service. Each function is one statement or a few related ones; the caller owns the transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from asyncpg import Connection as DedicatedConnection
    from asyncpg import Record
    from asyncpg.pool import PoolConnectionProxy

Connection: TypeAlias = "DedicatedConnection[Record] | PoolConnectionProxy[Record]"
"""A connection, dedicated or borrowed from a pool."""
