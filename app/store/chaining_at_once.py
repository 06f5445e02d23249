"""SQL of a small batch that is chained in one statement, which is a transaction by itself.

Its columns travel as one text each, a value a line: the driver would look at each of some 20 values a row by itself,
which takes longer than the rest of the way to the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import repeat
from typing import TYPE_CHECKING, Any

from app.store.chaining import ChainHead, Step
from app.store.log_rows import LOG_COLUMNS, LogRows

if TYPE_CHECKING:
    from app.store import Connection

_KEY_TYPES = ("text", "smallint", "text", "integer", "bytea", "bigint", "bigint", "bigint")
_LOG_TYPES = {
    "seq": "bigint",
    "hlc_physical": "bigint",
    "hlc_logical": "bigint",
    "link_version": "smallint",
    "payload": "json",
    "origin": "json",
}
_KEYS_AT = 13
_ROWS_AT = _KEYS_AT + len(_KEY_TYPES)
_COUNTS_AT = _ROWS_AT + len(LOG_COLUMNS)
_BODY_DIGEST = _KEY_TYPES.index("bytea")


def _columns(first: int, types: Sequence[str], form: str = "{}") -> str:
    """Columns of these types, of an empty line NULL; so is what a column is shorter than the longest. In ``form``
    unnested they are not copied to a table in between, as in FROM."""
    arrays = (
        f"string_to_array(${number}, E'\\n', ''){'' if kind == 'text' else f'::{kind}[]'}"
        for number, kind in enumerate(types, first)
    )
    return ", ".join(map(form.format, arrays))


# Who waits for a row meanwhile sees it as it is then, and all else as it was: what is to be met, FOR UPDATE meets anew.
_CHAIN = f"""
WITH fence AS MATERIALIZED (
    SELECT FROM scheduler.wal_positions WHERE node_id = $1 AND epoch = $2 AND chained_lsn = $3 FOR UPDATE
), met AS MATERIALIZED (
    SELECT h.tenant_id
      FROM unnest($6::text[], $7::bigint[], $8::text[], $9::text[]) AS n(tenant_id, seq, chain_link, hlc)
      JOIN scheduler.chain_heads AS h ON h.tenant_id = n.tenant_id
     WHERE EXISTS (SELECT FROM fence)
       AND (h.head_seq, h.head_chain_link, h.head_hlc) IS NOT DISTINCT FROM (n.seq, n.chain_link, n.hlc)
     ORDER BY h.tenant_id
       FOR UPDATE OF h
), fit AS MATERIALIZED (
    SELECT is_met, is_met AND NOT EXISTS (
               SELECT FROM unnest({_columns(_KEYS_AT, _KEY_TYPES[:3])}) AS n(tenant_id, route, key)
                 JOIN scheduler.idempotency AS i
                   ON (i.tenant_id, i.route, i.key) = (n.tenant_id, n.route, n.key)) AS is_so
      FROM (SELECT count(*) = cardinality($6) AS is_met FROM met) AS heads
), advanced AS (
    UPDATE scheduler.wal_positions
       SET chained_lsn = $4, seen_durable_lsn = greatest(seen_durable_lsn, $5), updated_at = now()
     WHERE node_id = $1 AND (SELECT is_so FROM fit)
    RETURNING 1
), moved AS (
    UPDATE scheduler.chain_heads AS h
       SET head_seq = n.head_seq, head_chain_link = n.head_chain_link, head_hlc = n.head_hlc, updated_at = now()
      FROM unnest($6::text[], $10::bigint[], $11::text[], $12::text[])
           AS n(tenant_id, head_seq, head_chain_link, head_hlc)
     WHERE h.tenant_id = n.tenant_id AND (SELECT is_so FROM fit)
    RETURNING (h.head_seq, h.head_chain_link, h.head_hlc)
              IS NOT DISTINCT FROM (n.head_seq, n.head_chain_link, n.head_hlc) AS is_there
), entries AS (
    INSERT INTO scheduler.scheduler_log ({", ".join(LOG_COLUMNS)})
    SELECT {_columns(_ROWS_AT, [_LOG_TYPES.get(name, "text") for name in LOG_COLUMNS], "unnest({})")}
     WHERE (SELECT is_so FROM fit)
    RETURNING 1
), keyed AS (
    INSERT INTO scheduler.idempotency (tenant_id, route, key, line, body_digest, seq, epoch, lsn)
    SELECT {_columns(_KEYS_AT, _KEY_TYPES, "unnest({})")}
     WHERE (SELECT is_so FROM fit)
    RETURNING 1
)
SELECT is_met, is_so AND 1 = 1 / ((SELECT count(*) FROM advanced) = 1
                      AND (SELECT count(*) FILTER (WHERE is_there) FROM moved) = cardinality($6)
                      AND (SELECT count(*) FROM entries) = ${_COUNTS_AT}::bigint
                      AND (SELECT count(*) FROM keyed) = ${_COUNTS_AT + 1}::bigint)::integer
  FROM fit
"""


class AtOnce(Enum):
    """What became of a batch."""

    CHAINED = "chained"
    ELSEWHERE = "the fence does not let through, or a head is elsewhere"
    KEYED = "the chain has a line of one of its keyed requests"
    UNSENT = "a text in it has several lines, or none"


async def chain_at_once(
    connection: Connection,
    step: Step,
    moves: Sequence[tuple[str, ChainHead, ChainHead]],
    log_rows: LogRows,
    idempotency_rows: Sequence[tuple[Any, ...]],
) -> AtOnce:
    """Pass the fence, lock the heads of tenants that are where they are said to be, move them, (tenant, from, to) each,
    add rows to the log and rows as ``idempotency.store_lines``, and commit all that; or do nothing.

    Raises:
        asyncpg.DivisionByZeroError: PostgreSQL did not store all of it, and said no error; nothing was done.
        DATABASE_FAULTS: where it is not the data that PostgreSQL refuses, all or nothing may be committed.
    """
    heads = zip(*((tenant_id, *old, *new) for tenant_id, old, new in moves), strict=True)
    columns = _lines(_keys(idempotency_rows)) + _lines(zip(*log_rows, strict=True))
    if None in columns:
        return AtOnce.UNSENT
    counts = len(log_rows), len(idempotency_rows)
    row = await connection.fetchrow(_CHAIN, *step, *heads, *columns, *counts)
    assert row is not None
    is_met, is_chained = row
    if is_chained:
        return AtOnce.CHAINED
    return AtOnce.KEYED if is_met else AtOnce.ELSEWHERE


def _keys(rows: Sequence[tuple[Any, ...]]) -> Iterable[Sequence[Any]]:
    """The columns of idempotency rows, digests as PostgreSQL writes bytes."""
    if not rows:
        return repeat((), len(_KEY_TYPES))
    columns = list(zip(*rows, strict=True))
    columns[_BODY_DIGEST] = tuple([f"\\x{digest.hex()}" for digest in columns[_BODY_DIGEST]])
    return columns


def _lines(columns: Iterable[Sequence[Any]]) -> list[str | None]:
    """Each column as one text, a value a line; None where that would be read as other values."""
    return [_joined(column) for column in columns]


def _joined(column: Sequence[Any]) -> str | None:
    if column.count(None) == len(column):
        return ""
    if isinstance(column[-1], int):
        return "\n".join(map(str, column))
    if "" in column:
        return None
    joined = "\n".join(column if None not in column else ["" if value is None else value for value in column])
    return joined if joined.count("\n") == len(column) - 1 else None
