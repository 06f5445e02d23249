"""SQL of the jobs of which an entry has left with a prune.

Each is remembered by 8 bytes of the hash of its id, in rows of one step of the removal and one bucket each::

    hash = first 8 bytes of SHA-256(job id)        bucket = hash[0] >> 2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Final

from app.store import Connection
from app.store.reading import fetch_column, fetch_dict, turned
from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from ledger.machines.retention import SUBJECT

HASH_BYTES: Final = 8


async def remember(connection: Connection, tenant_id: str, to_seq: int, job_ids: Iterable[str]) -> None:
    """Remember that entries of these jobs left."""
    buckets: dict[int, list[bytes]] = defaultdict(list)
    for job_id in job_ids:
        bucket, departed = departed_key(job_id)
        buckets[bucket].append(departed)
    await connection.execute(
        "INSERT INTO scheduler.departed_jobs (tenant_id, bucket, to_seq, hashes)"
        " SELECT $1, bucket, $2, hashes FROM unnest($3::smallint[], $4::bytea[]) AS n(bucket, hashes)",
        tenant_id,
        to_seq,
        *turned([(bucket, b"".join(sorted(hashes))) for bucket, hashes in sorted(buckets.items())], 2),
    )


def departed_key(job_id: str) -> tuple[int, bytes]:
    """Bucket and hash of a job id."""
    digest = sha256(job_id.encode()).digest()
    return digest[0] >> 2, digest[:HASH_BYTES]


async def departed(connection: Connection, wanted: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The (tenant, job id) of ``wanted`` of which an entry has left."""
    places = [(tenant_id, *departed_key(job_id)) for tenant_id, job_id in wanted]
    found: Mapping[int, bool] = await fetch_dict(
        connection,
        """
        SELECT n, true
          FROM unnest($1::text[], $2::smallint[], $3::bytea[]) WITH ORDINALITY AS w(tenant_id, bucket, hash, n)
         WHERE EXISTS (SELECT FROM scheduler.departed_jobs d
                        WHERE d.tenant_id = w.tenant_id AND d.bucket = w.bucket AND position(w.hash IN d.hashes) > 0)
        """,
        *([place[at] for place in places] for at in range(3)),
    )
    return [each for number, each in enumerate(wanted, 1) if number in found]


async def departed_tenants(connection: Connection) -> list[str]:
    """The tenants that jobs have left."""
    return await fetch_column(
        connection,
        "SELECT tenant_id FROM scheduler.chain_heads h"
        " WHERE EXISTS (SELECT FROM scheduler.departed_jobs d WHERE d.tenant_id = h.tenant_id)",
    )


async def highest_left(connection: Connection, tenant_ids: Collection[str]) -> dict[str, Hlc]:
    """By tenant of which entries left, the highest HLC of these, as its newest PRUNED entry says."""
    found = {}
    for tenant_id, text in await connection.fetch(
        """
        SELECT tenant_id, payload ->> 'highest_hlc' FROM scheduler.scheduler_log
         WHERE tenant_id = ANY($1::text[]) AND job_id = $2 AND action = 'PRUNED' AND origin IS NULL ORDER BY seq
        """,
        list(tenant_ids),
        SUBJECT,
    ):
        with suppress(InvalidInputError, TypeError):
            found[tenant_id] = Hlc.parse(text)
    return found
