"""SQL of what a prune needs to know about private fields: entries of a prefix, and records beside the chain."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import orjson

from app.store import Connection
from app.store.entry_check import EntryCheck
from app.store.privacy import PrivacyRecord, add_record, next_revision
from app.store.reading import ENTRIES, fetch_column, fetch_tuples, fetch_value, json_in
from ledger.errors import InvalidInputError
from ledger.facts.events import SystemAction
from ledger.private_fields import facts_of

_SUBJECTS: Final = "(job_id >= 'privacy:' AND job_id < 'privacy;' OR job_id >= 'erasure:' AND job_id < 'erasure;')"
"""Condition on the subjects of entries about private fields; the index by job finds them."""


async def privacy_entries(
    connection: Connection, check: EntryCheck, tenant_id: str, after_seq: int, to_seq: int
) -> list[tuple[Any, ...]]:
    """``ENTRY_COLUMNS`` of the declarations and erasures of this ledger among these entries, by seq.

    Raises:
        ChainDamagedError: one is not as it was chained.
    """
    rows = await fetch_tuples(
        connection,
        f"{ENTRIES} WHERE tenant_id = $1 AND seq > $2 AND seq <= $3 AND {_SUBJECTS} AND action = ANY($4::text[])"
        " AND origin IS NULL ORDER BY seq",
        tenant_id,
        after_seq,
        to_seq,
        [SystemAction.PRIVACY_DECLARED, SystemAction.SUBJECT_ERASED],
    )
    await check.require(connection, tenant_id, rows)
    return rows


async def erased_up_to(connection: Connection, tenant_id: str, to_seq: int) -> set[str]:
    """The ids of the keys that erasures up to a seq destroyed, as their records say; damaged ones are left out."""
    erased: set[str] = set()
    for facts in await fetch_column(
        connection,
        "SELECT facts FROM scheduler.privacy_records WHERE tenant_id = $1 AND action = $2 AND seq <= $3",
        tenant_id,
        SystemAction.SUBJECT_ERASED,
        to_seq,
    ):
        with suppress(InvalidInputError):
            erased.update(facts_of(SystemAction.SUBJECT_ERASED, json_in(facts))["key_ids"])
    return erased


async def record_erasure(connection: Connection, record: PrivacyRecord, node_id: str) -> bool:
    """Have ``privacy_records`` say of an erasure what its entry says, under a new revision if there is no record with
    its id; returns whether it said anything else."""
    found = await connection.fetchrow(
        """
        SELECT revision, facts::text AS facts, seq FROM scheduler.privacy_records
         WHERE tenant_id = $1 AND action = $2 AND facts ->> 'id' = $3 ORDER BY revision LIMIT 1
        """,
        record.tenant_id,
        record.action,
        record.facts["id"],
    )
    if found is None:
        revision = await next_revision(connection)
        await add_record(connection, record._replace(revision=revision), node_id)
        return True
    if (json_in(found["facts"]), found["seq"]) == (record.facts, record.seq):
        return False
    await connection.execute(
        "UPDATE scheduler.privacy_records SET facts = $3, seq = $4 WHERE tenant_id = $1 AND revision = $2",
        record.tenant_id,
        found["revision"],
        orjson.dumps(record.facts).decode(),
        record.seq,
    )
    return True


async def newest_declared_seq(connection: Connection, tenant_id: str) -> int | None:
    """Seq of the declaration in force, as its record says; None if there is none, or it is not known to be chained."""
    return await fetch_value(
        connection,
        int,
        "SELECT seq FROM scheduler.privacy_records WHERE tenant_id = $1 AND action = $2 ORDER BY revision DESC LIMIT 1",
        tenant_id,
        SystemAction.PRIVACY_DECLARED,
    )


async def has_open_records(connection: Connection, tenant_id: str) -> bool:
    """Whether a change is not known to be chained."""
    found = await fetch_value(
        connection,
        bool,
        "SELECT EXISTS (SELECT FROM scheduler.privacy_records WHERE tenant_id = $1 AND seq IS NULL)",
        tenant_id,
    )
    return bool(found)
