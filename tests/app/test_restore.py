"""PostgreSQL restored from an older backup: the start is refused; rows come back as they were, or the log forks."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from app.edge.listener import listening
from app.node.service import Service
from app.node.start.restore import fork_log, restore_from_bundles, restore_from_wal
from app.node.wiring import running
from app.runtime.settings.config import Settings
from app.runtime.state.losses import ASIDE, FORK, Fork
from app.store import keys as key_store
from app.write.followers import checkpoints
from app.write.followers.checkpoints import CheckpointJournal
from app.write.pending import quarantine
from ledger.errors import BundleInvalidError, LedgerError, StartRefusedError, UntrustedKeyError
from signing import private_keys
from signing.key_history import event_of
from tests.app.admitting import admit_by_hand, run_two
from tests.app.bundles import bundle_of
from tests.app.chains import Chains, until
from tests.app.conftest import BackUp, MakeSettings, RunNode
from tests.app.drafts import GLOBAL, LOCAL, created, key, progressed
from tests.app.starting import assert_no_start
from tests.app.test_followers import halted
from tests.app.test_locked_rows import HEAD
from tests.app.test_start_refused import damage_control
from tests.conftest import Database, connected_to
from tests.ledger.ledger_in_memory import SIGNER, build
from tests.tally import run_tally
from wal.segment import list_segments

ROWS = (
    "SELECT tenant_id, seq, t_hlc, job_id, action, link_version, prev_chain_link, chain_link, payload::text,"
    " origin::text FROM scheduler.scheduler_log ORDER BY tenant_id, seq"
)
"""All that a row holds but its number in the table and when it was inserted."""


PHANTOM = """
INSERT INTO scheduler.scheduler_log (tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id, action,
       link_version, prev_chain_link, chain_link, payload_digest, payload)
SELECT tenant_id, head_seq + 1, '1:0:x', 1, 0, 'x', 'inserted', 'ENQUEUE', 2, 'p', 'l', 'd', '{}'
  FROM scheduler.chain_heads WHERE tenant_id = $1
"""
MEND = "DELETE FROM scheduler.scheduler_log WHERE payload_digest = 'd' AND tenant_id = $1"


def is_documented(name: str) -> bool:
    """Whether docs/formats/wal.md has a row for this file or folder of a WAL folder."""
    page = Path(__file__).parents[2] / "docs" / "formats" / "wal.md"
    first_cells = re.findall(
        r"^\| (`.+?) \|", page.read_text().partition("## Folder")[2].partition("## ")[0], re.MULTILINE
    )
    names = [each.partition("/")[0] for cell in first_cells for each in re.findall(r"`([^`]+)`", cell)]
    return any(fnmatchcase(name, re.sub(r"<[^>]+>", "*", each)) for each in names)


async def write(service: Service, *ns: int, tenant_id: str = "acme") -> None:
    """Chain one job a number, by a keyed request, and a fact about it; return once that is signed."""
    for n in ns:
        receipt = await service.submitter.submit(created(tenant_id, n), key=key(f"{tenant_id}-{n}"))
        fact = progressed(tenant_id, receipt.job_id, n, durability=GLOBAL)
        last = await service.submitter.submit(fact, key=None)
    assert last.chain is not None
    seq = last.chain.seq
    await until(lambda: kept_size(service, tenant_id) >= seq, "the checkpoint is kept")


def kept_size(service: Service, tenant_id: str) -> int:
    """Size of the tenant's checkpoint beside the WAL, 0 when there is none."""
    return service._started.checkpoints.size(tenant_id)


async def actions_about_keys(database: Database) -> set[str]:
    """What verifiers without keys read of a ledger."""
    async with connected_to(database.superuser_url) as connection:
        events = [event_of(row) for row in await key_store.list_entries(connection)]
    return {event.action for event in events if event is not None}


async def query(database: Database, statement: str, *values: object) -> list[Any]:
    async with connected_to(database.superuser_url) as connection:
        await connection.execute("SET session_replication_role = replica")
        return [tuple(row) for row in await connection.fetch(statement, *values)]


async def rows(database: Database) -> list[Any]:
    """Every row of the log."""
    return await query(database, ROWS)


def at(settings: Settings, database: Database) -> dict[str, str]:
    """The environment in which commands are those of this node."""
    return {"TALLY_DATA_DIR": str(settings.data_dir), "TALLY_DATABASE_URL": database.service_url}


async def assert_sound(database: Database, *tenants: str) -> None:
    """These chains, their heads and their job states hold together."""
    async with connected_to(database.superuser_url) as connection:
        for tenant_id in tenants:
            assert await Chains(connection).sound(tenant_id)


async def assert_refused(run_node: RunNode, settings: Settings, database: Database) -> None:
    """The node refuses to start on this database and names the way out."""
    await assert_no_start(run_node(settings, url=database.service_url), StartRefusedError, match="tally restore")


def keys_of(parent: Path, *nodes: Settings) -> Path:
    """A folder of the keys with which these nodes sign."""
    keys = parent / "keys"
    keys.mkdir()
    for number, settings in enumerate(nodes):
        (keys / f"{number}.pem").write_bytes((settings.data_dir / "keys" / "signing.pem").read_bytes())
    return keys


@asynccontextmanager
async def at_work(settings: Settings, url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the node, which works on the database of this URL."""
    async with (
        running(settings, url) as (_service, services),
        listening(services) as (base_url, _serving),
        httpx.AsyncClient(base_url=base_url, timeout=30, trust_env=False) as client,
    ):
        yield client


async def export(settings: Settings, url: str, folder: Path, tenant_id: str, **wanted: int) -> Path:
    """A bundle of the tenant's ledger."""
    path = folder / f"{tenant_id}-{len(list(folder.iterdir()))}.bundle.tar"
    async with at_work(settings, url) as client:
        answer = await client.post("/v1/bundles/export", json={"tenant_id": tenant_id, **wanted})
        assert answer.status_code == 200, answer.text
        path.write_bytes(answer.content)
    return path


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(chain={"batch_size": 4, "batch_interval": "100ms"})


async def test_a_wal_brings_the_same_rows_back_with_the_same_links(
    run_node: RunNode, settings: Settings, database: Database, back_up: BackUp
) -> None:
    async with run_node(settings) as service:
        await write(service, 1, 2)
    older = await back_up()
    async with run_node(settings) as service:
        await write(service, 3, 4, 5)
        await write(service, 1, tenant_id="begun-later")
    lost = await rows(database)
    await assert_refused(run_node, settings, older)

    with structlog.testing.capture_logs() as logs:
        grown, _ = await restore_from_wal(settings, older.service_url)

    assert [entry for entry in logs if entry["log_level"] in ("error", "critical")] == []
    assert {each.tenant_id: (each.entries, each.to_seq) for each in grown}["acme"] == (6, 10)
    assert await rows(older) == lost
    await assert_sound(older, "acme", "begun-later", "_system")
    assert await restore_from_wal(settings, older.service_url) == ([], [])
    with structlog.testing.capture_logs() as logs:
        async with run_node(settings, url=older.service_url) as service:
            again = await service.submitter.submit(created("acme", 5), key=key("acme-5"))
            assert again.replayed
            await write(service, 6)
    assert [entry for entry in logs if entry["log_level"] in ("error", "critical")] == []
    assert set(lost) < set(await rows(older))
    await assert_sound(older, "acme", "begun-later", "_system")


async def test_a_database_from_before_the_node_was_first_started_gets_all_of_it_back(
    run_node: RunNode, settings: Settings, make_settings: MakeSettings, database: Database, back_up: BackUp
) -> None:
    async with run_node(make_settings("other")) as service:
        await service.key_changes.recorded.wait()
        await write(service, 1, tenant_id="other")
    older = await back_up()
    async with run_node(settings) as service:
        await admit_by_hand(service, private_keys.load(make_settings("other").signing_key_uri))
        await write(service, 1, 2)
    lost = await rows(database)
    await assert_refused(run_node, settings, older)
    await restore_from_wal(settings, older.service_url)
    assert await rows(older) == lost


async def test_a_second_key_that_was_made_after_the_backup_comes_back_with_its_entry(
    run_node: RunNode, settings: Settings, make_settings: MakeSettings, database: Database, back_up: BackUp
) -> None:
    async with run_node(settings) as service:
        await write(service, 1)
    older = await back_up()
    both = make_settings(chain={"batch_size": 4, "batch_interval": "100ms"}, signing={"second": "ml-dsa-44"})
    async with run_node(both) as service:
        await service.key_changes.recorded.wait()
        second = service.keys.node_keys.second
        assert second is not None
        await write(service, 2)
    lost = await rows(database)
    await assert_refused(run_node, both, older)

    await restore_from_wal(both, older.service_url)

    assert await rows(older) == lost
    async with run_node(both, url=older.service_url) as service:
        await service.key_changes.recorded.wait()
        await write(service, 3)
        admitted = {each.key.key_id: each for each in (await service.trust.published()).admitted}
        assert (admitted[second.key_id].signs_snapshots, len(admitted)) == (True, 2)
    await assert_sound(older, "acme", "_system")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore waits for a lock no longer than a moment."""
    monkeypatch.setattr("app.node.start.connecting.LOCK_TIMEOUT_S", 0.3)


LOCKS = (
    (HEAD, "tenant acme .*chain_heads locked .*pg_locks"),
    ("SELECT FROM scheduler.wal_positions FOR UPDATE", r"\"wal_positions\".*pg_locks"),
    ("LOCK TABLE scheduler.scheduler_log IN EXCLUSIVE MODE", "lock timeout.*pg_locks"),
)
"""What another session may keep locked of what a restore needs, and what is said of it."""


@pytest.mark.usefixtures("soon")
async def test_a_restore_that_meets_locks_ends_and_says_so_and_the_next_goes_by_what_the_chain_holds(
    run_node: RunNode, settings: Settings, database: Database, back_up: BackUp
) -> None:
    async with run_node(settings) as service:
        await write(service, 1)
    older = await back_up()
    async with run_node(settings) as service:
        await write(service, 2)
        await write(service, 1, tenant_id="beta")
        folder, last_lsn = service._started.wal.folder, service.node.chained.lsn
    lost, kept = await rows(database), await rows(older)
    for lock, said in LOCKS:
        async with halted(older, lock), asyncio.timeout(20):
            with pytest.raises(StartRefusedError, match=said):
                await restore_from_wal(settings, older.service_url)
        assert await rows(older) == kept
        assert quarantine.load(folder) == {}
    # Not by the position, which somebody raised.
    await query(older, "UPDATE scheduler.wal_positions SET chained_lsn = $1 RETURNING 1", last_lsn)
    await restore_from_wal(settings, older.service_url)
    assert await rows(older) == lost
    await assert_sound(older, "acme", "beta", "_system")


@pytest.mark.usefixtures("soon")
async def test_a_bundle_that_meets_a_lock_can_be_brought_again_whatever_somebody_made_of_a_jobs_row(
    run_node: RunNode, settings: Settings, database: Database, back_up: BackUp, tmp_path: Path
) -> None:
    async with run_node(settings) as service:
        job_id = (await service.submitter.submit(created("acme", 1), key=None)).job_id
        await write(service, 2)
    older = await back_up()
    async with run_node(settings) as service:
        await service.submitter.submit(progressed("acme", job_id, 1, durability=GLOBAL), key=None)
    bundle = await export(settings, database.service_url, tmp_path, "acme")
    lost = [row for row in await rows(database) if row[0] == "acme"]
    await query(older, "UPDATE scheduler.jobs SET seqs = '{}' WHERE tenant_id = 'acme' RETURNING job_id")
    async with halted(older, HEAD), asyncio.timeout(20):
        with pytest.raises(StartRefusedError, match=r"\"chain_heads\".*pg_locks"):
            await restore_from_bundles(settings, older.service_url, [bundle], None)
    # Not told as a fault of the database.
    with pytest.raises(FileNotFoundError, match=r"nowhere\.tar"):
        await restore_from_bundles(settings, older.service_url, [tmp_path / "nowhere.tar"], None)

    ((_, restored),) = await restore_from_bundles(settings, older.service_url, [bundle], None)

    assert restored.entries == 1
    assert [row for row in await rows(older) if row[0] == "acme"] == lost


async def test_a_wal_that_lacks_rows_of_another_node_stores_nothing_until_bundles_brought_those_back(
    run_node: RunNode, make_settings: MakeSettings, database: Database, back_up: BackUp, tmp_path: Path
) -> None:
    one, two = make_settings("one"), make_settings("two")
    async with run_node(one) as service:
        await write(service, 1)
    older = await back_up()
    async with run_two(run_node, one, two) as (first, second):
        await write(second, 2)
        await write(first, 3)
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    files = [await export(two, database.service_url, bundles, tenant_id) for tenant_id in ("acme", "_system")]
    lost = await rows(database)
    before = await rows(older)
    with pytest.raises(StartRefusedError, match="--from bundle"):
        await restore_from_wal(one, older.service_url)
    assert await rows(older) == before

    keys = keys_of(tmp_path, one, two)
    await restore_from_bundles(one, older.service_url, files, keys)
    assert await rows(older) == [row for row in lost if row in await rows(older)]
    for settings in (one, two):
        await restore_from_wal(settings, older.service_url)
    assert [row for row in await rows(older) if row[0] == "acme"] == [row for row in lost if row[0] == "acme"]
    await assert_sound(older, "acme", "_system")
    async with run_node(one, url=older.service_url) as first, run_node(two, url=older.service_url) as second:
        await write(first, 4)
        await write(second, 5)


async def test_a_chain_that_came_back_alone_gets_the_record_of_its_beginning_from_the_wal(
    run_node: RunNode, settings: Settings, database: Database, back_up: BackUp, tmp_path: Path
) -> None:
    async with run_node(settings) as service:
        await write(service, 1)
    older = await back_up()
    async with run_node(settings) as service:
        await write(service, 1, tenant_id="begun-later")
    lost = await rows(database)
    bundle = await export(settings, database.service_url, tmp_path, "begun-later")
    await restore_from_bundles(settings, older.service_url, [bundle], None)

    grown, left_behind = await restore_from_wal(settings, older.service_url)

    assert ([each.tenant_id for each in grown], left_behind) == (["_system"], [])
    assert await rows(older) == lost
    async with run_node(settings, url=older.service_url) as service:
        await write(service, 2, tenant_id="begun-later")
    await assert_sound(older, "begun-later", "_system")


async def test_chains_that_other_nodes_must_bring_back_are_named(
    run_node: RunNode, make_settings: MakeSettings, database: Database, back_up: BackUp, tmp_path: Path
) -> None:
    one, two = make_settings("one"), make_settings("two")
    async with run_node(one) as service:
        await write(service, 1)
    older = await back_up()
    async with run_two(run_node, one, two) as (first, second):
        await write(second, 1, tenant_id="globex")
        await until(lambda: kept_size(first, "globex"), "the other node follows it")
        await write(first, 2)
    system = await export(one, database.service_url, tmp_path, "_system")
    lost = await rows(database)
    keys = keys_of(tmp_path, one, two)
    await restore_from_bundles(one, older.service_url, [system], keys)

    said = run_tally("restore", "--from", "wal", **at(one, older))
    assert said.returncode == 0, said.stderr
    assert "globex: this node signed up to seq 2" in said.stdout
    assert "can start" not in said.stdout
    assert "can start" in run_tally("restore", "--from", "wal", **at(two, older)).stdout

    assert await rows(older) == lost
    async with run_node(one, url=older.service_url) as service:
        await write(service, 3)


async def test_bundles_bring_back_rows_and_snapshots_as_they_were(
    run_node: RunNode, settings: Settings, database: Database, back_up: BackUp, tmp_path: Path
) -> None:
    async with run_node(settings) as service:
        await write(service, 1, 2)
    older = await back_up()
    async with run_node(settings) as service:
        await write(service, 3, 4, 5)
    tail = await export(settings, database.service_url, tmp_path, "acme", from_seq=7)
    middle = await export(settings, database.service_url, tmp_path, "acme", to_seq=8)
    whole = await export(settings, database.service_url, tmp_path, "acme")
    snapshots = (
        "SELECT from_seq, to_seq, merkle_root, dsse_envelope::text FROM scheduler.batch_snapshot"
        " WHERE tenant_id = 'acme' ORDER BY from_seq"
    )
    lost = [row for row in await rows(database) if row[0] == "acme"]
    signed = await query(database, snapshots)

    with pytest.raises(StartRefusedError, match="bring back what is between first"):
        await restore_from_bundles(settings, older.service_url, [tail], None)
    restored = await restore_from_bundles(settings, older.service_url, [tail, middle], None)

    assert [(file, each.entries, each.to_seq) for file, each in restored] == [(middle, 4, 8), (tail, 2, 10)]
    assert [row for row in await rows(older) if row[0] == "acme"] == lost
    await assert_sound(older, "acme")
    again = await restore_from_bundles(settings, older.service_url, [tail, middle, whole], None)
    assert await query(older, snapshots) == signed
    assert [each.entries for _, each in again] == [0, 0, 0]
    await restore_from_wal(settings, older.service_url)
    async with run_node(settings, url=older.service_url) as service:
        await write(service, 6)


async def test_a_bundle_that_does_not_belong_there_brings_nothing_back(
    run_node: RunNode,
    settings: Settings,
    make_settings: MakeSettings,
    database: Database,
    back_up: BackUp,
    tmp_path: Path,
) -> None:
    empty = await back_up()
    async with run_node(settings) as service:
        await write(service, 1)
    bundle = await export(settings, database.service_url, tmp_path, "acme")
    before = await rows(database)
    damaged = tmp_path / "damaged.tar"
    content = bytearray(bundle.read_bytes())
    content[600] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(BundleInvalidError):
        await restore_from_bundles(settings, database.service_url, [damaged], None)
    stranger = make_settings("stranger")
    async with run_node(stranger, url=empty.service_url) as service:
        await write(service, 7)
    foreign = await export(stranger, empty.service_url, tmp_path, "acme")
    with pytest.raises(UntrustedKeyError):
        await restore_from_bundles(settings, database.service_url, [foreign], None)
    key_of_stranger = stranger.data_dir / "keys" / "signing.pem"
    trusting = make_settings(bundle={"trusted_keys": str(key_of_stranger)})
    with pytest.raises(UntrustedKeyError):
        await restore_from_bundles(trusting, database.service_url, [foreign], None)
    with pytest.raises(StartRefusedError, match="tally bundle import"):
        await restore_from_bundles(settings, database.service_url, [foreign], key_of_stranger)
    assert await rows(database) == before


async def test_a_key_that_signed_entries_older_than_itself_counts_for_them_once_they_are_back(
    run_node: RunNode, make_settings: MakeSettings, database: Database, back_up: BackUp, tmp_path: Path
) -> None:
    (keys := tmp_path / "trusted.pem").write_text(SIGNER.public_key_pem)
    settings = make_settings(bundle={"trusted_keys": str(keys)})
    async with run_node(settings) as service:
        await write(service, 1)
    older = await back_up()
    (files := tmp_path / "bundles").mkdir()
    imported = build(20, tenant_id="brought")
    async with at_work(settings, database.service_url) as client:
        answer = await client.post("/v1/bundles/import", files=[("file", ("a.tar", bundle_of(imported)))])
        assert answer.status_code == 200, answer.text
        answer = await client.post("/v1/snapshots", json={"tenant_id": imported.tenant_id})
        assert answer.status_code == 201, answer.text
    bundles = [await export(settings, database.service_url, files, name) for name in ("_system", imported.tenant_id)]
    signs_from = await query(database, "SELECT key_id, not_before FROM scheduler.signing_keys")

    await restore_from_bundles(settings, older.service_url, bundles, None)

    assert await query(older, "SELECT key_id, not_before FROM scheduler.signing_keys") == signs_from
    await restore_from_wal(settings, older.service_url)
    async with at_work(settings, older.service_url) as client:
        found = (await client.get("/v1/chain/verify", params={"tenant_id": imported.tenant_id})).json()
        assert (found["valid"], found["first_break"]) == (True, None)


async def test_what_is_lost_for_good_forks_the_log_and_is_told_in_system(
    run_node: RunNode, settings: Settings, make_settings: MakeSettings, back_up: BackUp
) -> None:
    two = make_settings("two")
    async with run_two(run_node, settings, two) as (service, second):
        await write(service, 1, 2)
        await write(second, 1, tenant_id="untouched")
        with pytest.raises(LedgerError):
            await fork_log(settings, "postgresql://nobody", "it runs")
    older = await back_up()
    async with run_node(settings) as service, run_node(two) as second:
        await write(second, 3)
        await write(service, 4)
    wal = next(path for path in settings.wal_dir.iterdir() if path.is_dir())
    with pytest.raises(StartRefusedError, match="--fork goes on without them"):
        await restore_from_wal(settings, older.service_url)

    forked = await fork_log(settings, older.service_url, "the backup was old")

    names = {path.name for path in wal.iterdir()}
    assert {"fork.json", "keys", "checkpoints-1.journal"} <= names
    assert {name for name in names if not is_documented(name)} == set()
    assert [(head.tenant_id, head.size) for head in forked.differing] == [("acme", 8)]
    assert await fork_log(settings, older.service_url, "said twice") == forked
    await assert_refused(run_node, two, older)
    async with run_node(settings, url=older.service_url) as service:
        await until(lambda: FORK.load(wal) is None, "the fork is recorded")
        await until(lambda: kept_size(service, "untouched"), "every tenant has a checkpoint of the new log")
        assert service.notary.origin("acme") == f"{forked.to_origin}/acme"
        # A statement made from now on names the fork, so it says nothing in the ledger that was forked from.
        fork = await query(older, "SELECT seq, chain_link FROM scheduler.scheduler_log WHERE action = 'LOG_FORKED'")
        assert {item.introduced_by for item in (await service.trust.published()).admitted} == {*fork}
        assert await actions_about_keys(older) == {"KEY_ADDED", "KEY_ADMITTED", "LOG_FORKED"}
    entries = await query(older, "SELECT payload FROM scheduler.scheduler_log WHERE action = 'LOG_FORKED'")
    facts = [json.loads(payload) for (payload,) in entries]
    assert [(fact["from_origin"], fact["to_origin"], fact["reason"]) for fact in facts] == [
        (forked.from_origin, forked.to_origin, "the backup was old")
    ]
    assert (await fork_log(two, older.service_url, "as the other node did")).to_origin == forked.to_origin
    async with run_node(settings, url=older.service_url) as service, run_node(two, url=older.service_url) as second:
        await write(service, 6)
        await write(second, 7)
    assert len(await query(older, "SELECT FROM scheduler.scheduler_log WHERE action = 'LOG_FORKED'")) == 1
    await assert_sound(older, "acme", "untouched", "_system")


async def test_a_log_that_lost_nothing_or_whose_wal_has_it_all_is_not_forked_nor_is_a_fork_that_was_cut_short(
    run_node: RunNode, settings: Settings, database: Database, back_up: BackUp
) -> None:
    async with run_node(settings) as service:
        await write(service, 1)
        folder = settings.wal_dir / service.node.node_id
    with pytest.raises(StartRefusedError, match="nothing to fork"):
        await fork_log(settings, database.service_url, "why not")
    older = await back_up()
    # It ended before the log had its new origin, so it never happened.
    FORK.store(folder, Fork("a.example/log", "b.example/log", "cut short", "node", [], 1))
    async with run_node(settings) as service:
        await write(service, 2)
    assert FORK.load(folder) is None
    assert await query(database, "SELECT FROM scheduler.scheduler_log WHERE action = 'LOG_FORKED'") == []
    before = await rows(older)
    with pytest.raises(StartRefusedError, match="--from wal first"):
        await fork_log(settings, older.service_url, "too hasty")
    assert await rows(older) == before
    await restore_from_wal(settings, older.service_url)
    async with run_node(settings, url=older.service_url) as service:
        await write(service, 3)


async def test_a_fork_records_the_records_that_the_wal_holds_no_more_and_the_next_start_goes_on(
    run_node: RunNode, settings: Settings, back_up: BackUp
) -> None:
    async with run_node(settings) as service:
        await write(service, 1)
        folder = settings.wal_dir / service.node.node_id
    older = await back_up()
    async with run_node(settings) as service:
        await write(service, 2)
    removed = {path.name for path in folder.glob("*.wal")}
    async with run_node(settings) as service:
        await write(service, 3)
    for name in removed:
        (folder / name).unlink()
    await fork_log(settings, older.service_url, "segments are gone too")
    async with run_node(settings, url=older.service_url) as service:
        await write(service, 4)
    told = "SELECT action FROM scheduler.scheduler_log WHERE action IN ('LOG_FORKED', 'WAL_LOST') ORDER BY action"
    assert await query(older, told) == [("LOG_FORKED",), ("WAL_LOST",)]
    await assert_sound(older, "acme", "_system")


@pytest.mark.parametrize("lost", ["end", "control"])
async def test_an_older_database_beside_a_damaged_wal_has_a_way_out(
    run_node: RunNode, settings: Settings, back_up: BackUp, lost: str
) -> None:
    async with run_node(settings) as service:
        await write(service, 1)
        folder = settings.wal_dir / service.node.node_id
    older = await back_up()
    for n in (2, 3):
        async with run_node(settings) as service:
            await write(service, n)
    if lost == "end":
        list_segments(folder)[-1].path.unlink()
    else:
        damage_control(folder)
    url = older.service_url
    await assert_no_start(run_node(settings, url=url, accept_lost_wal=True), LedgerError)
    for refused in (restore_from_wal(settings, url), fork_log(settings, url, "both disks are damaged")):
        with pytest.raises(StartRefusedError, match="run this again with --accept-lost-wal"):
            await refused
    with pytest.raises(StartRefusedError, match="--fork goes on without them"):
        await restore_from_wal(settings, url, accept_lost_wal=True)
    await fork_log(settings, url, "both disks are damaged", accept_lost_wal=True)
    async with run_node(settings, url=url, accept_lost_wal=True) as service:
        await write(service, 4)
        await until(lambda: ASIDE.load(folder) == {}, "what was set aside is read")
    async with run_node(settings, url=url) as service:
        await write(service, 5)
    told = "SELECT DISTINCT action FROM scheduler.scheduler_log WHERE action IN ('LOG_FORKED', 'WAL_LOST') ORDER BY 1"
    assert await query(older, told) == [("LOG_FORKED",), ("WAL_LOST",)]
    numbers = "SELECT (payload #>> '{spec,n}')::int FROM scheduler.scheduler_log WHERE action = 'ENQUEUE' ORDER BY 1"
    # The records of a log that is set aside whole are sound, and come back.
    assert await query(older, numbers) == [(n,) for n in ((1, 2, 4, 5) if lost == "end" else (1, 2, 3, 4, 5))]
    await assert_sound(older, "acme", "_system")


async def test_a_wal_that_lost_what_nobody_signed_brings_the_rest_back_once_that_is_accepted(
    run_node: RunNode, settings: Settings, back_up: BackUp
) -> None:
    async with run_node(settings) as service:
        await write(service, 1)
        folder = settings.wal_dir / service.node.node_id
    older = await back_up()
    async with run_node(settings) as service:
        await write(service, 2)
    signed = CheckpointJournal(folder).load_all()
    async with run_node(settings) as service:
        await write(service, 3)
    list_segments(folder)[-1].path.unlink()
    # As where the newest records were never signed.
    (folder / checkpoints.NAME).unlink()
    CheckpointJournal(folder).store(signed)
    with pytest.raises(StartRefusedError, match="run this again with --accept-lost-wal"):
        await restore_from_wal(settings, older.service_url)
    grown, _ = await restore_from_wal(settings, older.service_url, accept_lost_wal=True)
    assert "acme" in {each.tenant_id for each in grown}
    async with run_node(settings, url=older.service_url, accept_lost_wal=True) as service:
        await write(service, 4)
    async with run_node(settings, url=older.service_url) as service:
        await write(service, 5)
    await assert_sound(older, "acme", "_system")


async def test_a_refused_restore_forgets_no_record_that_was_held_back(
    run_node: RunNode, settings: Settings, database: Database
) -> None:
    tenants = ("damaged", "mended")
    async with run_node(settings) as service:
        for tenant_id in tenants:
            await write(service, 1, tenant_id=tenant_id)
            await query(database, PHANTOM, tenant_id)
            await service.submitter.submit(created(tenant_id, 2, durability=LOCAL), key=None)
        await until(lambda: set(tenants) <= service.node.damaged.keys(), "both are quarantined")
        await write(service, 1)
    await query(database, MEND, "mended")
    with pytest.raises(StartRefusedError, match="tenant damaged is damaged"):
        await restore_from_wal(settings, database.service_url)
    await query(database, MEND, "damaged")
    async with run_node(settings) as service:
        for tenant_id in tenants:
            await service.submitter.submit(created(tenant_id, 3), key=None)
    for tenant_id in tenants:
        assert len(await query(database, "SELECT FROM scheduler.jobs WHERE tenant_id = $1", tenant_id)) == 3
    await assert_sound(database, *tenants)
