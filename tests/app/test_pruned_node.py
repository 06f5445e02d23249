"""A node whose entries left: its write-ahead log still has them, and does not bring them back. What is left goes on
after a fork of the log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.node.start.restore import fork_log, restore_from_wal
from cli.verify import Request
from cli.verify_database import verify_database
from ledger.errors import StartRefusedError
from ledger.exit_code import ExitCode
from ledger.positions import Lsn
from objects.store import ArchiveStore
from pipeline.archive.joined import archived_part
from signing.anchors import NOBODY
from signing.keys import Keyring
from tests.app.chains import until
from tests.app.conftest import BackUp, MakeSettings
from tests.app.exchanging import Ledger
from tests.app.starting import assert_no_start, changed_control
from tests.app.test_exchange_pruned import TENANT, archiving, head_seq, is_valid, prune, run_jobs
from tests.conftest import Database, connected_to, fresh_database


@pytest.fixture
def ledger(database: Database, tmp_path: Path, make_settings: MakeSettings) -> Ledger:
    alone = Ledger("use1", database, make_settings)
    alone.make_key(tmp_path)
    return alone


async def test_records_whose_entries_left_are_not_chained_again(
    ledger: Ledger, tmp_path: Path, make_settings: MakeSettings
) -> None:
    archive = archiving(tmp_path / "archive")
    async with ledger.running(**archive) as client:
        await run_jobs(client, 1, 2)
        await prune(client, ledger, 6)
        head = await head_seq(client)
    settings = make_settings(ledger.region, region=ledger.region, port=ledger.port)
    # A node that was killed and started much later: its control file lags behind PostgreSQL.
    changed_control(settings, chained_lsn=Lsn(0))
    async with ledger.running(**archive) as client:
        assert await head_seq(client) == head
        assert await is_valid(client)
    # A restore looks at every record, whatever the positions say.
    assert await restore_from_wal(settings, ledger.database.service_url) == ([], [])
    async with ledger.running(**archive) as client:
        await run_jobs(client, 3)
        assert await head_seq(client) == head + 3
        assert await is_valid(client)


async def test_what_was_said_of_retention_counts_after_a_fork(
    ledger: Ledger, tmp_path: Path, make_settings: MakeSettings, back_up: BackUp
) -> None:
    archive = archiving(tmp_path / "archive")
    async with ledger.running(**archive) as client:
        await run_jobs(client, 1, 2)
        await prune(client, ledger, 6)
        head = await head_seq(client)
    older = Ledger(ledger.region, await back_up(), make_settings)
    another_node = Ledger("two", ledger.database, make_settings)
    async with ledger.running(**archive) as client, another_node.running() as other:
        # The log of one node alone does not bring them back.
        await run_jobs(other, 3)
        await run_jobs(client, 4)
        assert (await client.post("/v1/snapshots", json={"tenant_id": TENANT})).status_code == 201
    settings = make_settings(ledger.region, region=ledger.region, port=older.port)
    with pytest.raises(StartRefusedError, match="--fork goes on without them"):
        await restore_from_wal(settings, older.database.service_url)
    await fork_log(settings, older.database.service_url, "the backup was old")
    async with older.running(**archiving(tmp_path / "another")) as client:

        async def has_own_job() -> bool:
            return await head_seq(client) == head + 3

        await until(has_own_job, "the job that this node's WAL has is chained again")
        verdict = (await client.get(f"/v1/chain/verify?tenant_id={TENANT}")).json()
        assert (verdict["valid"], verdict["verified_from_seq"]) == (True, 7), verdict
        policy = (await client.get("/v1/retention", params={"tenant_id": TENANT})).json()
        assert (policy["period"], policy["pruned_to_seq"]) == ("1s", 6)


async def is_archived_to(client: httpx.AsyncClient, seq: int) -> bool:
    tenants = (await client.get("/v1/archive")).json()["tenants"]
    return any(each["tenant_id"] == TENANT and each["archived_to_seq"] >= seq for each in tenants)


async def test_a_backup_from_before_a_prune_is_named_and_gets_the_prune_back_from_the_log(
    ledger: Ledger, tmp_path: Path, make_settings: MakeSettings, back_up: BackUp
) -> None:
    archive = archiving(tmp_path / "archive")
    async with ledger.running() as client:
        await run_jobs(client, 1, 2)
    older = Ledger(ledger.region, await back_up(), make_settings)
    async with ledger.running(**archive) as client:
        await prune(client, ledger, 6)
        await run_jobs(client, 3)
        assert (await client.post("/v1/snapshots", json={"tenant_id": TENANT})).status_code == 201
        await until(partial(is_archived_to, client, head := await head_seq(client)), "all is archived")
        keyring = Keyring.from_json((await client.get("/v1/keys")).json())
    # With its archive the older database is a rollback: what left is there again, and what came after is not.
    archived = await archived_part(ArchiveStore(str(tmp_path / "archive")), TENANT, keyring)
    request = Request(TENANT, None, None, keyring, None, NOBODY, archived=archived)
    found = await verify_database(older.database.service_url, request, [], [])
    assert (found["valid"], found["first_break"]["kind"], found["pruned"]) == (False, "rollback", None)
    # The node knows a newer checkpoint and later records: it does not begin where the prune never was.
    await assert_no_start(older.running(**archive), StartRefusedError, "what is missing with tally restore")
    assert await _begins_at(older, 1)
    # Its log has the prune: nothing is lost, and nothing chained twice.
    settings = make_settings(ledger.region, region=ledger.region, port=older.port)
    assert (await restore_from_wal(settings, older.database.service_url))[1] == []
    async with older.running(**archive) as client:
        assert await head_seq(client) == head
        verdict = (await client.get(f"/v1/chain/verify?tenant_id={TENANT}")).json()
        assert (verdict["valid"], verdict["verified_from_seq"]) == (True, 7), verdict
        # What had left is here again, counts for nothing, and leaves.
        await until(lambda: _begins_at(older, 7), "it has left")
        assert await is_valid(client)


@pytest.fixture
def new_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """Another migrated database, on which no node ever started."""
    with fresh_database(postgres) as database:
        yield database


@pytest.mark.parametrize("is_new", [False, True], ids=["older", "new"])
async def test_a_bundle_from_the_floor_on_is_restored_once_what_its_refusal_says_was_done(
    ledger: Ledger,
    tmp_path: Path,
    back_up: BackUp,
    make_settings: MakeSettings,
    new_database: Database,
    is_new: bool,
) -> None:
    archive, where = archiving(tmp_path / "archive"), {"TALLY_ARCHIVE__URL": str(tmp_path / "archive")}
    async with ledger.running():
        pass
    older = Ledger(ledger.region, new_database if is_new else await back_up(), make_settings)
    async with ledger.running(**archive) as client:
        await run_jobs(client, 1, 2)
        await prune(client, ledger, 6)
        await run_jobs(client, 3)
        await ledger.command(f"tally bundle export --tenant {TENANT} --out rest.tar", tmp_path)
        head = await head_seq(client)
    bring, on_older = (
        "tally restore --from bundle rest.tar",
        {"TALLY_DATABASE_URL": older.database.service_url, **where},
    )
    refused = await older.command(bring, tmp_path, code=ExitCode.COULD_NOT_RUN, **on_older)
    found = re.search(r"\((tally restore [^)]+)\)", refused)
    assert found is not None, refused
    await older.command(found[1], tmp_path, **on_older)
    assert f"now ends at seq {head}" in await older.command(bring, tmp_path, **on_older)
    await older.command("tally restore --from wal", tmp_path, **on_older)
    async with older.running(**archive) as client:
        assert await head_seq(client) == head
        assert await is_valid(client)
        # What came back beside the rest leaves again.
        await until(lambda: _begins_at(older, 7), "it has left")
        assert await is_valid(client)


async def _begins_at(ledger: Ledger, seq: int) -> bool:
    async with connected_to(ledger.database.superuser_url) as connection:
        first = "SELECT min(seq) FROM scheduler.scheduler_log WHERE tenant_id = $1"
        return bool(await connection.fetchval(first, TENANT) == seq)
