"""Entries that whoever may write to the database puts behind the head of a chain, and snapshots signed by its key."""

from __future__ import annotations

import hashlib
import json
import time

import asyncpg
import msgspec

from app.node.service import Service
from ledger.chain import Linker
from ledger.verification.snapshot_check import SnapshotClaim
from signing.snapshot import open_snapshot, sign_snapshot
from tests.app.chain_builder import edit

PAYLOAD = b'{"aggregate_metrics":{},"fence_token":1,"final_status":"forged","type":"JobCompleted"}'


async def forge(
    superuser: asyncpg.Connection,
    tenant_id: str,
    node_id: str,
    job_id: str = "victim",
    action: str = "COMPLETE",
    payload: bytes = PAYLOAD,
) -> int:
    """Append an entry to the chain, with a true link, as ``node_id`` would have; its seq."""
    head = await superuser.fetchrow(
        "SELECT head_seq, head_chain_link, head_hlc FROM scheduler.chain_heads WHERE tenant_id = $1", tenant_id
    )
    assert head is not None
    # Behind the head, however lately that came: an entry from before the first record of a WAL is believed.
    physical_ms = max(int(time.time() * 1000) - 50, int(head["head_hlc"].partition(":")[0]) + 1)
    seq = head["head_seq"] + 1
    hlc = f"{physical_ms}:0:{node_id}"
    digest = hashlib.sha256(payload)
    before = head["head_chain_link"]
    link = Linker(tenant_id).link(seq, hlc, job_id, action, bytes.fromhex(before), digest.digest(), b"").hex()
    async with superuser.transaction():
        await superuser.execute(
            "INSERT INTO scheduler.scheduler_log (tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id,"
            " action, link_version, prev_chain_link, chain_link, payload_digest, payload)"
            " VALUES ($1, $2, $3, $4, 0, $5, $10, $11, 2, $6, $7, $8, $9::text::json)",
            *(tenant_id, seq, hlc, physical_ms, node_id, before, link, digest.hexdigest(), payload.decode()),
            *(job_id, action),
        )
        await superuser.execute(
            "UPDATE scheduler.chain_heads SET head_seq = $2, head_chain_link = $3, head_hlc = $4 WHERE tenant_id = $1",
            *(tenant_id, seq, link, hlc),
        )
    return seq


async def forge_last_snapshot(
    service: Service, superuser: asyncpg.Connection, tenant_id: str, **claimed: object
) -> SnapshotClaim:
    """Whoever has the database and the key of the node puts these claims into the newest snapshot, and signs it."""
    where = "tenant_id = $1 AND to_seq = (SELECT max(to_seq) FROM scheduler.batch_snapshot WHERE tenant_id = $1)"
    query = f"SELECT dsse_envelope::text FROM scheduler.batch_snapshot WHERE {where}"
    claim = open_snapshot(await superuser.fetchval(query, tenant_id), None).claim
    forged = msgspec.structs.replace(claim, **claimed)
    async with service.notary.keys.signing() as signers:
        envelope, _ = sign_snapshot(forged, *signers)
    statement = f"UPDATE scheduler.batch_snapshot SET dsse_envelope = $2 WHERE {where}"
    await edit(superuser, statement, tenant_id, json.dumps(envelope))
    return forged
