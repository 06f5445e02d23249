"""Lists: their pages, and the cursors that say where the next page begins.

A cursor is opaque to clients; inside it is unpadded base64url of a JSON array::

    [list, scope, ...position]        ["jobs", "acme/", 1704931200000, 1, "node-7f3a"]

``scope`` binds a cursor to the list it came from: tenant, filter. One from elsewhere is refused, and so is one that was
not written here: another spelling of the same array, or a position that no list has.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import orjson
from starlette.responses import Response

from app.edge.answers import json_answer
from app.store import chain_reads
from app.store.reading import reading
from ledger.errors import InvalidInputError
from ledger.hlc import Hlc

if TYPE_CHECKING:
    from app.store import Connection
    from app.store.reading import Pool

_INTEGER_MAX = 2**63 - 1

Row = TypeVar("Row")
Position = TypeVar("Position", bound=tuple[int | str, ...])


class Cursors(Generic[Position]):
    """The cursors of one list; ``position`` makes a position of its parts, and raises if there is none of these."""

    def __init__(self, name: str, position: Callable[..., Position]) -> None:
        self._name = name
        self._position = position

    def next(self, scope: str, position: tuple[int | str, ...]) -> str:
        """The cursor within ``scope`` that stands at ``position``."""
        return base64.urlsafe_b64encode(orjson.dumps([self._name, scope, *position])).rstrip(b"=").decode()

    def at(self, scope: str, cursor: str | None) -> Position | None:
        """Where ``cursor`` stands; None when there is no cursor.

        Raises:
            InvalidInputError: it is not a cursor of this list.
        """
        if cursor is None:
            return None
        try:
            _, _, *parts = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
            position = self._position(*parts)
            is_ours = self.next(scope, position) == cursor
        except (ValueError, TypeError, ArithmeticError, InvalidInputError):
            is_ours = False
        if not is_ours:
            raise InvalidInputError("cursor: not a next_cursor of this very list; start without one", ("cursor",))
        return position


def hlc_position(physical_ms: int, logical: int, node_id: str) -> Hlc:
    """An HLC as a position."""
    return Hlc.parse(f"{physical_ms}:{logical}:{node_id}")


def number_position(number: int) -> tuple[int]:
    """A number from 1 on as a position."""
    if not 1 <= int(number) <= _INTEGER_MAX:
        raise ValueError
    return (int(number),)


def text_position(text: str) -> tuple[str]:
    """A text as a position; PostgreSQL cannot hold the character that is refused."""
    if "\0" in str(text):
        raise ValueError
    return (str(text),)


def page(items: Sequence[object], next_cursor: str | None, **more: object) -> Response:
    """A page as an answer."""
    return json_answer({"items": items, "next_cursor": next_cursor, **more})


class NewestFirst(Generic[Row]):
    """A list of rows of a tenant that are numbered, the newest first."""

    def __init__(
        self,
        name: str,
        read: Callable[[Connection, str, int, int], Awaitable[list[Row]]],
        number_of: Callable[[Row], int],
    ) -> None:
        """``read`` gives the rows of a tenant below a number, up to a limit."""
        self._cursors = Cursors(name, number_position)
        self._read = read
        self._number_of = number_of

    async def read(self, pool: Pool, tenant_id: str, cursor: str | None, limit: int) -> tuple[list[Row], str | None]:
        """The rows of a page, and the cursor of the next.

        Raises:
            InvalidInputError: ``cursor`` is none of this list.
            TenantNotFoundError: there is no such tenant.
        """
        (below,) = self._cursors.at(tenant_id, cursor) or (_INTEGER_MAX,)
        async with reading(pool) as connection:
            found = await self._read(connection, tenant_id, below, limit + 1)
            if not found:
                await chain_reads.require_tenant(connection, tenant_id)
        rows = found[:limit]
        return rows, self._cursors.next(tenant_id, (self._number_of(rows[-1]),)) if len(found) > limit else None
