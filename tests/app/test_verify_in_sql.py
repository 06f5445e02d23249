"""``scheduler.verify_chain`` gives the verdict of ``tally verify``, on the oldest PostgreSQL and on our own.

It judges neither signatures, forms of payloads, tiles, job table, commitments nor checkpoints, and says so. So the
breaks of these aspects are left out of the verdict that it is compared with.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.store.chain_reader import consistent_reader
from ledger.verification import verify
from ledger.verification.verdict import KINDS, Break
from signing.keys import Keyring
from signing.snapshot import open_snapshot
from tests.app.chain_builder import edit, insert, replace
from tests.app.test_oldest_postgres import server as oldest  # noqa: F401 (a fixture)
from tests.app.test_tamper import drop_guards
from tests.conftest import Database, connected_to, fresh_database
from tests.ledger.damage import DAMAGE, damage
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger, build
from tests.ledger.pruned import pruned, removed

LEDGERS = 200
NOT_JUDGED = ("malformed", "caller-signature", "projection", "rollback")
OPEN = partial(open_snapshot, keyring=Keyring.of([SIGNER.public_key_pem, STRANGER.public_key_pem]))
PASTED = Path("docs/formats/verify.sql")


@pytest.fixture(params=["oldest", "postgres"])
def server(request: pytest.FixtureRequest) -> EmbeddedPostgres:
    found: EmbeddedPostgres = request.getfixturevalue(request.param)
    return found


@pytest.fixture
async def service(database: Database) -> AsyncIterator[asyncpg.Connection]:
    async with connected_to(database.service_url) as connection:
        yield connection


@pytest.fixture
def url(server: EmbeddedPostgres) -> Iterator[str]:
    """URL of the superuser on a database of its own."""
    with fresh_database(server) as database:
        yield database.superuser_url


async def first_break_in_sql(connection: asyncpg.Connection, tenant: str, schema: str = "scheduler") -> object:
    row = await connection.fetchrow(f"SELECT * FROM {schema}.verify_chain($1)", tenant)
    if row is None:
        return None
    found = None if row["first_break"] is None else json.loads(row["first_break"])
    assert row["valid"] is (found is None)
    return found and (found["seq"], found["kind"])


async def first_break_in_python(connection: asyncpg.Connection, tenant: str) -> object:
    breaks: list[Break] = []
    async with consistent_reader(connection, tenant) as reader:
        verdict = await verify(reader, tenant_id=tenant, open_snapshot=OPEN, projection=False, on_break=breaks.append)
    assert (verdict.first_break is None) == (not breaks)
    judged = [
        (each.seq, KINDS.index(each.kind))
        for each in breaks
        if each.kind not in NOT_JUDGED and not each.detail.startswith("tile ")
    ]
    return (min(judged)[0], KINDS[min(judged)[1]]) if judged else None


def damaged(draw: random.Random, tenant: str) -> Ledger:
    count = draw.choice([0, 1, 19, 20, 21, 41, 300])
    to_seqs = sorted({seq for seq in (draw.randint(1, 300) for _ in range(4)) if seq <= count})
    ledger = build(count, tenant_id=tenant, snapshots_to=to_seqs, version_1_until=draw.choice([0, 0, 20]))
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        damage(ledger, draw.randrange(len(DAMAGE)), draw.randrange(300), draw.randrange(2000))
    return ledger


async def test_two_hundred_tampered_ledgers_get_the_verdict_of_tally_verify(url: str) -> None:
    draw = random.Random(2)
    async with connected_to(url) as connection:
        await connection.execute("SET session_replication_role = replica")
        for table in ("scheduler_log", "batch_snapshot", "jobs", "merkle_head"):
            await drop_guards(connection, table)
        found: list[object] = []
        while len(found) < LEDGERS:
            tenant = f"tenant-{len(found)}"
            try:
                async with connection.transaction():
                    await insert(connection, damaged(draw, tenant))
            except (asyncpg.PostgresError, asyncpg.DataError):
                continue  # A column of PostgreSQL cannot hold this value.
            found.append(await first_break_in_python(connection, tenant))
            assert await first_break_in_sql(connection, tenant) == found[-1], tenant
    kinds = {first[1] for first in found if isinstance(first, tuple)}
    assert kinds == {kind for kind in KINDS if kind not in (*NOT_JUDGED, "snapshot-signature")}
    assert LEDGERS / 4 < found.count(None) < LEDGERS * 3 / 4


async def test_a_second_entry_at_a_seq_does_not_stand_for_the_missing_one_after_it(url: str) -> None:
    async with connected_to(url) as connection:
        await drop_guards(connection, "scheduler_log")
        for count in range(4, 10):
            ledger = build(count)
            ledger.entries[count - 2]["seq"] -= 1
            ledger.relink()
            ledger.store_head()
            ledger.store_tree()
            await replace(connection, ledger, "batch_snapshot", "jobs")
            assert await first_break_in_python(connection, "acme") == (count - 2, "duplicate-seq")
            assert await first_break_in_sql(connection, "acme") == (count - 2, "duplicate-seq")


async def test_links_of_a_block_are_hashed_in_its_query_without_a_call_for_each(url: str) -> None:
    links = "SELECT scheduler.link_of('', seq, t_hlc, job_id, action, prev_chain_link, payload_digest, origin::text)"
    async with connected_to(url) as connection:
        await connection.execute("SET search_path = pg_catalog")
        plan = await connection.fetch(f"EXPLAIN (VERBOSE) {links} FROM scheduler.scheduler_log")
    text = "".join(line for (line,) in plan)
    assert "sha256(" in text
    assert "link_of" not in text


async def test_an_envelope_that_is_no_snapshot_s_is_a_break(url: str) -> None:
    async with connected_to(url) as connection:
        for envelope in ("{}", "[]", *(f'{{"payload": {payload}}}' for payload in ("1", '"!"', '"AAAA"', '"e30="'))):
            ledger = build(20, snapshots_to=(7, 15))
            ledger.snapshots[0]["dsse_envelope"] = envelope
            await replace(connection, ledger, "batch_snapshot", "jobs")
            assert await first_break_in_python(connection, "acme") == (7, "snapshot-signature")
            assert await first_break_in_sql(connection, "acme") == (7, "snapshot-signature")


async def test_a_chain_is_verified_from_its_floor_on(url: str) -> None:
    async with connected_to(url) as connection:
        for row in (pruned(), removed(pruned(), 10), removed(pruned(20), 20)):
            await replace(connection, row, "batch_snapshot", "jobs")
            found = await connection.fetchrow("SELECT * FROM scheduler.verify_chain('acme')")
            assert row.tree is not None
            assert (found["valid"], found["to_seq"], found["tree_root"]) == (True, 30, row.tree.root)
            assert found["verified_from_seq"] in (11, 21)
        await edit(connection, "DELETE FROM scheduler.scheduler_log WHERE seq = 21")
        assert await first_break_in_sql(connection, "acme") == (21, "gap")
        await replace(connection, removed(build(30, snapshots_to=(10,)), 10), "batch_snapshot", "jobs")
        assert await first_break_in_sql(connection, "acme") == (1, "gap"), "a prefix that no PRUNED entry covers"


async def test_an_entry_and_the_entries_of_a_job_are_judged_alone(url: str) -> None:
    ledger = build(60, snapshots_to=(18, 45))
    job = ledger.entry(21)["job_id"]
    seqs = [row["seq"] for row in ledger.entries if row["job_id"] == job]
    async with connected_to(url) as connection:
        await insert(connection, ledger)
        for row in ledger.entries:
            found = await connection.fetchrow("SELECT * FROM scheduler.verify_entry('acme', $1)", row["seq"])
            covering = next(
                (
                    (each["from_seq"], each["to_seq"])
                    for each in ledger.snapshots
                    if each["from_seq"] <= row["seq"] <= each["to_seq"]
                ),
                (None, None),
            )
            assert (found["valid"], found["chain_link"], found["job_id"]) == (True, row["chain_link"], row["job_id"])
            assert (found["snapshot_from"], found["snapshot_to"]) == covering
        history = await connection.fetch("SELECT * FROM scheduler.job_history('acme', $1)", job)
        assert [(row["seq"], row["fault"]) for row in history] == [(seq, None) for seq in seqs]
        assert [row["payload"] for row in history] == [ledger.entry(seq)["payload"] for seq in seqs]
        await edit(connection, "UPDATE scheduler.scheduler_log SET action = 'CANCEL' WHERE seq = 21")
        history = await connection.fetch("SELECT * FROM scheduler.job_history('acme', $1)", job)
        assert [(row["seq"], row["fault"]) for row in history] == [(seq, "link" if seq == 21 else None) for seq in seqs]
        assert await connection.fetchrow("SELECT * FROM scheduler.verify_entry('acme', 61)") is None


async def test_a_role_that_may_write_rows_cannot_change_what_judges_them(service: asyncpg.Connection) -> None:
    assert await service.fetchrow("SELECT * FROM scheduler.verify_chain('acme')") is None
    for change in (
        "ALTER FUNCTION scheduler.verify_chain(text) RENAME TO other",
        "DROP FUNCTION scheduler.verify_chain(text)",
        "CREATE FUNCTION scheduler.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await service.execute(change)


async def test_the_functions_to_paste_need_none_of_the_database(url: str) -> None:
    async with connected_to(url) as connection:
        await insert(connection, build(60, snapshots_to=(18, 45)))
        made = await connection.fetch(
            "SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'scheduler'::regnamespace"
        )
        await edit(connection, "UPDATE scheduler.scheduler_log SET job_id = 'other' WHERE seq = 21")
        for (name,) in made:
            await connection.execute(f"DROP FUNCTION {name} CASCADE")
        await connection.execute(PASTED.read_text())
        assert await first_break_in_sql(connection, "acme", "pg_temp") == (21, "link")
        assert await connection.fetchval("SELECT fault FROM pg_temp.job_history('acme', 'other')") == "link"
