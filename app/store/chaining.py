"""SQL of chains: their heads, the positions of nodes, and rows that are copied after a locked head.

How the appender commits a batch is in ``app.store.commit``; an import locks the heads, copies its rows and moves the
heads.

*New rows* are in pieces of one tenant each, in COPY's binary form: one object for dozens of rows, which takes less
memory than the separate values of one row. Rows that the C code leaves to Python are tuples, and readers get tuples.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import asyncpg

from app.runtime.postgres import is_of_a_value
from app.store import Connection, sessions
from app.store.reading import fetch_column, fetch_one_as
from ledger import native
from ledger.errors import ChainDamagedError
from ledger.positions import Epoch, Lsn
from ledger.verification import ENTRY_COLUMNS

LOCK_TIMEOUT_S = 2.0
"""Longest that a statement of the appender waits for a row: nodes and imports hold one for a fraction of that."""

_LINK = re.compile(r"[0-9a-f]{64}")


HEAD_SEQ_MAX: Final = 2**63 - 2**32
"""No chain gets that long, and the seqs of entries after a head have to fit a bigint."""


class ChainHead(NamedTuple):
    """The end of one tenant's chain; link and HLC are None at seq 0."""

    seq: int
    chain_link: str | None
    hlc: str | None


class ChainEnd(NamedTuple):
    """The entry at a head."""

    chain_link: str
    is_by_node: bool
    """Whether a node of this ledger chained it. An imported entry has an origin, or a link of version 1, which binds
    none; its time is that of another ledger, whatever node it names."""


def head_fault(head: ChainHead) -> str | None:
    """Why ``head`` cannot be the head of a chain, None if it can. Columns may hold any value once their constraints
    were dropped."""
    if type(head.seq) is not int or not 0 <= head.seq <= HEAD_SEQ_MAX:
        return f"its head stands at seq {head.seq!r}"
    if (head.seq == 0) != (head.chain_link is None) or (head.seq == 0) != (head.hlc is None):
        return f"its head at seq {head.seq} has link {head.chain_link!r} and HLC {head.hlc!r}"
    if head.chain_link is not None and not _LINK.fullmatch(head.chain_link):
        return f"its head at seq {head.seq} has link {head.chain_link[:100]!r}"
    return None


def end_fault(head: ChainHead, end: ChainEnd | None) -> str | None:
    """How ``head`` differs from ``end``, the entry there; None if it does not."""
    if head.seq == 0 or (end is not None and end.chain_link == head.chain_link):
        return None
    return (
        f"its head stands at seq {head.seq} ({head.chain_link}), where the log has {'another' if end else 'no'} entry"
    )


class Step(NamedTuple):
    """The move of a node's position by one batch: the first three fields are the fence, ``new_chained_lsn`` is the new
    position."""

    node_id: str
    epoch: Epoch
    old_chained_lsn: Lsn
    new_chained_lsn: Lsn
    durable_lsn: Lsn


class WalPosition(NamedTuple):
    """The position of one node's WAL in Postgres."""

    wal_id: str
    epoch: Epoch
    chained_lsn: Lsn
    seen_durable_lsn: Lsn


_BY_KEY: Final = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
}
"""Every query of chaining is by key. A cached plan that was made for a small table would read the whole table for each
batch once it is large, and no other plan is better for other values."""


async def connect(
    url: str, statement_timeout_s: float, idle_in_transaction_max_s: float
) -> asyncpg.Connection[asyncpg.Record]:
    """A connection for chaining; Postgres ends it after it was idle in a transaction for
    ``idle_in_transaction_max_s``."""
    return await sessions.connect(
        url,
        {
            **_BY_KEY,
            "idle_in_transaction_session_timeout": f"{idle_in_transaction_max_s:g}s",
            "lock_timeout": f"{LOCK_TIMEOUT_S:g}s",
        },
        command_timeout_s=statement_timeout_s,
    )


async def read_heads(connection: Connection, tenant_ids: Sequence[str] | None = None) -> dict[str, ChainHead]:
    """Existing heads of ``tenant_ids``, by default of all tenants."""
    return _by_tenant(
        await connection.fetch(
            """
            SELECT tenant_id, head_seq, head_chain_link, head_hlc FROM scheduler.chain_heads
             WHERE $1::text[] IS NULL OR tenant_id = ANY($1)
            """,
            tenant_ids,
        )
    )


async def lock_heads(connection: Connection, tenant_ids: Sequence[str]) -> dict[str, ChainHead]:
    """Existing heads of ``tenant_ids``, locked in tenant order."""
    return _by_tenant(
        await connection.fetch(
            """
            SELECT tenant_id, head_seq, head_chain_link, head_hlc FROM scheduler.chain_heads
             WHERE tenant_id = ANY($1::text[]) ORDER BY tenant_id FOR UPDATE
            """,
            tenant_ids,
        )
    )


async def create_heads(connection: Connection, tenant_ids: Sequence[str]) -> set[str]:
    """Create a head at seq 0 for each tenant without one; returns these tenants. All heads are locked afterwards."""
    return set(
        await fetch_column(
            connection,
            """
            INSERT INTO scheduler.chain_heads (tenant_id, head_seq)
            SELECT tenant_id, 0 FROM unnest($1::text[]) AS t(tenant_id) ORDER BY tenant_id COLLATE "C"
                ON CONFLICT (tenant_id) DO NOTHING
            RETURNING tenant_id
            """,
            tenant_ids,
        )
    )


async def locked_tenants(connection: Connection, tenant_ids: Sequence[str]) -> set[str]:
    """The tenants whose head another session has locked now. Nothing stays locked."""
    return set(
        await fetch_column(
            connection,
            """
            WITH free AS MATERIALIZED (
                SELECT tenant_id FROM scheduler.chain_heads WHERE tenant_id = ANY($1::text[]) FOR UPDATE SKIP LOCKED
            )
            SELECT tenant_id FROM scheduler.chain_heads
             WHERE tenant_id = ANY($1::text[]) AND tenant_id NOT IN (SELECT tenant_id FROM free)
            """,
            tenant_ids,
        )
    )


def _by_tenant(rows: Sequence[asyncpg.Record]) -> dict[str, ChainHead]:
    return {tenant_id: ChainHead(*head) for tenant_id, *head in rows}


async def read_position(connection: Connection, node_id: str) -> WalPosition | None:
    """The node's row, locked until the transaction ends. Waits for a commit whose answer was lost."""
    return await fetch_one_as(
        connection,
        WalPosition,
        """
        SELECT wal_id, epoch, chained_lsn, seen_durable_lsn FROM scheduler.wal_positions WHERE node_id = $1 FOR UPDATE
        """,
        node_id,
    )


def copied(status: str) -> int:
    """Rows that COPY reports as stored, without rows that a trigger dropped."""
    return int(status.removeprefix("COPY "))


def dropped(tenant_id: str, what: str, sent: int, stored: int) -> ChainDamagedError:
    """The error when PostgreSQL stored fewer rows of a tenant than it was sent, and reported no error."""
    return ChainDamagedError(
        tenant_id,
        f"PostgreSQL stored {stored} of {sent} {what} without an error: a trigger or a rule drops them. Remove what "
        "migrations/sql does not have",
    )


def unmoved(tenant_id: str, seq: int) -> ChainDamagedError:
    """The error when PostgreSQL did not move a tenant's head, and reported no error."""
    return ChainDamagedError(
        tenant_id,
        f"PostgreSQL did not move its head to seq {seq} and said no error: a trigger or a rule stands in the way. "
        "Remove what migrations/sql does not have",
    )


async def copy_entries(connection: Connection, rows: LogRows, on_sent: Callable[[], object] = lambda: None) -> None:
    """Add rows to the log. ``on_sent`` is called when the last row is sent, while PostgreSQL has yet to store most.

    Raises:
        ChainDamagedError: not all were stored; names a tenant with missing rows. The transaction MUST be rolled back.
    """
    if (encoded := rows.for_copy()) is None:
        status = await connection.copy_records_to_table(
            "scheduler_log", schema_name="scheduler", columns=LOG_COLUMNS, records=_then(rows, on_sent)
        )
    else:
        status = await connection.copy_to_table(
            "scheduler_log",
            schema_name="scheduler",
            columns=LOG_COLUMNS,
            source=_sent(encoded, on_sent),
            format="binary",
        )
    if copied(status) == len(rows):
        return
    (row,) = await connection.fetch(
        """
        SELECT n.tenant_id, n.sent, count(l.seq) AS stored
          FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[]) AS n(tenant_id, first_seq, last_seq, sent)
          LEFT JOIN scheduler.scheduler_log l ON l.tenant_id = n.tenant_id AND l.seq BETWEEN n.first_seq AND n.last_seq
         GROUP BY n.tenant_id, n.sent ORDER BY n.sent = count(l.seq), n.tenant_id LIMIT 1
        """,
        *zip(*rows.sent(), strict=True),
    )
    raise dropped(row["tenant_id"], "entries", row["sent"], row["stored"])


async def _sent(encoded: bytes, on_end: Callable[[], object]) -> AsyncIterator[bytes]:
    yield encoded
    on_end()


def _then(rows: LogRows, on_end: Callable[[], object]) -> Iterator[Row]:
    yield from rows
    on_end()


async def move_heads(connection: Connection, heads: Sequence[tuple[str, int, str, str]]) -> None:
    """Move heads: (tenant, seq, link, hlc) each.

    Raises:
        ChainDamagedError: not all heads were moved; names a tenant. The transaction MUST be rolled back.
    """
    moved = {
        tenant_id: tuple(head)
        for tenant_id, *head in await connection.fetch(
            """
            UPDATE scheduler.chain_heads AS h
               SET head_seq = n.head_seq, head_chain_link = n.head_chain_link, head_hlc = n.head_hlc, updated_at = now()
              FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[])
                   AS n(tenant_id, head_seq, head_chain_link, head_hlc)
             WHERE h.tenant_id = n.tenant_id
            RETURNING h.tenant_id, h.head_seq, h.head_chain_link, h.head_hlc
            """,
            *zip(*heads, strict=True),
        )
    }
    for tenant_id, seq, chain_link, hlc in heads:
        if moved.get(tenant_id) != (seq, chain_link, hlc):
            raise unmoved(tenant_id, seq)


async def read_ends(connection: Connection, heads: Mapping[str, ChainHead]) -> dict[str, ChainEnd]:
    """The existing entries at ``heads``, by tenant."""
    seqs = [(tenant_id, head.seq) for tenant_id, head in heads.items() if head.seq]
    # OFFSET keeps one index lookup for each head, whatever number of rows the planner assumes. Without chains there is
    # no query, which on a new connection alone costs Postgres about 4 ms.
    rows = (
        await connection.fetch(
            """
            SELECT h.tenant_id, e.chain_link, e.is_by_node
              FROM unnest($1::text[], $2::bigint[]) AS h(tenant_id, seq)
             CROSS JOIN LATERAL (
                   SELECT l.chain_link, l.origin IS NULL AND l.link_version > 1
                          AND EXISTS (SELECT FROM scheduler.wal_positions w WHERE w.node_id = l.hlc_node) AS is_by_node
                     FROM scheduler.scheduler_log l
                    WHERE l.tenant_id = h.tenant_id AND l.seq = h.seq
                   OFFSET 0) e
            """,
            *zip(*seqs, strict=True),
        )
        if seqs
        else ()
    )
    return {tenant_id: ChainEnd(*end) for tenant_id, *end in rows}


def is_record_fault(error: asyncpg.PostgresError) -> bool:
    """Whether Postgres rejects the data itself (classes 22, 23, 54), so that a retry cannot help."""
    return is_of_a_value(error) or (error.sqlstate or "")[:2] in ("23", "54")


LOG_COLUMNS = ("tenant_id", *ENTRY_COLUMNS)
"""Columns of one new row, in the order of the tuples."""

Row = tuple[Any, ...]
"""A row of ``LOG_COLUMNS``."""

_INTEGERS = ("seq", "hlc_physical", "hlc_logical", "link_version")
_FORMS = "".join("i" if name in _INTEGERS else "t" for name in LOG_COLUMNS).encode()
_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_ROW_BYTES = 800
"""About the memory of a tuple without its payload."""
_PIECE_BYTES = 300
"""About the memory of a piece without its rows."""


class Piece(NamedTuple):
    """Rows of one tenant with consecutive seqs."""

    tenant_id: str
    first_seq: int
    length: int
    kept: bytes | Sequence[Row]
    """In COPY's binary form without header and trailer, or as tuples."""

    @property
    def last_seq(self) -> int:
        """Seq of the last row."""
        return self.first_seq + self.length - 1

    @property
    def size_bytes(self) -> int:
        """About their memory."""
        return _PIECE_BYTES + (
            len(self.kept) if isinstance(self.kept, bytes) else sum(_ROW_BYTES + len(row[-2]) for row in self.kept)
        )

    def rows(self) -> Sequence[Row]:
        """The rows as tuples."""
        if not isinstance(self.kept, bytes):
            return self.kept
        rows = native.rows_in_copy(_FORMS, self.kept)
        assert rows is not None
        return rows


class LogRows:
    """New rows; those of one tenant in seq order."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces = list(pieces)

    def __len__(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(piece.rows() for piece in self.pieces)

    def for_copy(self) -> bytes | None:
        """All rows in COPY's binary form, grouped by tenant, as those of a tenant go into one partition. None if the
        driver has to encode them."""
        of_tenants: dict[str, list[bytes]] = {}
        for piece in self.pieces:
            if not isinstance(piece.kept, bytes):
                return None
            of_tenants.setdefault(piece.tenant_id, []).append(piece.kept)
        return b"".join((_HEADER, *chain.from_iterable(of_tenants.values()), _TRAILER))

    def sent(self) -> list[tuple[str, int, int, int]]:
        """(tenant, first seq, last seq, rows) of each tenant."""
        ends: dict[str, tuple[int, int, int]] = {}
        for piece in self.pieces:
            first_seq, _, length = ends.get(piece.tenant_id, (piece.first_seq, 0, 0))
            ends[piece.tenant_id] = first_seq, piece.last_seq, length + piece.length
        return [(tenant_id, *end) for tenant_id, end in ends.items()]


class RecentRows:
    """The newest rows that this node added to one chain, without a gap, while a follower still has to read them."""

    __slots__ = ("_pieces", "size_bytes")

    def __init__(self) -> None:
        self._pieces: deque[Piece] = deque()
        self.size_bytes = 0

    def add(self, piece: Piece) -> None:
        """Add a piece; earlier pieces are kept only if it follows on them."""
        if self._pieces and piece.first_seq != self._pieces[-1].last_seq + 1:
            self._pieces.clear()
            self.size_bytes = 0
        self._pieces.append(piece)
        self.size_bytes += piece.size_bytes

    def after(self, seq: int, limit: int) -> list[Row]:
        """Up to ``limit`` rows after ``seq``; none if the first of them is not kept."""
        found: list[Row] = []
        if not self._pieces or self._pieces[0].first_seq > seq + 1:
            return found
        for piece in self._pieces:
            if len(found) == limit:
                break
            if piece.last_seq > seq:
                skipped = max(0, seq + 1 - piece.first_seq)
                found += piece.rows()[skipped : skipped + limit - len(found)]
        return found

    def forget(self, upto_seq: int) -> None:
        """Drop the pieces that end at ``upto_seq`` or before; a piece that goes beyond stays whole."""
        while self._pieces and self._pieces[0].last_seq <= upto_seq:
            self.size_bytes -= self._pieces.popleft().size_bytes
