"""A database that went back, or a chain that was replaced, stops every node that runs, not only its writer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import httpx
import pytest

from app.node.service import Service
from app.node.start.restore import restore_from_wal
from app.node.wiring import running
from app.runtime.settings.config import Settings
from app.write.followers.checkpoints import CheckpointJournal
from app.write.followers.ledger_watch import LedgerWatch
from lab.tampering import cut_tail
from ledger import canonical
from ledger.errors import DatabaseWentBackError, StartRefusedError
from ledger.verification.entry_check import ENTRY_COLUMNS
from signing import checkpoint, note, private_keys
from tests.app import chain_builder
from tests.app.admitting import admit_node
from tests.app.chains import Chains, until
from tests.app.chains import followed as all_followed
from tests.app.conftest import BackUp, MakeSettings, RunNode, RunServer
from tests.app.drafts import created
from tests.app.starting import assert_refused, kept_size, wal_folder, write
from tests.conftest import Database
from tests.ledger.ledger_in_memory import Ledger

ENTRIES = 6


@pytest.fixture
def both(make_settings: MakeSettings) -> tuple[Settings, Settings]:
    """The node that writes, and another of the same ledger."""
    chain = {"checkpoint_interval": "20ms"}
    return make_settings("writer", chain=chain), make_settings("other", chain=chain)


@asynccontextmanager
async def run_both(run_node: RunNode, writer: Settings, other: Settings) -> AsyncIterator[tuple[Service, Service]]:
    """Both nodes; what the writer signs counts, as the ledger begins with its key."""
    async with run_node(writer) as first:
        await first.key_changes.recorded.wait()
        async with run_node(other) as second:
            yield first, second


async def followed(other: Settings, size: int = ENTRIES) -> None:
    """Wait until the node that does not write keeps a checkpoint of that size."""
    await until(lambda: kept_size(other) >= size, "the other node keeps the writer's checkpoint")


async def job_table_followed(superuser: asyncpg.Connection) -> None:
    """Wait for what follows behind the last commit: it would find its entries gone, and stop for that."""
    await until(lambda: all_followed(superuser), "the job table is at the end of every chain")


async def remove_acme(superuser: asyncpg.Connection) -> None:
    """Remove every row of the tenant, as if it had never been."""
    await job_table_followed(superuser)
    async with chain_builder.unguarded(superuser):
        await chain_builder.remove(superuser, "acme", "batch_snapshot", "jobs")


async def assert_stopped(*services: Service, match: str) -> None:
    """Both nodes have failed, take no write, and say why."""
    for service in services:
        await until(lambda service=service: service.node.failure, "the node stops")  # type: ignore[misc]
        assert isinstance(service.node.failure, DatabaseWentBackError)
        assert service.lifecycle.stop_requested.is_set()
        with pytest.raises(DatabaseWentBackError, match=match):
            await service.submitter.submit(created("quite-another", 1), key=None)


async def test_a_damaged_tree_is_made_again_and_a_tail_cut_with_everything_made_to_fit_stops_who_only_watches_too(
    run_node: RunNode, both: tuple[Settings, Settings], superuser: asyncpg.Connection
) -> None:
    writer, other = both
    stored = "SELECT hashes FROM scheduler.merkle_tile WHERE tenant_id = 'acme'"
    async with run_both(run_node, writer, other) as (first, second):
        await write(first, *range(ENTRIES - 1))
        await followed(other, ENTRIES - 1)
        whole = await superuser.fetchval(stored)
        await superuser.execute(
            "UPDATE scheduler.merkle_tile SET hashes = set_byte(hashes, 0, get_byte(hashes, 0) # 1)"
            " WHERE tenant_id = 'acme'"
        )
        await write(first, ENTRIES)
        await followed(other)
        assert (await superuser.fetchval(stored))[: len(whole)] == whole
        assert first.node.failure is second.node.failure is None, "that is no rollback"

        await job_table_followed(superuser)
        await superuser.execute("SET session_replication_role = replica")
        await cut_tail(superuser, "acme", 3)
        await assert_stopped(first, second, match="tenant acme ends at seq 3")
    for settings in both:
        await assert_refused(run_node, settings, StartRefusedError, "acme ends at seq 3")


async def replace(superuser: asyncpg.Connection, from_seq: int) -> None:
    """Other events from ``from_seq`` on, as many as there were, with links, head, tree and tiles made to fit."""
    rows = await superuser.fetch(
        f"SELECT {', '.join(ENTRY_COLUMNS)} FROM scheduler.scheduler_log WHERE tenant_id = 'acme' ORDER BY seq"
    )
    ledger = Ledger("acme", [dict(row) for row in rows])
    for row in ledger.entries[from_seq - 1 :]:
        row["payload"] = canonical.encode({**json.loads(row["payload"]), "forged": True}).decode()
    ledger.relink(from_seq)
    ledger.store_head()
    ledger.store_tree()
    await chain_builder.replace(superuser, ledger)


async def test_a_replaced_chain_of_the_same_length_stops_every_node(
    run_node: RunNode, both: tuple[Settings, Settings], superuser: asyncpg.Connection
) -> None:
    writer, other = both
    async with run_both(run_node, writer, other) as (first, second):
        await write(first, *range(ENTRIES))
        await followed(other)
        await job_table_followed(superuser)
        await replace(superuser, ENTRIES - 1)
        await assert_stopped(first, second, match="tenant acme differs within its first 6 entries")
    for settings in both:
        await assert_refused(run_node, settings, StartRefusedError, "history was rewritten")


async def test_a_tenant_that_vanished_stops_every_node_soon_however_long_a_page_took(
    run_node: RunNode,
    both: tuple[Settings, Settings],
    superuser: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As where the database took a thousand times as long: by its share alone the watch would rest for many minutes.
    monkeypatch.setattr("app.write.followers.ledger_watch.SHARE", 1e-6)
    monkeypatch.setattr("app.write.followers.ledger_watch.REST_MAX_S", 0.1)
    writer, other = both
    async with run_both(run_node, writer, other) as (first, second):
        await write(first, *range(ENTRIES))
        await followed(other)
        await remove_acme(superuser)
        await assert_stopped(first, second, match="tenant acme ends at seq 0")


async def test_a_tenant_that_vanished_is_missed_though_its_checkpoint_was_kept_after_the_last_change(
    database: Database, both: tuple[Settings, Settings], superuser: asyncpg.Connection
) -> None:
    writer, _ = both
    async with running(writer, database.service_url) as (service, services):
        await write(service, *range(ENTRIES))
        await followed(writer)
        watched = services[LedgerWatch]._watched
        await until(lambda: "acme" in watched and watched["acme"].kept_size == ENTRIES, "the checkpoint is taken up")
        await until(lambda: watched["acme"].link, "the chain is compared with it")
        # As where a round comes between the commit of a checkpoint and its file.
        watched["acme"].anchor = watched["acme"].link = None
        await remove_acme(superuser)
        await assert_stopped(service, match="tenant acme ends at seq 0")


async def test_a_tenant_that_came_and_vanished_between_two_rounds_is_missed(
    database: Database, both: tuple[Settings, Settings], superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.followers.ledger_watch.ROUND_INTERVAL_S", 3600.0)
    writer, _ = both
    async with running(writer, database.service_url) as (service, services):
        await write(service, *range(ENTRIES))
        await followed(writer)
        await remove_acme(superuser)

        async def look_twice() -> None:
            for _ in range(2):
                await services[LedgerWatch]._round()

        with pytest.raises(DatabaseWentBackError, match="tenant acme ends at seq 0"):
            await look_twice()


async def test_a_chain_that_went_back_to_just_what_the_watch_saw_last_is_missed(
    database: Database, both: tuple[Settings, Settings], superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.followers.ledger_watch.ROUND_INTERVAL_S", 3600.0)
    writer, _ = both
    async with running(writer, database.service_url) as (service, services):
        await write(service, *range(3))
        await until(lambda: kept_size(writer) == 3, "the checkpoint is kept")
        for _ in range(2):
            await services[LedgerWatch]._round()
        for table in _ENDS:
            await superuser.execute(f"CREATE TABLE public.{table} AS TABLE scheduler.{table}")
        await write(service, *range(3, ENTRIES))
        await followed(writer)
        await job_table_followed(superuser)
        await put_ends_back(superuser, seq=3)

        async def look_twice() -> None:
            for _ in range(2):
                await services[LedgerWatch]._round()

        with pytest.raises(DatabaseWentBackError, match="tenant acme ends at seq 3"):
            await look_twice()


_ENDS = ("chain_heads", "merkle_head")


async def put_ends_back(superuser: asyncpg.Connection, seq: int) -> None:
    """Leave head and tree of every chain as they were when ``_ENDS`` were copied, and acme's entries up to ``seq``."""
    async with chain_builder.unguarded(superuser):
        await superuser.execute("DELETE FROM scheduler.scheduler_log WHERE tenant_id = 'acme' AND seq > $1", seq)
        for table in _ENDS:
            await superuser.execute(f"DELETE FROM scheduler.{table} WHERE tenant_id = 'acme'")
            await superuser.execute(
                f"INSERT INTO scheduler.{table} SELECT * FROM public.{table} WHERE tenant_id = 'acme'"
            )


async def test_a_database_that_lost_what_nobody_had_signed_stops_an_idle_node(
    database: Database, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    settings = make_settings(chain={"checkpoint_interval": "1h"})
    async with running(settings, database.service_url) as (service, _services):
        await write(service, 1)
        await superuser.execute("CREATE TABLE public.wal_positions AS TABLE scheduler.wal_positions")
        await write(service, 2)
        await job_table_followed(superuser)
        async with chain_builder.unguarded(superuser):
            await cut_tail(superuser, "acme", 1)
            await superuser.execute(
                "UPDATE scheduler.wal_positions AS p SET chained_lsn = o.chained_lsn"
                " FROM public.wal_positions AS o WHERE o.node_id = p.node_id"
            )
        await assert_stopped(service, match="but this node had chained up to LSN")


async def test_a_checkpoint_by_a_key_that_is_not_admitted_is_neither_kept_nor_believed(
    run_node: RunNode,
    both: tuple[Settings, Settings],
    superuser: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.write.followers.ledger_watch.FOLLOW_INTERVAL_S", 0.0)
    writer, other = both
    own = private_keys.load_or_generate(other.signing_key_uri)
    forge = "UPDATE scheduler.merkle_head SET checkpoint = $1 WHERE tenant_id = 'acme'"
    async with run_node(writer) as first:
        await first.key_changes.recorded.wait()
        await write(first, *range(ENTRIES))
        await write(first, 1, tenant_id="globex")
        await until(
            lambda: kept_size(writer) == ENTRIES and first._started.checkpoints.size("globex") == 1, "both are signed"
        )
    genuine = await superuser.fetchval("SELECT checkpoint FROM scheduler.merkle_head WHERE tenant_id = 'acme'")
    said = checkpoint.parse(note.parse(genuine).text)
    await superuser.execute(forge, checkpoint.sign_checkpoint(said, own))
    async with run_node(other) as second:
        assert second.keys.log_signer.key_id == own.key_id
        kept = second._started.checkpoints
        await until(lambda: kept.size("globex") == 1, "the checkpoint of the same round is kept")
        assert kept.newest("acme") is None
        # What it signs itself does not count either, and nobody stops for it.
        assert second.keys.not_admitted is not None
        await write(second, ENTRIES, tenant_id="initech")
        await superuser.execute(forge, genuine)
        await followed(other)
        assert kept.newest("initech") is None
        assert second.node.failure is None


async def test_a_node_brings_back_its_own_tenants_though_another_wrote_others(
    run_node: RunNode, both: tuple[Settings, Settings], back_up: BackUp
) -> None:
    writer, other = both
    async with run_both(run_node, writer, other) as (first, second):
        await write(first, 1, tenant_id="acme")
        await write(second, 1, tenant_id="globex")
    older = await back_up()
    async with run_both(run_node, writer, other) as (first, second):
        await write(first, 2, tenant_id="acme")
        await write(second, 2, tenant_id="globex")
        await followed(other, 2)
    for settings in both:
        await assert_refused(run_node, settings, StartRefusedError, "older|ends at seq", url=older.service_url)
    for settings in both:
        grown, _ = await restore_from_wal(settings, older.service_url)
        assert grown
    async with run_node(writer, url=older.service_url) as first, run_node(other, url=older.service_url):
        await write(first, 3)


async def watch_check(client: httpx.AsyncClient) -> dict[str, Any]:
    """What ``/readyz`` of a node, which takes writes all the while, says of the watch."""
    ready = await client.get("/readyz")
    assert ready.status_code == 200
    check: dict[str, Any] = ready.json()["checks"]["watch"]
    return check


async def until_told(client: httpx.AsyncClient, named: str | None) -> None:
    """Wait until the watch says that it cannot follow exactly the tenants ``named``, or None."""

    async def is_told() -> bool:
        detail = (await watch_check(client))["detail"]
        return (detail or "").rpartition("(signing): ")[2] == (named or "")

    await until(is_told, f"the watch names {named}")


async def system_is_kept(writer: Settings, chains: Chains) -> None:
    """Wait until the first node has signed what its start wrote: what another adds to ``_system``, it does not sign."""
    await until(chains.key_recorded, "its start is recorded")

    async def is_kept() -> bool:
        return CheckpointJournal(wal_folder(writer)).size("_system") == (await chains.head("_system"))[0]

    await until(is_kept, "it is signed")


GARBLE = {
    "acme": "translate(NEW.checkpoint, '—', '-')",
    "junk-lines": "NEW.checkpoint || repeat(E'— junk ' || encode(repeat('x', 68)::bytea, 'base64') || E'\\n', 101)",
    "no-note": "NULL",
}
"""By the tenant whose checkpoint it is, what the database makes of it."""


async def test_a_checkpoint_that_the_database_garbles_is_told_until_one_opens_again(
    run_node: RunNode,
    run_server: RunServer,
    both: tuple[Settings, Settings],
    superuser: asyncpg.Connection,
    chains: Chains,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("app.write.followers.ledger_watch.UNFOLLOWED_AFTER_S", 4.0)
    monkeypatch.setattr("app.write.followers.ledger_watch.FOLLOW_INTERVAL_S", 0.2)
    writer, other = both

    async def all_kept(size: int) -> None:
        await until(lambda: sizes() == {size}, "the other node keeps the writer's checkpoints")

    def sizes() -> set[int]:
        kept = CheckpointJournal(wal_folder(other))
        return {kept.size(tenant_id) for tenant_id in GARBLE}

    whens = " ".join(f"WHEN '{tenant_id}' THEN {garbled}" for tenant_id, garbled in GARBLE.items())
    async with run_node(writer) as first:
        for tenant_id in GARBLE:
            await write(first, 1, tenant_id=tenant_id)
        await system_is_kept(writer, chains)
        async with run_server(other) as client:
            await all_kept(1)
            await superuser.execute(
                f"""
                CREATE FUNCTION scheduler.garble() RETURNS trigger LANGUAGE plpgsql AS $$
                BEGIN NEW.checkpoint := CASE NEW.tenant_id {whens} ELSE NEW.checkpoint END; RETURN NEW; END $$;
                CREATE TRIGGER garble BEFORE INSERT OR UPDATE ON scheduler.merkle_head
                   FOR EACH ROW EXECUTE FUNCTION scheduler.garble();
                """
            )
            for tenant_id in GARBLE:
                await write(first, 2, tenant_id=tenant_id)
            await until_told(client, ", ".join(["_system", *GARBLE]))
            assert sizes() == {1}
            assert first.node.unfollowed.keys() <= {"_system"}, "the writer keeps what it signed itself"
            await superuser.execute("DROP TRIGGER garble ON scheduler.merkle_head")
            for tenant_id in GARBLE:
                await write(first, 3, tenant_id=tenant_id)
            await all_kept(3)
            await until_told(client, "_system")
    lines = [line for line in capsys.readouterr().out.splitlines() if "checkpoints_not_followed" in line]
    for tenant_id in GARBLE:
        assert len([line for line in lines if f"'{tenant_id}'" in line]) == 1
    assert all("[warning" in line for line in lines)


async def test_entries_that_only_a_node_that_is_not_admitted_wrote_are_told_until_it_is(
    run_server: RunServer, both: tuple[Settings, Settings], chains: Chains, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.followers.ledger_watch.UNFOLLOWED_AFTER_S", 2.0)
    writer, other = both
    async with run_server(writer) as first:
        await system_is_kept(writer, chains)
        async with run_server(other) as second:
            assert (await second.post("/v1/jobs", json={"tenant_id": "globex"})).status_code == 201
            await until_told(first, "_system, globex")
            assert "is not admitted" in (await watch_check(first))["detail"]
            await admit_node(first, second)
            await until_told(first, None)
