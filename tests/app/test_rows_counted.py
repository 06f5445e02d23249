"""Rows that a superuser's trigger drops without an error: nothing is acknowledged on them."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest

from app.node.service import Service
from app.store import chaining
from app.write.pending.requests import EventLines
from ledger.errors import ChainDamagedError, HeldBackError
from tests.app.bundles import bundle_of, store
from tests.app.chains import Chains, numbers, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import GLOBAL, created, key
from tests.app.importing import importer_on, staged
from tests.conftest import Database
from tests.ledger.ledger_in_memory import SIGNER, build

DROPPING = """
CREATE FUNCTION scheduler.drop_row() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER drop_row BEFORE {0} ON scheduler.{1} FOR EACH ROW WHEN ({2}.tenant_id = 'acme')
    EXECUTE FUNCTION scheduler.drop_row();
"""
MENDED = "DROP TRIGGER drop_row ON scheduler.{0}; DROP FUNCTION scheduler.drop_row()"


def dropping(event: str, table: str) -> str:
    return DROPPING.format(event, table, "OLD" if event == "UPDATE" else "NEW")


@pytest.mark.parametrize(
    ("event", "table", "said"),
    [
        ("INSERT", "scheduler_log", "stored 0 of 1 entries"),
        ("UPDATE", "chain_heads", "did not move its head"),
        ("INSERT", "idempotency", "stored 0 of 1 idempotency rows"),
    ],
)
async def test_dropped_rows_set_their_tenant_apart_and_what_was_acknowledged_is_chained_once_they_are_stored(
    run_node: RunNode,
    make_settings: MakeSettings,
    superuser: asyncpg.Connection,
    chains: Chains,
    event: str,
    table: str,
    said: str,
) -> None:
    settings = make_settings()
    async with run_node(settings) as service:
        await service.submitter.submit(created("acme", 1), key=None)
        await superuser.execute(dropping(event, table))
        with pytest.raises(HeldBackError, match=said):
            await service.submitter.submit(created("acme", 2), key=key("two"))
        await service.submitter.submit_lines(
            EventLines.of([created("beta", 3), created("beta", 4)]), durability=GLOBAL, key=None
        )
        assert service.node.failure is None
        assert numbers(await chains.sound("acme")) == [1]
    await superuser.execute(MENDED.format(table))
    async with run_node(settings) as service:
        await until(lambda: service.quarantine.keeps_from() is None, "what was held back is chained")
        again = await service.submitter.submit(created("acme", 2), key=key("two"))
        assert again.replayed
    assert numbers(await chains.sound("acme")) == [1, 2]
    assert numbers(await chains.sound("beta")) == [3, 4]


async def test_one_of_many_rows_that_is_dropped_names_its_tenant_and_no_other(
    run_node: RunNode, superuser: asyncpg.Connection, chains: Chains
) -> None:
    async with run_node() as service:
        await superuser.execute(
            dropping("INSERT", "scheduler_log").replace("NEW.tenant_id = 'acme'", "NEW.job_id = 'job-3'")
        )
        drafts = [created(tenant, n, job_id=f"job-{n}") for n, tenant in enumerate(("a", "a", "b", "b", "b", "c"))]
        with pytest.raises(HeldBackError, match="stored 2 of 3 entries") as caught:
            await service.submitter.submit_lines(EventLines.of(drafts), durability=GLOBAL, key=None)
        assert caught.value.tenant_id == "b"
        assert set(service.node.damaged) == {"b"}
    assert [numbers(await chains.sound(tenant)) for tenant in ("a", "b", "c")] == [[0, 1], [], [5]]


async def test_a_new_tenant_whose_head_is_dropped_keeps_no_other_waiting(
    run_node: RunNode, superuser: asyncpg.Connection, chains: Chains
) -> None:
    async with run_node() as service:
        await superuser.execute(dropping("INSERT", "chain_heads"))
        with pytest.raises(ChainDamagedError, match="dropped its new row"):
            await service.submitter.submit(created("acme", 1), key=None)
        await service.submitter.submit(created("beta", 2), key=None)
        assert service.node.failure is None


async def test_an_import_whose_rows_are_dropped_stores_nothing_and_sets_the_tenant_apart(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection, chains: Chains, tmp_path: Path
) -> None:
    keys = store(tmp_path, SIGNER.public_key_pem.encode(), "trusted.pem")
    bundle = bundle_of(build(20, snapshots_to=(20,)))
    async with run_server(make_settings(bundle={"trusted_keys": keys})) as client:
        first = {"tenant_id": "acme", "spec": {"n": 1}, "durability": "GLOBAL"}
        assert (await client.post("/v1/jobs", json=first)).status_code == 201
        await superuser.execute(dropping("INSERT", "scheduler_log"))
        answer = await client.post("/v1/bundles/import", files=[("file", ("a.tar", bundle))])
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (409, "chain-damaged"), answer.text
        assert "acme" in str((await client.get("/readyz")).json())
        await superuser.execute(MENDED.format("scheduler_log"))
    assert numbers(await chains.sound("acme")) == [1]


async def test_every_row_that_an_import_sends_is_counted(
    superuser: asyncpg.Connection, pool: asyncpg.Pool, chains: Chains, tmp_path: Path
) -> None:
    keys = store(tmp_path, SIGNER.public_key_pem.encode(), "trusted.pem")
    bundle = staged(store(tmp_path, bundle_of(build(20, snapshots_to=(20,)))))
    importer = importer_on(pool, keys)
    for event, table, said in (
        ("INSERT", "scheduler_log", "stored 0 of 20 entries"),
        ("UPDATE", "chain_heads", "did not move its head"),
    ):
        await superuser.execute(dropping(event, table))
        with pytest.raises(ChainDamagedError, match=said):
            await importer.run([bundle], dry_run=False)
        await superuser.execute(MENDED.format(table))
        assert await chains.sound("acme") == []
    assert (await importer.run([bundle], dry_run=False)).imported == 20


@pytest.mark.parametrize(("event", "table"), [("UPDATE", "merkle_head"), ("INSERT", "merkle_tile")])
async def test_a_tree_that_is_not_stored_is_signed_no_further(
    service: Service, superuser: asyncpg.Connection, event: str, table: str
) -> None:
    await superuser.execute(dropping(event, table))
    await service.submitter.submit(created("acme", 1), key=None)
    await until(lambda: "acme" in service.node.unsigned, "the notary sees that nothing was stored")
    assert "did not store its Merkle tree" in service.node.unsigned["acme"]
    await service.submitter.submit(created("beta", 2), key=None)
    await service.notary.sign_now("beta")


async def test_a_snapshot_that_is_not_stored_is_no_endless_loop(
    service: Service, superuser: asyncpg.Connection
) -> None:
    await superuser.execute(dropping("INSERT", "batch_snapshot"))
    await service.submitter.submit(created("acme", 1), key=None)
    with pytest.raises(Exception, match="did not store the snapshot from seq 1 on"):
        await service.notary.sign_now("acme")
    await service.submitter.submit(created("beta", 2), key=None)
    assert await service.notary.sign_now("beta")


# --- the stored progress of an import -------------------------------------------------------------


async def test_progress_that_somebody_raised_makes_an_import_skip_nothing(
    database: Database, superuser: asyncpg.Connection, pool: asyncpg.Pool, chains: Chains, tmp_path: Path
) -> None:
    keys = store(tmp_path, SIGNER.public_key_pem.encode(), "trusted.pem")
    count = 3_000
    bundle = staged(store(tmp_path, bundle_of(build(count, snapshots_to=(count,)))))
    importer = importer_on(pool, keys)
    await superuser.execute(
        "CREATE FUNCTION scheduler.stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'stop' USING"
        " ERRCODE = '53100'; END $$; CREATE TRIGGER stop BEFORE INSERT ON scheduler.scheduler_log FOR EACH ROW"
        " WHEN (NEW.seq = 1500) EXECUTE FUNCTION scheduler.stop()"
    )
    with pytest.raises(Exception, match="import the same bundles again"):
        await importer.run([bundle], dry_run=False)
    await superuser.execute("DROP TRIGGER stop ON scheduler.scheduler_log")
    assert len(await chains.sound("acme")) == 1_000
    await superuser.execute("UPDATE scheduler.bundle_import SET position = 2500, imported = 2400, duplicates = 100")
    done = await importer.run([bundle], dry_run=False)
    assert (done.imported, done.duplicates) == (2_000, 1_000)
    assert len(await chains.sound("acme")) == count
    position = await superuser.fetchrow("SELECT position, imported, ended_at IS NOT NULL FROM scheduler.bundle_import")
    assert tuple(position) == (count, 2_000, True)
    again = await importer.run([bundle], dry_run=False)
    assert (again.imported, again.duplicates) == (0, count)


async def test_whoever_chains_waits_for_the_disk_whatever_was_switched_off_since_the_start(
    database: Database, superuser: asyncpg.Connection
) -> None:
    await superuser.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$"
    )
    connection = await chaining.connect(database.service_url, 10, 10)
    try:
        assert await connection.fetchval("SHOW synchronous_commit") == "on"
    finally:
        await connection.close()
