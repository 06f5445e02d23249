"""What is checked after a run: that all of it is there, and that the chain holds."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from benchmarks.http_client import Client, Target, get
from benchmarks.row import expect

CHAINED_TIMEOUT_S = 120.0
POLL_S = 0.02


async def wait_until_chained(client: Client) -> int:
    """Return once everything that the node made durable is chained; the LSN up to which it is."""
    async with asyncio.timeout(CHAINED_TIMEOUT_S):
        while True:
            node = await client.get("/v1/node")
            positions = node["positions"]
            if positions["chained_lsn"] >= positions["written_lsn"]:
                return int(positions["chained_lsn"])
            await asyncio.sleep(POLL_S)


async def check_service(
    url: str, entries: Mapping[str, int], token: str | None = None, ack_mode: str = "LOCAL_GROUP_SYNC"
) -> str:
    """Every tenant has so many entries and a chain that verifies, and the WAL synced each batch; says how many.

    Raises:
        BenchmarkError: something does not hold.
    """
    client = await Client.connect(Target.of(url), token)
    try:
        node = await client.get("/v1/node")
        expect(node["ack_mode"] == ack_mode, f"the WAL runs in mode {node['ack_mode']}")
        await wait_until_chained(client)
        for tenant_id, count in entries.items():
            found = await client.get(f"/v1/chain/verify?tenant_id={tenant_id}")
            expect(found["valid"], f"the chain of {tenant_id} does not hold: {found['first_break']}")
            expect(
                found["entries_checked"] == count,
                f"{tenant_id} has {found['entries_checked']} entries, {count} were answered",
            )
        return _wal_syncs((await client.ask(get("/metrics", token))).body.decode(), sum(entries.values()))
    finally:
        client.close()


def _wal_syncs(metrics: str, entries: int) -> str:
    def value(name: str) -> int:
        found = re.search(rf"^{name} (\S+)$", metrics, re.MULTILINE)
        return int(float(found[1])) if found else 0

    syncs, batches, records = (
        value(name) for name in ("wal_sync_seconds_count", "wal_batch_entries_count", "wal_batch_entries_sum")
    )
    expect(syncs == batches > 0, f"the WAL wrote {batches} batches and synced {syncs} times")
    expect(records >= entries, f"the WAL synced {records} records, the chains hold {entries}")
    return f"{syncs} WAL fsyncs for {records} records"
