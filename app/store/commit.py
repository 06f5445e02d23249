"""SQL that commits a batch: one statement, and COPY for the rows of a large batch.

``commit`` stores a batch in one transaction, all of it or nothing, and returns the outcome as a value::

    Committed        all of it is stored
    Fenced           the fence failed: chained_lsn or epoch is not what this node wrote last
    HeadsMoved       a chain does not end where the batch was linked
    KeysChained      the chain has other lines of a keyed request of the batch than this node stored
    RowRefused       PostgreSQL refuses a row or a value in it
    RowsLocked       another session keeps a row locked for longer than ``LOCK_TIMEOUT_S``
    TenantDamaged    rows of a tenant are not what this node chained, or PostgreSQL dropped some without an error
    InDoubt          no answer, or an error that is not about the data, such as a deadlock: all is stored, or nothing

A small batch is one statement, which is a transaction by itself. A large batch, or one that creates chains, is a
transaction of the same statement and a COPY: from about 200 rows on, COPY costs PostgreSQL less for each row.

The columns of a statement travel as one text each, one value per line: the driver encodes the values of an
array one by one, which takes longer than the rest of the way to the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import asyncpg
from asyncpg.transaction import Transaction

from app.runtime.postgres import DATABASE_FAULTS
from app.store import Connection
from app.store.chaining import (
    LOG_COLUMNS,
    ChainHead,
    LogRows,
    Step,
    copy_entries,
    create_heads,
    dropped,
    is_record_fault,
    read_heads,
    unmoved,
)
from app.store.reading import turned
from ledger.errors import ChainDamagedError

ROWS_IN_STATEMENT_MAX: Final = 200
"""A larger batch uses COPY."""
COPIED_LOCK_TIMEOUT_MS: Final = 50
"""Longest wait of a transaction whose rows were copied before it has the locks of their heads."""

Value = TypeVar("Value")

KeyedRow = tuple[str, int, str, int, bytes, int, int, int, int]
"""(tenant, route, key, line, body digest, seq, epoch, LSN): a row of the idempotency table; last the number of rows
that this node has stored for its request before."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to be committed together."""

    step: Step
    """How it moves the position of the node, and the fence that it checks."""
    moves: Sequence[tuple[str, ChainHead, ChainHead]]
    """(tenant, head before the batch, head after it) of each chain with new entries."""
    rows: LogRows
    keyed: Sequence[KeyedRow] = ()
    new_chains: Collection[str] = ()
    """Tenants that have no head yet and get one."""
    are_keys_checked: bool = False
    """Whether the keys of its requests were looked up at these heads. Rows of keys change only together with the head
    of their tenant."""


@dataclass(frozen=True, slots=True)
class Committed:
    """All of the batch is stored."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """``chained_lsn`` or epoch is not what this node wrote last; nothing was stored."""


@dataclass(frozen=True, slots=True)
class HeadsMoved:
    """A chain does not end where the batch was linked; nothing was stored."""


@dataclass(frozen=True, slots=True)
class KeysChained:
    """A keyed request of the batch has other lines in the chain than this node knows; nothing was stored."""


@dataclass(frozen=True, slots=True)
class RowRefused:
    """PostgreSQL refuses the data itself (SQLSTATE class 22, 23, 54); nothing was stored."""

    sqlstate: str
    message: str

    @property
    def is_duplicate(self) -> bool:
        """Whether a row with the same key exists."""
        return self.sqlstate == asyncpg.UniqueViolationError.sqlstate


@dataclass(frozen=True, slots=True)
class RowsLocked:
    """Another session keeps a row locked; nothing was stored."""

    error: Exception


@dataclass(frozen=True, slots=True)
class TenantDamaged:
    """The chain of a tenant cannot be extended; nothing was stored."""

    error: ChainDamagedError


@dataclass(frozen=True, slots=True)
class InDoubt:
    """PostgreSQL gave no answer, or an error that is not about the data: all of the batch is stored, or nothing."""

    error: Exception


Answer = Committed | Fenced | HeadsMoved | KeysChained | RowRefused | RowsLocked | TenantDamaged | InDoubt

_KEY_TYPES = ("text", "smallint", "text", "integer", "bytea", "bigint", "bigint", "bigint")
_KEY_COLUMNS = len(_KEY_TYPES) + 1
_LOG_TYPES = {
    "seq": "bigint",
    "hlc_physical": "bigint",
    "hlc_logical": "bigint",
    "link_version": "smallint",
    "payload": "json",
    "origin": "json",
}
_KEYS_AT = 13
_KEYS_CHECKED = _KEYS_AT + _KEY_COLUMNS
_ROWS_AT = _KEYS_CHECKED + 1
_COUNTS_AT = _ROWS_AT + len(LOG_COLUMNS)
_BODY_DIGEST = _KEY_TYPES.index("bytea")


def _columns(first: int, types: Sequence[str], form: str = "{}") -> str:
    """Columns of these types; NULL for an empty line, or where a column is shorter than the longest. ``unnest`` in the
    SELECT list does not materialize them, as it does in FROM."""
    arrays = (
        f"string_to_array(${number}, E'\\n', ''){'' if kind == 'text' else f'::{kind}[]'}"
        for number, kind in enumerate(types, first)
    )
    return ", ".join(map(form.format, arrays))


_STORE_ROWS = f"""INSERT INTO scheduler.scheduler_log ({", ".join(LOG_COLUMNS)})
    SELECT {_columns(_ROWS_AT, [_LOG_TYPES.get(name, "text") for name in LOG_COLUMNS], "unnest({})")}
     WHERE (SELECT all_hold FROM preconditions)
    RETURNING 1"""
_FAIL_UNLESS_STORED = f"""CASE WHEN all_hold
            THEN 1 / (positions = 1 AND coalesce(cardinality(heads), 0) = cardinality($6)
                      AND entries = ${_COUNTS_AT}::bigint
                      AND coalesce(cardinality(keyed), 0) = ${_COUNTS_AT + 1}::bigint)::integer END"""
"""Divides by zero on purpose: the statement fails where rows were dropped without an error."""


def _statement(entries: str, check: str) -> str:
    """The statement that commits, with its part for ``entries`` and its last column.

    A statement that waits for a row sees its new version, and everything else as of the statement's start. So FOR
    UPDATE compares the heads again. If rows of keys were stored meanwhile, a head has moved.
    """
    return f"""
WITH fence AS MATERIALIZED (
    SELECT FROM scheduler.wal_positions WHERE node_id = $1 AND epoch = $2 AND chained_lsn = $3 FOR UPDATE
), matching_heads AS MATERIALIZED (
    SELECT h.tenant_id
      FROM unnest($6::text[], $7::bigint[], $8::text[], $9::text[]) AS n(tenant_id, seq, chain_link, hlc)
      JOIN scheduler.chain_heads AS h ON h.tenant_id = n.tenant_id
     WHERE EXISTS (SELECT FROM fence)
       AND (h.head_seq, h.head_chain_link, h.head_hlc) IS NOT DISTINCT FROM (n.seq, n.chain_link, n.hlc)
     ORDER BY h.tenant_id
       FOR UPDATE OF h
), preconditions AS MATERIALIZED (
    SELECT fence_holds, heads_match, fence_holds AND heads_match AND (${_KEYS_CHECKED}::boolean OR NOT EXISTS (
               SELECT FROM (SELECT DISTINCT {_columns(_KEYS_AT, _KEY_TYPES[:3], "unnest({})")},
                                   {_columns(_KEYS_CHECKED - 1, ["bigint"], "unnest({})")})
                        AS n(tenant_id, route, key, known)
                WHERE known <> (SELECT count(*) FROM scheduler.idempotency AS i
                                 WHERE (i.tenant_id, i.route, i.key) = (n.tenant_id, n.route, n.key)))) AS all_hold
      FROM (SELECT EXISTS (SELECT FROM fence) AS fence_holds, count(*) = cardinality($6) AS heads_match
              FROM matching_heads) AS heads
), advanced AS (
    UPDATE scheduler.wal_positions
       SET chained_lsn = $4, seen_durable_lsn = greatest(seen_durable_lsn, $5), updated_at = now()
     WHERE node_id = $1 AND (SELECT all_hold FROM preconditions)
    RETURNING 1
), moved AS (
    UPDATE scheduler.chain_heads AS h
       SET head_seq = n.head_seq, head_chain_link = n.head_chain_link, head_hlc = n.head_hlc, updated_at = now()
      FROM unnest($6::text[], $10::bigint[], $11::text[], $12::text[])
           AS n(tenant_id, head_seq, head_chain_link, head_hlc)
     WHERE h.tenant_id = n.tenant_id AND (SELECT all_hold FROM preconditions)
    RETURNING h.tenant_id, (h.head_seq, h.head_chain_link, h.head_hlc)
              IS NOT DISTINCT FROM (n.head_seq, n.head_chain_link, n.head_hlc) AS is_there
), entries AS (
    {entries}
), keyed AS (
    INSERT INTO scheduler.idempotency (tenant_id, route, key, line, body_digest, seq, epoch, lsn)
    SELECT {_columns(_KEYS_AT, _KEY_TYPES, "unnest({})")}
     WHERE (SELECT all_hold FROM preconditions)
    RETURNING tenant_id
), stored AS (
    SELECT (SELECT count(*) FROM advanced) AS positions,
           (SELECT array_agg(tenant_id) FILTER (WHERE is_there) FROM moved) AS heads,
           (SELECT count(*) FROM entries) AS entries,
           (SELECT array_agg(tenant_id) FROM keyed) AS keyed
)
SELECT fence_holds, heads_match, all_hold, positions, heads, keyed,
       {check}
  FROM preconditions, stored
"""


_COMMIT_ROWS = _statement(_STORE_ROWS, _FAIL_UNLESS_STORED)
_COMMIT_BESIDE_COPY = _statement("SELECT WHERE false", "NULL")
"""COPY stores the rows, and ignores rules on the table."""


async def commit(
    connection: Connection,
    batch: Batch,
    *,
    copied: Transaction | None = None,
    on_sent: Callable[[], object] = lambda: None,
) -> Answer:
    """Store ``batch`` in one transaction; nothing of it is stored unless the answer is ``Committed`` or ``InDoubt``.

    ``copied`` is the transaction of ``copy_first`` on this connection, if the rows are copied already. Else ``on_sent``
    is called if they are copied, once the last row is sent: the locks of the heads are held then.

    A statement without an answer may not have started on the server yet, and may run later.
    """
    return await errors_as_values(_commit(connection, batch, copied, on_sent))


async def copy_first(connection: Connection, rows: LogRows) -> Transaction:
    """Copy the rows of a batch in a transaction that has not passed the fence and holds no lock of a head; returns it.

    Others who have those locks may wait for it. So no wait of the transaction lasts longer than
    ``COPIED_LOCK_TIMEOUT_MS``.

    Raises:
        ChainDamagedError, DATABASE_FAULTS: as ``commit`` would find. The connection MUST be closed.
    """
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute(f"SET LOCAL lock_timeout = '{COPIED_LOCK_TIMEOUT_MS}ms'")
    await copy_entries(connection, rows)
    return transaction


async def errors_as_values(work: Awaitable[Answer]) -> Answer:
    """The answer of ``work``, a request to PostgreSQL; errors become values."""
    try:
        return await work
    except ChainDamagedError as error:
        return TenantDamaged(error)
    except asyncpg.LockNotAvailableError as error:
        return RowsLocked(error)
    except DATABASE_FAULTS as error:
        if isinstance(error, asyncpg.PostgresError) and is_record_fault(error):
            return RowRefused(error.sqlstate or "", str(error))
        return InDoubt(error)


async def or_in_doubt(work: Awaitable[Value]) -> Value | InDoubt:
    """The result of ``work``, or the error that keeps it in doubt."""
    try:
        return await work
    except DATABASE_FAULTS as error:
        return InDoubt(error)


async def dry_run(connection: Connection, step: Step) -> None:
    """Move only the position of the node, as the statement and COMMIT do, and undo that.

    Raises:
        DATABASE_FAULTS: why it cannot be moved.
    """
    transaction = connection.transaction()
    await transaction.start()
    await _run(connection, Batch(step, (), LogRows()))
    await connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
    await transaction.rollback()


async def _commit(
    connection: Connection, batch: Batch, copied: Transaction | None, on_sent: Callable[[], object]
) -> Answer:
    is_small = len(batch.rows) <= ROWS_IN_STATEMENT_MAX and not batch.new_chains
    # An error would abort a transaction of the caller.
    if (
        is_small
        and not connection.is_in_transaction()
        and None not in (rows := list(map(_lines, zip(*batch.rows, strict=True))))
    ):
        try:
            return _answer(await _run(connection, batch, rows))
        except asyncpg.DivisionByZeroError:
            pass  # PostgreSQL dropped some of it without an error: the transaction finds the tenant.
        except asyncpg.FeatureNotSupportedError:
            pass  # A rule on the table, which COPY does not see.
    transaction = copied or connection.transaction()
    if copied is None:
        await transaction.start()
    try:
        answer = await _store(connection, batch)
        if answer == Committed() and batch.rows and copied is None:
            await copy_entries(connection, batch.rows, on_sent)
    except (asyncpg.PostgresError, ChainDamagedError):
        await transaction.rollback()
        raise
    if answer != Committed():
        await transaction.rollback()
        return answer
    await transaction.commit()
    return answer


async def _store(connection: Connection, batch: Batch) -> Answer:
    """Do all of it but COPY in the transaction that is open.

    Raises:
        ChainDamagedError: PostgreSQL dropped rows without an error; names their tenant.
    """
    if batch.new_chains:
        created = await create_heads(connection, sorted(batch.new_chains))
        if there := set(batch.new_chains) - created:
            if lacking := there - (await read_heads(connection, sorted(there))).keys():
                raise ChainDamagedError(min(lacking), "PostgreSQL dropped its new row of scheduler.chain_heads")
            return HeadsMoved()
    found = await _run(connection, batch)
    answer = _answer(found)
    if answer != Committed():
        return answer
    moved = set(found["heads"] or ())
    for tenant_id, _, head in batch.moves:
        if tenant_id not in moved:
            raise unmoved(tenant_id, head.seq)
    stored = Counter(found["keyed"] or ())
    for tenant_id, sent in Counter(row[0] for row in batch.keyed).items():
        if stored[tenant_id] != sent:
            raise dropped(tenant_id, "idempotency rows", sent, stored[tenant_id])
    return answer


async def _run(connection: Connection, batch: Batch, rows: Sequence[str | None] | None = None) -> asyncpg.Record:
    """Run the statement. With ``rows``, their columns, it stores them too, and fails if not all is stored."""
    given = [
        *batch.step,
        *turned([(tenant_id, *old, *new) for tenant_id, old, new in batch.moves], 7),
        *map(_lines, _keyed(batch.keyed)),
        batch.are_keys_checked,
    ]
    if rows is None:
        (found,) = await connection.fetch(_COMMIT_BESIDE_COPY, *given)
    else:
        (found,) = await connection.fetch(
            _COMMIT_ROWS, *given, *(rows or [""] * len(LOG_COLUMNS)), len(batch.rows), len(batch.keyed)
        )
    return found


def _answer(found: asyncpg.Record) -> Answer:
    if not found["fence_holds"]:
        return Fenced()
    if not found["heads_match"]:
        return HeadsMoved()
    if not found["all_hold"]:
        return KeysChained()
    # The fence held and no row was updated: a trigger or a rule keeps the position where it is.
    return Committed() if found["positions"] == 1 else Fenced()


def _keyed(rows: Sequence[KeyedRow]) -> Iterable[Sequence[Any]]:
    """The columns of idempotency rows, digests as PostgreSQL writes bytes. No tenant and no key has several lines."""
    columns = turned(rows, _KEY_COLUMNS)
    columns[_BODY_DIGEST] = [f"\\x{digest.hex()}" for _, _, _, _, digest, *_ in rows]
    return columns


def _lines(column: Sequence[Any]) -> str | None:
    """The column as one text, a value a line; None if PostgreSQL would read other values from it."""
    if column.count(None) == len(column):
        return ""
    if isinstance(column[-1], int):
        return "\n".join(map(str, column))
    if "" in column:
        return None
    joined = "\n".join(column if None not in column else ["" if value is None else value for value in column])
    return joined if joined.count("\n") == len(column) - 1 else None
