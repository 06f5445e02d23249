"""SQL of signing keys: the rows that publish them, and the entries of ``_system`` that decide which are trusted.

The chain is the authority. The rows are rewritten from it, and also hold the node on which a key signs now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from app.store import Connection
from app.store.reading import ENTRIES, columns, fetch_as, fetch_tuples
from ledger.facts.events import SYSTEM_TENANT
from ledger.verification.entry_check import EntryRow
from signing.callers import AFTER_CALLERS, CALLER_PREFIX
from signing.key_history import AFTER_FORKS, AFTER_SUBJECTS, FORK_PREFIX, SUBJECT_PREFIX
from signing.key_statement import AFTER_TOKENS, TOKEN_PREFIX
from signing.keys import PublicKey
from signing.region_statement import AFTER_REGIONS, REGION_PREFIX

STRAYS_MAX = 10
"""Most rows beyond the head that are named."""


class KeyRow(NamedTuple):
    """The node on which a published key signs or signed, its present use, and its start of validity.

    Any column may be NULL if its constraint was dropped. A start that no key can have is NULL.
    """

    key_id: str | None
    not_before: datetime | None
    node_id: str | None
    signs_snapshots: bool | None
    signs_checkpoints: bool | None


class SystemHead(NamedTuple):
    """The head of the chain of ``_system``, and the first seqs of rows about keys beyond it, which are no entries."""

    seq: int
    chain_link: str | None
    strays: list[int]


async def publish(connection: Connection, key: PublicKey, node_id: str, oldest_ms: int, *, is_known: bool) -> bool:
    """Publish a key, or restore its row; returns whether it had a row.

    A key is valid from the oldest entry that no snapshot covers yet, as it may have to sign that: ``oldest_ms`` is the
    earliest HLC time that an entry still to be chained may have. A key that is in the chain but has lost its row may
    have signed any entry.
    """
    return bool(
        await connection.fetchval(
            """
            WITH found AS (
                SELECT 1 FROM scheduler.signing_keys WHERE key_id = $1 AND algorithm = $2 AND public_key_pem = $3
            )
            INSERT INTO scheduler.signing_keys (key_id, algorithm, public_key_pem, not_before, node_id)
            SELECT $1, $2, $3, least(now(), to_timestamp(floor(least(min(l.hlc_physical), $5) / 1000.0))), $4
              FROM scheduler.chain_heads h
             CROSS JOIN LATERAL (
                   SELECT coalesce(max(s.to_seq), 0) AS signed_seq FROM scheduler.batch_snapshot s
                    WHERE s.tenant_id = h.tenant_id AND NOT $6) s
              JOIN scheduler.scheduler_log l
                ON l.tenant_id = h.tenant_id AND l.seq = s.signed_seq + 1 AND l.hlc_physical >= 0
             WHERE NOT EXISTS (SELECT FROM found)
                ON CONFLICT (key_id) DO UPDATE SET algorithm = $2, public_key_pem = $3
            RETURNING EXISTS (SELECT FROM found)
            """,
            key.key_id,
            key.algorithm,
            key.public_key_pem,
            node_id,
            oldest_ms,
            is_known,
        )
    )


async def name_in_use(
    connection: Connection, node_id: str, snapshot_keys: Sequence[str], checkpoint_keys: Sequence[str]
) -> None:
    """Record the keys with which the node signs now."""
    await connection.execute(
        """
        UPDATE scheduler.signing_keys
           SET signs_snapshots = (key_id = ANY($2)), signs_checkpoints = (key_id = ANY($3)), node_id = $1
         WHERE (node_id = $1 OR key_id = ANY($2) OR key_id = ANY($3))
           AND (signs_snapshots, signs_checkpoints) IS DISTINCT FROM (key_id = ANY($2), key_id = ANY($3))
        """,
        node_id,
        snapshot_keys,
        checkpoint_keys,
    )


async def write_rows(connection: Connection, said: Iterable[tuple[PublicKey, str | None]]) -> None:
    """Write the rows of these keys, each with its validity and the reason of its revocation."""
    await connection.executemany(
        """
        UPDATE scheduler.signing_keys
           SET algorithm = $2, public_key_pem = $3, not_after = $4, revoked_from_hlc = $5, revocation_reason = $6
         WHERE key_id = $1
           AND (algorithm, public_key_pem, not_after, revoked_from_hlc, revocation_reason)
               IS DISTINCT FROM ($2, $3, $4, $5, $6)
        """,
        [
            (
                key.key_id,
                key.algorithm,
                key.public_key_pem,
                key.not_after,
                None if key.revoked_from_hlc is None else key.revoked_from_hlc.text(),
                reason,
            )
            for key, reason in said
        ],
    )


async def widen(connection: Connection, key_id: str, not_before: datetime) -> None:
    """Let the key be valid from ``not_before`` on, if its window begins later."""
    await connection.execute(
        "UPDATE scheduler.signing_keys SET not_before = $2 WHERE key_id = $1 AND not_before > $2", key_id, not_before
    )


async def list_rows(connection: Connection) -> list[KeyRow]:
    """Every published key, oldest first."""
    return await fetch_as(
        connection,
        KeyRow,
        f"""
        SELECT {columns(KeyRow, ("not_before",))} FROM scheduler.signing_keys AS k ORDER BY k.not_before, key_id
        """,
    )


async def list_entries(connection: Connection) -> list[EntryRow]:
    """Entries of ``_system`` about keys, tokens, regions, callers and forks, all ``ENTRY_COLUMNS``, in seq order."""
    return list(
        await fetch_tuples(
            connection,
            f"""
            {ENTRIES}
             WHERE tenant_id = $1 AND (job_id >= $2 AND job_id < $3 OR job_id >= $4 AND job_id < $5
                                   OR job_id >= $6 AND job_id < $7 OR job_id >= $8 AND job_id < $9
                                   OR job_id >= $10 AND job_id < $11)
             ORDER BY seq
            """,
            SYSTEM_TENANT,
            SUBJECT_PREFIX,
            AFTER_SUBJECTS,
            FORK_PREFIX,
            AFTER_FORKS,
            TOKEN_PREFIX,
            AFTER_TOKENS,
            REGION_PREFIX,
            AFTER_REGIONS,
            CALLER_PREFIX,
            AFTER_CALLERS,
        )
    )


async def system_head(connection: Connection) -> SystemHead:
    """The head of the chain of ``_system``; seq 0 without a possible head."""
    (head,) = await fetch_as(
        connection,
        SystemHead,
        """
        SELECT h.seq, h.chain_link,
               ARRAY(SELECT l.seq FROM scheduler.scheduler_log l
                      WHERE l.tenant_id = $1 AND l.job_id >= $2 AND l.job_id < $3 AND l.seq > h.seq
                      ORDER BY l.seq LIMIT $4) AS strays
          FROM (SELECT coalesce(max(head_seq), 0) AS seq, max(head_chain_link) FILTER (WHERE head_seq > 0) AS chain_link
                  FROM scheduler.chain_heads WHERE tenant_id = $1) h
        """,
        SYSTEM_TENANT,
        SUBJECT_PREFIX,
        AFTER_SUBJECTS,
        STRAYS_MAX,
    )
    return head


async def highest_signed_ms(connection: Connection) -> int:
    """Highest HLC time at which a snapshot claims to end, in ms; 0 without snapshots."""
    return int(
        await connection.fetchval("""
            SELECT coalesce(max(CASE WHEN snapshot_hlc ~ '^[0-9]{1,15}:'
                                     THEN split_part(snapshot_hlc, ':', 1)::bigint END), 0)
              FROM scheduler.batch_snapshot
        """)
    )
