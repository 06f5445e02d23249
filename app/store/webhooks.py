"""SQL of webhooks: the node that delivers to each, the confirmed position, and the refused entries.

A delivery stores its progress only while the node holds the webhook. False means that the webhook was removed or
stopped, or that another node delivers to it now.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from app.store import Connection
from app.store.chain_reads import ListedEntry
from app.store.entry_check import EntryCheck
from app.store.reading import (
    PAYLOAD_BYTES,
    clamped,
    clamped_columns,
    columns,
    fetch_as,
    fetch_one_as,
    fetch_page,
    fetch_value,
    page_of,
    tellable,
    told,
)
from ledger.verification.verdict import damaged

BATCH_BYTES_MAX = 1 << 20
"""A batch ends after the entry that brings its payloads to this many bytes."""
SCANNED_MAX = 10_000
"""Most entries that one statement reads to find the entries of a webhook."""
DEAD_LETTERS_LISTED_MAX = 100


class Webhook(NamedTuple):
    """A receiver and its filter; None in ``actions`` or ``job`` means all."""

    webhook_id: str
    tenant_id: str
    url: str
    actions: list[str] | None
    job: str | None
    format: str


class DeadLetter(NamedTuple):
    """An entry that the receiver refused; a dead letter unless it is to be retried."""

    seq: int
    reason: str
    is_again: bool
    created_at: datetime


class ShownWebhook(NamedTuple):
    """A receiver as lists show it, with the number of its refused entries and the first of them. One that is stopped
    without an error was paused."""

    webhook: Webhook
    delivered_seq: int
    head_seq: int
    delivered_at: datetime | None
    failing_since: datetime | None
    last_error: str | None
    is_stopped: bool
    created_by: str | None
    created_at: datetime
    dead_letters: int
    refused: Sequence[DeadLetter]


class Place(NamedTuple):
    """The position of a delivery: the confirmed seq, the end of the batch being sent, the dead letter to send first,
    the entry to go back to before all else."""

    delivered_seq: int
    sending_seq: int
    again_seq: int | None
    replay_seq: int | None
    head_seq: int


_HELD = "webhook_id = $1 AND holder = $2 AND stopped_at IS NULL"
_WANTED = f"""
SELECT {columns(ListedEntry, ("created_at",))}, {PAYLOAD_BYTES} FROM scheduler.scheduler_log
 WHERE tenant_id = $1 AND seq > $2 AND seq <= $3
   AND ($5::text[] IS NULL OR action = ANY($5)) AND ($6::text IS NULL OR job_id = $6)
 ORDER BY seq LIMIT $4 + 1
"""
_ENTRIES = f"""
SELECT {columns(ListedEntry)}, found FROM {page_of(_WANTED, "seq", limit="$4", bytes_max=BATCH_BYTES_MAX)} AS page
 ORDER BY number
"""
_CONFIRM = f"""
UPDATE scheduler.webhooks SET delivered_seq = greatest(delivered_seq, $3), delivered_at = now(), failing_since = NULL,
       last_error = NULL
 WHERE {_HELD} RETURNING true
"""
_REFUSE = """
INSERT INTO scheduler.webhook_dead_letters (webhook_id, seq, reason, is_again)
SELECT $1, seq, $3, $4 FROM unnest($2::bigint[]) AS refused(seq)
    ON CONFLICT (webhook_id, seq) DO UPDATE
       SET reason = excluded.reason, is_again = excluded.is_again, created_at = now()
"""


async def add(
    connection: Connection,
    webhook: Webhook,
    from_seq: int | None,
    created_by: str | None,
    *,
    most: int,
    most_of_tenant: int,
) -> bool:
    """Register a receiver of entries from ``from_seq`` on, by default after the head; False if the number of webhooks
    is at its bound."""
    return bool(
        await connection.fetchval(
            """
            INSERT INTO scheduler.webhooks (webhook_id, tenant_id, url, actions, job, format, delivered_seq, created_by)
            SELECT $1, $2, $3, $4, $5, $6,
                   coalesce($7::bigint - 1, (SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = $2), 0), $8
             WHERE (SELECT count(*) FROM scheduler.webhooks) < $9
               AND (SELECT count(*) FROM scheduler.webhooks WHERE tenant_id = $2) < $10
            RETURNING true
            """,
            *webhook,
            from_seq,
            created_by,
            most,
            most_of_tenant,
        )
    )


async def shown(
    connection: Connection, *, tenant_id: str | None = None, webhook_id: str | None = None
) -> list[ShownWebhook]:
    """The tenant's receivers, oldest first, or the one of this id."""
    rows = await connection.fetch(
        f"""
        SELECT {", ".join(f"w.{name}" for name in Webhook._fields)},
               coalesce(w.replay_seq - 1, w.delivered_seq), coalesce(h.head_seq, 0),
               {told("w.delivered_at")}, {told("w.failing_since")}, w.last_error, w.stopped_at IS NOT NULL,
               w.created_by, {clamped("w.created_at")},
               (SELECT count(*) FROM scheduler.webhook_dead_letters d WHERE d.webhook_id = w.webhook_id)
          FROM scheduler.webhooks w LEFT JOIN scheduler.chain_heads h USING (tenant_id)
         WHERE w.tenant_id = $1 OR w.webhook_id = $2 ORDER BY w.created_at, w.webhook_id
        """,
        tenant_id,
        webhook_id,
    )
    width = len(Webhook._fields)
    return [
        ShownWebhook._make((Webhook(*row[:width]), *row[width:], await _refused(connection, row[0]))) for row in rows
    ]


async def _refused(connection: Connection, webhook_id: str) -> list[DeadLetter]:
    """The refused entries in seq order, at most ``DEAD_LETTERS_LISTED_MAX``."""
    return await fetch_as(
        connection,
        DeadLetter,
        f"""
        SELECT {clamped_columns(DeadLetter, ("created_at",))} FROM scheduler.webhook_dead_letters
         WHERE webhook_id = $1 ORDER BY seq LIMIT $2
        """,
        webhook_id,
        DEAD_LETTERS_LISTED_MAX,
    )


async def remove(connection: Connection, webhook_id: str) -> None:
    """Remove the receiver and its refused entries."""
    async with connection.transaction():
        # The receiver first: a session that stores a refusal locks its row, and stores none once the row is gone.
        await connection.execute("DELETE FROM scheduler.webhooks WHERE webhook_id = $1", webhook_id)
        await connection.execute("DELETE FROM scheduler.webhook_dead_letters WHERE webhook_id = $1", webhook_id)


async def pause(connection: Connection, webhook_id: str) -> None:
    """Stop the delivery until an administrator resumes it; one that was stopped stays as it is."""
    await connection.execute(
        """
        UPDATE scheduler.webhooks SET stopped_at = now(), failing_since = NULL, last_error = NULL
         WHERE webhook_id = $1 AND stopped_at IS NULL
        """,
        webhook_id,
    )


async def resume(connection: Connection, webhook_id: str, *, with_dead_letters: bool) -> None:
    """Resume a delivery that was stopped, and retry its dead letters if asked."""
    async with connection.transaction():
        await connection.execute(
            """
            UPDATE scheduler.webhooks SET stopped_at = NULL, failing_since = NULL, last_error = NULL
             WHERE webhook_id = $1
            """,
            webhook_id,
        )
        if with_dead_letters:
            await connection.execute(
                "UPDATE scheduler.webhook_dead_letters SET is_again = true WHERE webhook_id = $1", webhook_id
            )


async def replay(connection: Connection, webhook_id: str, from_seq: int) -> None:
    """Have all entries from ``from_seq`` on sent again, or from an earlier seq that was asked for, once the message
    that is being sent is answered."""
    await connection.execute(
        "UPDATE scheduler.webhooks SET replay_seq = least(replay_seq, $2) WHERE webhook_id = $1", webhook_id, from_seq
    )


async def go_back(connection: Connection, webhook_id: str, holder: str) -> bool:
    """Move the position back to before the entry from which all is to be sent again, dead letters too."""
    async with connection.transaction():
        after_seq = await connection.fetchval(
            f"""
            UPDATE scheduler.webhooks
               SET delivered_seq = least(delivered_seq, replay_seq - 1), sending_seq = 0, replay_seq = NULL
             WHERE {_HELD} AND replay_seq IS NOT NULL RETURNING delivered_seq
            """,
            webhook_id,
            holder,
        )
        if after_seq is None:
            return False
        await connection.execute(
            "DELETE FROM scheduler.webhook_dead_letters WHERE webhook_id = $1 AND seq > $2", webhook_id, after_seq
        )
        return True


async def hold(connection: Connection, holder: str, held_s: float) -> list[Webhook]:
    """The receivers that ``holder`` delivers to for the next ``held_s`` seconds: its own and free ones. Rows that
    another session has locked are left out; an earlier hold of them stays valid."""
    return await fetch_as(
        connection,
        Webhook,
        f"""
        WITH mine AS (
            SELECT webhook_id FROM scheduler.webhooks
             WHERE stopped_at IS NULL AND (holder = $1 OR held_until IS NULL OR held_until <= clock_timestamp())
             ORDER BY webhook_id FOR UPDATE SKIP LOCKED
        )
        UPDATE scheduler.webhooks w SET holder = $1, held_until = clock_timestamp() + make_interval(secs => $2)
          FROM mine WHERE w.webhook_id = mine.webhook_id
        RETURNING {", ".join(f"w.{name}" for name in Webhook._fields)}
        """,
        holder,
        held_s,
    )


async def let_go(connection: Connection, holder: str) -> None:
    """Release the receivers, so that another node can deliver at once."""
    await connection.execute("UPDATE scheduler.webhooks SET held_until = NULL WHERE holder = $1", holder)


async def place(connection: Connection, webhook_id: str, holder: str) -> Place | None:
    """The position of the delivery; None if ``holder`` does not hold the webhook."""
    return await fetch_one_as(
        connection,
        Place,
        f"""
        SELECT delivered_seq, sending_seq,
               (SELECT min(seq) FROM scheduler.webhook_dead_letters d WHERE d.webhook_id = w.webhook_id AND is_again),
               replay_seq,
               coalesce((SELECT head_seq FROM scheduler.chain_heads h WHERE h.tenant_id = w.tenant_id), 0)
          FROM scheduler.webhooks w WHERE {_HELD}
        """,
        webhook_id,
        holder,
    )


async def entries(
    connection: Connection, check: EntryCheck, webhook: Webhook, after_seq: int, upto_seq: int, limit: int
) -> tuple[list[ListedEntry], int]:
    """Verified entries that match the receiver, after ``after_seq`` and up to ``upto_seq``, in seq order; and the seq
    up to which there are no others.

    Raises:
        ChainDamagedError: one is not as it was chained, or an entry up to that seq is missing from the log.
    """
    upto_seq = min(upto_seq, after_seq + SCANNED_MAX)
    page, more = await fetch_page(
        connection,
        ListedEntry,
        _ENTRIES,
        webhook.tenant_id,
        after_seq,
        upto_seq,
        limit,
        webhook.actions,
        webhook.job,
        nullable=("prev_chain_link", "origin"),
    )
    await check.require(connection, webhook.tenant_id, [entry.columns for entry in page])
    end_seq = page[-1].seq if more else upto_seq
    stored = await connection.fetchval(
        "SELECT count(*) FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq > $2 AND seq <= $3",
        webhook.tenant_id,
        after_seq,
        end_seq,
    )
    if stored != max(0, end_seq - after_seq):
        raise damaged(
            webhook.tenant_id,
            "gap",
            after_seq + 1,
            f"of the entries from seq {after_seq + 1} to {end_seq} the log has {stored}",
        )
    return page, end_seq


async def begin_batch(connection: Connection, webhook_id: str, holder: str, sending_seq: int) -> bool:
    """Record that the next batch ends at ``sending_seq``, also when it is retried."""
    return bool(
        await connection.fetchval(
            f"UPDATE scheduler.webhooks SET sending_seq = $3 WHERE {_HELD} RETURNING true",
            webhook_id,
            holder,
            sending_seq,
        )
    )


async def pass_over(connection: Connection, webhook_id: str, holder: str, seq: int) -> bool:
    """Record that no entry up to ``seq`` matches the receiver."""
    return bool(
        await connection.fetchval(
            f"UPDATE scheduler.webhooks SET delivered_seq = greatest(delivered_seq, $3) WHERE {_HELD} RETURNING true",
            webhook_id,
            holder,
            seq,
        )
    )


async def confirm(
    connection: Connection, webhook_id: str, holder: str, seq: int, refused: Sequence[int] = (), reason: str = ""
) -> bool:
    """Record that the receiver accepted all entries up to ``seq`` but ``refused``, which are to be retried."""
    async with connection.transaction():
        if (is_held := bool(await connection.fetchval(_CONFIRM, webhook_id, holder, seq))) and refused:
            await connection.execute(_REFUSE, webhook_id, refused, reason, True)
    return is_held


async def settle(connection: Connection, webhook_id: str, holder: str, seq: int, refusal: str | None) -> bool:
    """Record the retry of a refused entry: accepted, or refused again, which makes it a dead letter."""
    async with connection.transaction():
        if (is_held := bool(await connection.fetchval(_CONFIRM, webhook_id, holder, 0))) and refusal is None:
            await connection.execute(
                "DELETE FROM scheduler.webhook_dead_letters WHERE webhook_id = $1 AND seq = $2", webhook_id, seq
            )
        elif is_held:
            await connection.execute(_REFUSE, webhook_id, [seq], refusal, False)
    return is_held


async def fail(connection: Connection, webhook_id: str, holder: str, error: str) -> datetime | None:
    """Record a failed attempt; returns the time of the first failure in a row, None if ``holder`` does not hold the
    webhook."""
    return await fetch_value(
        connection,
        datetime,
        f"""
        UPDATE scheduler.webhooks SET failing_since = least({tellable("failing_since")}, now()), last_error = $3
         WHERE {_HELD} RETURNING failing_since
        """,
        webhook_id,
        holder,
        error,
    )


async def stop(connection: Connection, webhook_id: str, holder: str, error: str) -> bool:
    """Stop the delivery until an administrator resumes it."""
    return bool(
        await connection.fetchval(
            f"UPDATE scheduler.webhooks SET stopped_at = now(), last_error = $3 WHERE {_HELD} RETURNING true",
            webhook_id,
            holder,
            error,
        )
    )
