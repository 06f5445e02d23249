"""SQL of the idempotency table: which keyed lines are chained, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from app.store import Connection
from app.store.reading import fetch_as
from ledger import keyed
from ledger.chain.record import IdempotencyKey
from ledger.errors import KeyRowError
from ledger.positions import Epoch, Lsn
from ledger.verification.verdict import Break

KEY_ROW: Final = "idempotency"
"""Kind of a break of this table, at the seq of an entry: a row names it falsely, or its row is missing. A verification
of the chain does not check this table."""
RETENTION_DAYS = 7
ENTRIES_READ = 20_000
"""Last entries of a tenant among which keyed ones are read, within the bound on payload bytes below."""
ENTRIES_READ_BYTES = 16 << 20
"""Payload bytes of those entries together; reading them takes PostgreSQL a tenth of a second."""


class KeyedEntry(NamedTuple):
    """One entry whose event came with an Idempotency-Key."""

    seq: int
    hlc_physical: int
    digest: str | None
    """The digest of the key in its payload (``ledger.keyed``)."""


class ChainedLine(NamedTuple):
    """One chained line of a keyed request, with the columns for its receipt."""

    tenant_id: str
    line: int
    body_digest: bytes
    seq: int
    epoch: Epoch
    lsn: Lsn
    t_hlc: str
    job_id: str
    action: str
    payload: str
    chain_link: str
    prev_chain_link: str | None


_LINE = "i.tenant_id, line, body_digest, i.seq, epoch, lsn, t_hlc, job_id, action, payload, chain_link, prev_chain_link"
_LINES = f"""
SELECT {_LINE} FROM scheduler.idempotency i LEFT JOIN scheduler.scheduler_log l USING (tenant_id, seq)
 WHERE i.tenant_id = ANY($1::text[]) AND i.route = $2 AND i.key = $3
 ORDER BY i.line
"""


class NamedEntry(NamedTuple):
    """The entry at a seq, if there is one, and a row that names it, if there is one."""

    hlc_physical: int | None
    job_id: str
    """This, action and payload are None if there is no entry at the seq."""
    action: str
    payload: str
    key: IdempotencyKey | None
    """The key in the row."""


def key_row_error(tenant_id: str, key: str, seq: int, what: str, meanwhile: str = "") -> KeyRowError:
    """The error of a row of this key, at the entry ``seq``: ``what`` completes a sentence about the row, ``meanwhile``
    reports the outcome of the request that read it."""
    detail = f"the row of Idempotency-Key {key!r} in scheduler.idempotency {what}"
    return KeyRowError(tenant_id, detail + meanwhile, Break(seq, KEY_ROW, detail, None, detail))


async def named_entries(connection: Connection, tenant_id: str, seqs: Sequence[int]) -> list[NamedEntry]:
    """The entries of the tenant at ``seqs``, each with every row that names it. Reads all rows of the tenant."""
    return [
        NamedEntry._make((*row[:4], None if row["key"] is None else IdempotencyKey(*row[4:])))
        for row in await connection.fetch(
            """
            SELECT hlc_physical, job_id, action, payload, route, key, line, body_digest
              FROM unnest($2::bigint[]) AS wanted(seq)
              LEFT JOIN (SELECT * FROM scheduler.scheduler_log WHERE tenant_id = $1) AS l USING (seq)
              LEFT JOIN (SELECT seq, route, key, line, body_digest FROM scheduler.idempotency WHERE tenant_id = $1) AS i
                   USING (seq)
            """,
            tenant_id,
            seqs,
        )
    ]


async def find_lines(connection: Connection, tenant_ids: Sequence[str], route: int, key: str) -> list[ChainedLine]:
    """Chained lines of the keyed request in line order, of any body digest. If there is no entry at the seq that a row
    names, the columns of the entry are None."""
    return await fetch_as(connection, ChainedLine, _LINES, tenant_ids, route, key)


async def find_claims(
    connection: Connection, keys: Sequence[tuple[str, int, str]]
) -> list[tuple[tuple[str, int, str], ChainedLine]]:
    """The rows of these (tenant, route, key) with their entries, as in ``find_lines``."""
    return [
        ((line[0], route, key), ChainedLine(*line))
        for route, key, *line in await connection.fetch(
            f"""
            SELECT i.route, i.key, {_LINE}
              FROM unnest($1::text[], $2::smallint[], $3::text[]) AS wanted(tenant_id, route, key)
              JOIN scheduler.idempotency i USING (tenant_id, route, key)
              LEFT JOIN scheduler.scheduler_log l USING (tenant_id, seq)
            """,
            *zip(*keys, strict=True),
        )
    ]


async def newest_keyed(connection: Connection, tenant_id: str) -> list[KeyedEntry]:
    """Keyed entries among the last ``ENTRIES_READ`` entries of the tenant, or ``ENTRIES_READ_BYTES``, in seq order,
    without those chained more than an hour after they were written, as by a restore."""
    # PostgreSQL knows the length of a payload without reading it, if it is stored out of line.
    return await fetch_as(
        connection,
        KeyedEntry,
        f"""
        SELECT seq, hlc_physical, payload ->> '{keyed.MEMBER}'
          FROM (SELECT seq, hlc_physical, created_at, payload,
                       sum(octet_length(payload::text)) OVER (ORDER BY seq DESC) AS bytes
                  FROM scheduler.scheduler_log
                 WHERE tenant_id = $1 AND origin IS NULL
                   AND seq > (SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = $1) - {ENTRIES_READ}
               ) AS newest
         WHERE bytes <= {ENTRIES_READ_BYTES}
           AND created_at < to_timestamp(hlc_physical / 1000.0) + interval '1 hour'
           AND strpos(payload::text, '"{keyed.MEMBER}":"') > 0
         ORDER BY seq
        """,
        tenant_id,
    )


async def forget_old(connection: Connection) -> None:
    """Drop keys older than the retention."""
    await connection.execute(
        "DELETE FROM scheduler.idempotency WHERE created_at < now() - make_interval(days => $1)", RETENTION_DAYS
    )
