"""Entries that whoever may write to the database puts behind the head of a chain."""

from __future__ import annotations

import hashlib
import time

import asyncpg

from ledger.chain import Linker

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
