"""Lists: their pages, the cursors of the next page, and their forms for other programs.

A cursor is opaque to clients; inside it is unpadded base64url of a JSON array::

    [list, scope, ...position]        ["jobs", "acme/", 1704931200000, 1, "node-7f3a"]

``scope`` binds a cursor to its list: tenant, filter. A cursor of another list is refused, and so is one that was not
written here: another spelling of the same array, or an impossible position.

Other programs get one JSON value a line, or CSV (RFC 4180): CR LF, texts in quotes. A value that is no text or whole
number is written as JSON, null as an empty cell. A spreadsheet takes a cell for a formula by its first character, so a
submitted job could run code on an auditor's machine. Such a text gets a ``'`` in front, which spreadsheets do not show.
"""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import orjson
from starlette.responses import Response

from app.edge.answers import JSON_MEDIA_TYPE, json_answer
from app.edge.forms.body import NDJSON_MEDIA_TYPE
from app.edge.forms.fields import TREE_SIZE_MAX
from app.runtime.answers import json_bytes
from app.store import Connection, chain_reads
from app.store.reading import Pool, reading
from ledger.errors import InvalidInputError
from ledger.hlc import Hlc

Row = TypeVar("Row")
Position = TypeVar("Position", bound=tuple[int | str, ...])


@dataclass(frozen=True)
class Cursors(Generic[Position]):
    """The cursors of one list; ``position`` makes a position of its parts, and raises if they are invalid."""

    name: str
    position: Callable[..., Position]

    def next(self, scope: str, position: tuple[int | str, ...] | None) -> str | None:
        """The cursor within ``scope`` at ``position``; None after the last page."""
        content = orjson.dumps([self.name, scope, *position]) if position else b""
        return base64.urlsafe_b64encode(content).rstrip(b"=").decode() or None

    def at(self, scope: str, cursor: str | None) -> Position | None:
        """The position of ``cursor``; None when there is no cursor.

        Raises:
            InvalidInputError: it is not a cursor of this list.
        """
        if cursor is None:
            return None
        try:
            _, _, *parts = orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
            position = self.position(*parts)
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
    if not 1 <= int(number) <= TREE_SIZE_MAX:
        raise ValueError
    return (int(number),)


def text_position(text: str) -> tuple[str]:
    """A text as a position; PostgreSQL cannot hold the character that is refused."""
    if "\0" in str(text):
        raise ValueError
    return (str(text),)


def page(
    items: Sequence[object], next_cursor: str | None, headers: dict[str, str] | None = None, **more: object
) -> Response:
    """A page as an answer."""
    return json_answer({"items": items, "next_cursor": next_cursor, **more}, headers=headers)


class NewestFirst(Generic[Row]):
    """A list of a tenant's numbered rows, newest first."""

    def __init__(
        self,
        name: str,
        read: Callable[[Connection, str, int, int], Awaitable[list[Row]]],
        number_of: Callable[[Row], int],
    ) -> None:
        """``read`` returns the rows of a tenant below a number, up to a limit."""
        self._cursors = Cursors(name, number_position)
        self._read = read
        self._number_of = number_of

    async def read(self, pool: Pool, tenant_id: str, cursor: str | None, limit: int) -> tuple[list[Row], str | None]:
        """The rows of a page, and the cursor of the next.

        Raises:
            InvalidInputError: ``cursor`` is not of this list.
            TenantNotFoundError: there is no such tenant.
        """
        (below,) = self._cursors.at(tenant_id, cursor) or (TREE_SIZE_MAX,)
        async with reading(pool) as connection:
            found = await self._read(connection, tenant_id, below, limit + 1)
            if not found:
                await chain_reads.require_tenant(connection, tenant_id)
        rows = found[:limit]
        return rows, self._cursors.next(tenant_id, (self._number_of(rows[-1]),)) if len(found) > limit else None


CSV_MEDIA_TYPE: Final = "text/csv"
CSV_JOB_COLUMNS: Final = (
    "tenant_id",
    "job_id",
    "name",
    "status",
    "created_at",
    "last_at",
    "ended_at",
    "run_ms",
    "actor",
    "assigned_dcs",
    "completed",
    "failed",
    "error",
    "result",
    "spec",
    "fence_token",
    "created_hlc",
    "last_hlc",
    "last_seq",
)
"""Members of a listed job that a table has, in this order."""
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""First characters of a cell that is taken for a formula; the last four are the fullwidth forms of the first four."""


def media_type_of(accept: Iterable[str]) -> str:
    """The one of the three media types that the ``Accept`` headers prefer (RFC 9110 12.5.1); JSON if they name none."""
    weights: dict[str, float] = {}
    for named in ",".join(accept).split(","):
        media_type, *parameters = (part.strip().lower() for part in named.split(";"))
        weights.setdefault(media_type, next(map(_weight, (p for p in parameters if p.startswith("q="))), 1.0))
    any_of_these = max(weights.get("*/*", 0.0), weights.get("application/*", 0.0))
    found = {
        JSON_MEDIA_TYPE: weights.get(JSON_MEDIA_TYPE, any_of_these),
        NDJSON_MEDIA_TYPE: weights.get(NDJSON_MEDIA_TYPE, 0.0),
        CSV_MEDIA_TYPE: weights.get(CSV_MEDIA_TYPE, 0.0),
    }
    best = max(found, key=lambda media_type: found[media_type])
    return best if found[best] > 0 else JSON_MEDIA_TYPE


def _weight(parameter: str) -> float:
    try:
        return float(parameter[2:])
    except ValueError:
        return 0.0


def ndjson(items: Iterable[object]) -> bytes:
    """One value a line."""
    return b"".join(json_bytes(item) + b"\n" for item in items)


def csv_rows(columns: Sequence[str], items: Iterable[Mapping[str, Any]]) -> bytes:
    """One row an item: its members named by ``columns``."""
    text = io.StringIO(newline="")
    plain = (orjson.loads(json_bytes(item)) for item in items)
    csv.writer(text, quoting=csv.QUOTE_NONNUMERIC).writerows([_cell(row[name]) for name in columns] for row in plain)
    return text.getvalue().encode()


def csv_head(columns: Sequence[str]) -> bytes:
    """The row that names the columns."""
    return csv_rows(columns, [dict(zip(columns, columns, strict=True))])


def _cell(value: Any) -> str | int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = "" if value is None else value if isinstance(value, str) else orjson.dumps(value).decode()
    return "'" + text if text.startswith(_FORMULA) else text
