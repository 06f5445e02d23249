"""Pages of rows with payloads, bounded twice: by rows, and by the bytes of their JSON, so that a list of large ones is
cut short rather than built whole."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from app.store.rows import Row, whole

if TYPE_CHECKING:
    from app.store import Connection

PAGE_BYTES_MAX = 4 << 20
"""A page ends after the row that brings its JSON to this many bytes."""
PAYLOAD_BYTES = "coalesce(octet_length(payload::text), 0) AS bytes"


def page_of(listed: str, order: str, limit: str, bytes_max: int = PAGE_BYTES_MAX) -> str:
    """The relation of the rows of ``listed``, a query with ``bytes`` and at most ``limit`` + 1 rows, that one page has.

    ``number`` counts its rows in ``order``; ``found`` is how many ``listed`` has.
    """
    return f"""(
SELECT *
  FROM (SELECT listed.*, row_number() OVER ordered AS number, count(*) OVER () AS found,
               sum(bytes) OVER ordered - bytes AS bytes_before
          FROM ({listed}) AS listed
        WINDOW ordered AS (ORDER BY {order})) AS numbered
 WHERE number <= {limit} AND bytes_before < {bytes_max})"""


async def fetch_page(
    connection: Connection,
    row: type[Row],
    query: str,
    tenant_id: str,
    *arguments: object,
    nullable: Collection[str] = (),
) -> tuple[list[Row], bool]:
    """The rows of ``query``, which selects the fields of ``row`` and ``found``, and whether more follow.

    Raises:
        ChainDamagedError: a column is NULL that is not ``nullable``.
    """
    rows = await connection.fetch(query, tenant_id, *arguments)
    page = [whole(tenant_id, row._make(tuple(each)[:-1]), nullable) for each in rows]
    return page, bool(rows) and rows[-1]["found"] > len(rows)
