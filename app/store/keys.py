"""SQL about signing keys: the rows that publish them, and the entries of ``_system`` that say what holds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple

from ledger.errors import InvalidInputError
from ledger.machines.events import SYSTEM_TENANT
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryRow
from signing.key_entries import AFTER_FORKS, AFTER_SUBJECTS, FORK_PREFIX, SUBJECT_PREFIX

if TYPE_CHECKING:
    from app.store import Connection

STRAYS_MAX = 10
"""Rows named that stand beyond the head."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class KeyRow(NamedTuple):
    """One published key. ``node_id`` signs, or signed, with it; the flags say for what it does now.

    Somebody may have dropped the constraints: any column may be NULL, and a time is text that ``time_of`` reads.
    """

    key_id: str | None
    algorithm: str | None
    public_key_pem: str | None
    not_before: str | None
    not_after: str | None
    revoked_from_hlc: str | None
    node_id: str | None
    signs_snapshots: bool | None
    signs_checkpoints: bool | None
    revocation_reason: str | None


class KeyWindow(NamedTuple):
    """When a published key counts, by its row; times as in ``KeyRow``."""

    not_before: str | None
    not_after: str | None
    revoked_from_hlc: str | None


class SystemHead(NamedTuple):
    """The end of the chain of ``_system``."""

    seq: int
    chain_link: str | None


_TIMES = "extract(epoch FROM not_before)::text AS not_before, extract(epoch FROM not_after)::text AS not_after"
"""Times as seconds since 1970 in decimal: Postgres holds some, such as infinity, that are no ``datetime``."""
_ROW = ", ".join(KeyRow._fields).replace("not_before, not_after", _TIMES)


def time_of(seconds: str | None) -> datetime | None:
    """The time that a row states, None for none.

    Raises:
        InvalidInputError: it lies outside of the years 1 to 9999.
    """
    if seconds is None:
        return None
    try:
        return _EPOCH + timedelta(microseconds=int(Decimal(seconds) * 1_000_000))
    except (ArithmeticError, ValueError) as error:
        raise InvalidInputError(f"{seconds} seconds since 1970 is no time that a key can have") from error


async def publish(
    connection: Connection, key_id: str, algorithm: str, public_key_pem: str, node_id: str, oldest_ms: int
) -> None:
    """Publish a key. It counts from the oldest entry that no snapshot covers yet, as it may have to sign that.

    ``oldest_ms`` is the earliest HLC time that an entry still to be chained may have.
    """
    await connection.execute(
        """
        INSERT INTO scheduler.signing_keys (key_id, algorithm, public_key_pem, not_before, node_id)
        SELECT $1, $2, $3, least(now(), to_timestamp(floor(least(min(l.hlc_physical), $5) / 1000.0))), $4
          FROM scheduler.chain_heads h
         CROSS JOIN LATERAL (
               SELECT coalesce(max(s.to_seq), 0) AS signed_seq FROM scheduler.batch_snapshot s
                WHERE s.tenant_id = h.tenant_id) s
          JOIN scheduler.scheduler_log l ON l.tenant_id = h.tenant_id AND l.seq = s.signed_seq + 1
            ON CONFLICT (key_id) DO NOTHING
        """,
        key_id,
        algorithm,
        public_key_pem,
        node_id,
        oldest_ms,
    )


async def name_in_use(connection: Connection, node_id: str, snapshots_key: str, checkpoints_key: str) -> None:
    """Say with which keys the node signs now."""
    await connection.execute(
        """
        UPDATE scheduler.signing_keys
           SET signs_snapshots = (key_id = $2), signs_checkpoints = (key_id = $3), node_id = $1
         WHERE (node_id = $1 OR key_id IN ($2, $3))
           AND (signs_snapshots, signs_checkpoints) IS DISTINCT FROM (key_id = $2, key_id = $3)
        """,
        node_id,
        snapshots_key,
        checkpoints_key,
    )


async def retire(connection: Connection, key_id: str, not_after: datetime) -> None:
    """End the key's window at ``not_after``, or where it ends already."""
    await connection.execute(
        "UPDATE scheduler.signing_keys SET not_after = least(not_after, $2) WHERE key_id = $1", key_id, not_after
    )


async def revoke(connection: Connection, key_id: str, from_hlc: str, reason: str | None) -> None:
    """Write the revocation into the key's row."""
    await connection.execute(
        "UPDATE scheduler.signing_keys SET revoked_from_hlc = $2, revocation_reason = $3 WHERE key_id = $1",
        key_id,
        from_hlc,
        reason,
    )


async def widen(connection: Connection, key_id: str, not_before: datetime) -> None:
    """Let the key count from ``not_before`` on, when its window begins later."""
    await connection.execute(
        "UPDATE scheduler.signing_keys SET not_before = $2 WHERE key_id = $1 AND not_before > $2", key_id, not_before
    )


async def lock_window(connection: Connection, key_id: str) -> KeyWindow | None:
    """When the key counts, which cannot change until the transaction ends; None when it is not published."""
    row = await connection.fetchrow(
        f"SELECT {_TIMES}, revoked_from_hlc FROM scheduler.signing_keys WHERE key_id = $1 FOR SHARE",
        key_id,
    )
    return KeyWindow(*row) if row else None


async def list_rows(connection: Connection) -> list[KeyRow]:
    """Every published key, oldest first."""
    rows = await connection.fetch(f"SELECT {_ROW} FROM scheduler.signing_keys AS k ORDER BY k.not_before, key_id")
    return [KeyRow(*row) for row in rows]


async def list_entries(connection: Connection) -> list[EntryRow]:
    """The entries of ``_system`` about keys and forks, all ``ENTRY_COLUMNS``, in seq order."""
    rows = await connection.fetch(
        f"SELECT {', '.join(ENTRY_COLUMNS)} FROM scheduler.scheduler_log"
        " WHERE tenant_id = $1 AND (job_id >= $2 AND job_id < $3 OR job_id >= $4 AND job_id < $5) ORDER BY seq",
        SYSTEM_TENANT,
        SUBJECT_PREFIX,
        AFTER_SUBJECTS,
        FORK_PREFIX,
        AFTER_FORKS,
    )
    return [tuple(row) for row in rows]


async def list_strays(connection: Connection) -> list[int]:
    """Seqs of rows about keys that stand beyond the head of ``_system``: no entries of its chain, the first few."""
    rows = await connection.fetch(
        "SELECT seq FROM scheduler.scheduler_log WHERE tenant_id = $1 AND job_id >= $2 AND job_id < $3"
        "   AND seq > (SELECT coalesce(max(head_seq), 0) FROM scheduler.chain_heads WHERE tenant_id = $1)"
        " ORDER BY seq LIMIT $4",
        SYSTEM_TENANT,
        SUBJECT_PREFIX,
        AFTER_SUBJECTS,
        STRAYS_MAX,
    )
    return [row["seq"] for row in rows]


async def system_head(connection: Connection) -> SystemHead:
    """Where the chain of ``_system`` ends; seq 0 without a head that can be one."""
    row = await connection.fetchrow(
        "SELECT head_seq, head_chain_link FROM scheduler.chain_heads WHERE tenant_id = $1", SYSTEM_TENANT
    )
    return SystemHead(*row) if row is not None and isinstance(row[0], int) else SystemHead(0, None)


async def published_key(connection: Connection, key_id: str) -> tuple[str, str] | None:
    """Algorithm and PEM of the key as published, None when it is not."""
    row = await connection.fetchrow(
        "SELECT algorithm, public_key_pem FROM scheduler.signing_keys WHERE key_id = $1", key_id
    )
    return (row[0], row[1]) if row is not None else None


async def oldest_entry_ms(connection: Connection) -> int | None:
    """HLC time of the oldest first entry of any chain, None while there is none."""
    oldest: int | None = await connection.fetchval(
        "SELECT min(hlc_physical) FROM scheduler.scheduler_log WHERE seq = 1 AND hlc_physical >= 0"
    )
    return oldest


async def highest_signed_ms(connection: Connection) -> int:
    """Highest HLC time that any snapshot says it ends with, in ms; 0 without snapshots."""
    highest: int = await connection.fetchval(
        """
        SELECT coalesce(max(CASE WHEN snapshot_hlc ~ '^[0-9]{1,15}:'
                                 THEN split_part(snapshot_hlc, ':', 1)::bigint END), 0)
          FROM scheduler.batch_snapshot
        """
    )
    return highest
