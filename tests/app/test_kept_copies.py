"""Logs of other nodes: which nodes there are, and what of their logs nobody has chained."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import asyncpg
import httpx
import pytest

from app.node.start import kept_copies
from app.store.chaining import WalPosition
from ledger.positions import Epoch, Lsn
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.postgres_proxy import PostgresProxy
from tests.app.test_replication import NODE, Keepers, MakeReplicated, keepers, replicated, submit
from tests.conftest import Database
from tests.tally import run_tally
from wal.control import CONTROL_NAME
from wal.replication.messages import StatusReport, WalStatus

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


async def left_logs(client: httpx.AsyncClient) -> str | None:
    detail: str | None = (await client.get("/readyz")).json()["checks"]["unchained"]["detail"]
    return detail


async def test_a_node_that_begins_in_the_place_of_a_lost_one_says_whose_log_the_members_hold_unchained(
    keepers: Keepers,
    replicated: MakeReplicated,
    run_server: RunServer,
    make_settings: MakeSettings,
    proxy: PostgresProxy,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_copies, "CONFIRM_S", 0.1)
    monkeypatch.setattr(kept_copies, "LOOK_AGAIN_S", 0.2)
    async with run_server(replicated(shutdown_grace="1s"), url=proxy.url) as client:
        await submit(client, "GLOBAL")
        await proxy.refuse()
        for _ in range(3):
            await submit(client, "LOCAL")
    await proxy.accept()
    others = {"members": keepers.addresses, "timeout": "2s"}
    new = make_settings("new", wal={"ack_mode": "REPLICATED_QUORUM"}, replication=others, lease={"ttl": "2s"})
    async with run_server(new) as client:
        said = await until(lambda: left_logs(client), "it says that a log was left")
        assert f"the log of node {NODE}, kept at 127.0.0.1:" in said
        assert f"tally failover --node {NODE}" in said
        shown = await asyncio.to_thread(
            run_tally,
            "safekeeper",
            "status",
            keepers.addresses[0]["address"],
            TALLY_DATABASE_URL=database.service_url,
        )
        assert f"records are not chained: if {NODE} does not run, tally failover --node {NODE}" in shown.stdout
        async with run_server(replicated("taken over")):
            pass

        async def is_over() -> bool:
            return await left_logs(client) is None

        await until(is_over, "its records are chained")


async def test_a_node_of_another_name_says_whose_log_its_folder_holds_unchained(
    run_server: RunServer,
    make_settings: MakeSettings,
    proxy: PostgresProxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(kept_copies, "CONFIRM_S", 0.1)
    monkeypatch.setattr(kept_copies, "LOOK_AGAIN_S", 0.1)
    async with run_server(make_settings("disk", node_id=NODE, shutdown_grace="1s"), url=proxy.url) as client:
        await submit(client, "GLOBAL")
        await proxy.refuse()
        await submit(client, "LOCAL")
    await proxy.accept()
    async with run_server(make_settings("disk", node_id="node-b")) as client:
        said = await until(lambda: left_logs(client), "it says that a log was left")
        assert f"TALLY_NODE_ID={NODE} tally serve" in said
        (control,) = tmp_path.glob(f"**/wal/{NODE}/{CONTROL_NAME}")
        control.write_bytes(b"damaged")

        async def is_unread() -> bool:
            said = await left_logs(client) or ""
            return f"kept at {control.parent}, cannot be read" in said and "WAL file control is damaged" in said

        await until(is_unread, "it says that the log cannot be read")


def test_a_log_whose_copies_failed_is_said_not_to_be_read() -> None:
    failed, whole = WalStatus(NODE, "failed", "its CRC does not match"), WalStatus(NODE, "open", "")
    positions = {NODE: WalPosition("0" * 32, Epoch(1), Lsn(7), Lsn(7))}

    def unread(*copies: WalStatus) -> list[str]:
        reports = {
            f"keeper-{number}:1": StatusReport("local", (copy,), more=False) for number, copy in enumerate(copies)
        }
        return [text for _, text in kept_copies._unread_at_members(reports, positions)]

    assert unread(whole, whole, failed) == []
    (said,) = unread(failed, failed, whole)
    assert said == (
        f"the log of node {NODE}, kept at keeper-0:1, keeper-1:1, cannot be read, and may hold records that are not "
        "chained: its CRC does not match; its CRC does not match"
    )
    assert unread(failed)
