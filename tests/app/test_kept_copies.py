"""Logs of other nodes: which nodes there are, and what of their logs nobody has chained."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import asyncpg

from tests.app.conftest import RunServer
from tests.app.test_replication import NODE, Keepers, MakeReplicated, keepers, replicated, submit
from tests.conftest import Database
from tests.tally import run_tally

__all__ = ["keepers", "replicated"]


async def test_a_failover_of_a_node_that_nobody_knows_is_refused_and_leaves_nothing(
    keepers: Keepers,
    replicated: MakeReplicated,
    run_server: RunServer,
    tmp_path: Path,
    database: Database,
    superuser: asyncpg.Connection,
) -> None:
    async with run_server(replicated()) as client:
        await submit(client, "GLOBAL")

    async def failover(node: str) -> tuple[int, str]:
        environment = {
            "TALLY_DATABASE_URL": database.service_url,
            "TALLY_DATA_DIR": str(tmp_path / "here"),
            "TALLY_WAL__ACK_MODE": "REPLICATED_QUORUM",
            "TALLY_REPLICATION__MEMBERS": json.dumps(keepers.addresses),
        }
        ended = await asyncio.to_thread(run_tally, "failover", "--node", node, **environment)
        return ended.returncode, ended.stderr

    keepers.stop(2)
    code, said = await failover("node-b")
    assert code == 1
    assert "there is no node node-b" in said
    assert f"The nodes there are: {NODE}. {keepers.addresses[2]['address']} did not answer" in said
    assert not (tmp_path / "here").exists()
    assert not [*tmp_path.glob("keeper-*/node-b")]
    assert await superuser.fetchval("SELECT array_agg(node_id) FROM scheduler.wal_positions") == [NODE]
    assert not await superuser.fetchval("SELECT count(*) FROM scheduler.wal_leases")
    code, said = await failover(NODE)
    assert code == 0, said
