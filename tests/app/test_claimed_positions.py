"""Positions that somebody edited in PostgreSQL: what a start believes of them is what WAL and chain bear out."""

from __future__ import annotations

import asyncpg
import pytest
import structlog

from app.node.service import Service
from app.runtime.settings.config import Settings
from app.write.pending.requests import Receipt
from ledger.errors import StartRefusedError, WalCorruptError
from tests.app.chains import Chains, numbers, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import LOCAL, created, key
from tests.app.postgres_proxy import proxy_to
from tests.app.starting import assert_refused, changed_control, write
from tests.conftest import Database

STRANDED = 40


@pytest.fixture
def settings(make_settings: MakeSettings) -> Settings:
    return make_settings(shutdown_grace="1s")


async def strand(service: Service, *, first: int) -> list[Receipt]:
    """Acknowledged once durable, every third keyed; the first of a tenant that has not begun."""
    receipts = [await service.submitter.submit(created("beta", 0, durability=LOCAL), key=None)]
    for n in range(first, first + STRANDED):
        key_of_n = key(f"k-{n}") if n % 3 == 0 else None
        receipts.append(await service.submitter.submit(created("acme", n, durability=LOCAL), key=key_of_n))
    return receipts


@pytest.fixture
async def stranded(run_node: RunNode, settings: Settings, database: Database) -> list[Receipt]:
    """What a node acknowledged while PostgreSQL was away; numbers 0 and 1 of acme were chained before."""
    async with proxy_to(database.service_url) as proxy, run_node(settings, url=proxy.url) as service:
        await write(service, 0, 1)
        await service.key_changes.recorded.wait()
        await until(lambda: service.node.chained.lsn >= service.writer.written_lsn, "all that is written is chained")
        await proxy.refuse()
        return await strand(service, first=2)


async def test_a_raised_epoch_is_refused_with_advice_that_gives_nothing_up(
    run_node: RunNode, settings: Settings, stranded: list[Receipt], superuser: asyncpg.Connection, chains: Chains
) -> None:
    known = await superuser.fetchval("UPDATE scheduler.wal_positions SET epoch = epoch + 5 RETURNING epoch - 5")
    advice = rf"somebody raised the epoch in scheduler\.wal_positions.* back to {known}: then nothing is lost"
    await assert_refused(run_node, settings, StartRefusedError, advice)
    await superuser.execute("UPDATE scheduler.wal_positions SET epoch = $1", known)
    async with run_node(settings) as service:
        await until(lambda: service.node.chained.lsn >= stranded[-1].lsn, "the backlog drains")
    assert numbers(await chains.sound("acme")) == list(range(STRANDED + 2))


async def test_records_below_a_raised_position_are_chained_by_the_next_start(
    run_node: RunNode, settings: Settings, stranded: list[Receipt], superuser: asyncpg.Connection, chains: Chains
) -> None:
    await superuser.execute("UPDATE scheduler.wal_positions SET chained_lsn = $1", stranded[-1].lsn)
    with structlog.testing.capture_logs() as logs:
        async with run_node(settings) as service:
            assert service._started.recovered[0].lsn == stranded[0].lsn - 1, "the record that beta begins is first"
            await until(lambda: service.node.chained.lsn >= stranded[-1].lsn, "the backlog drains")
            again = await service.submitter.submit(created("acme", 3), key=key("k-3"))
            assert (again.replayed, again.job_id) == (True, stranded[2].job_id)
    (told,) = [entry for entry in logs if entry["event"] == "chained_position_not_borne_out"]
    assert (told["claimed_lsn"], told["chained_lsn"]) == (stranded[-1].lsn, stranded[0].lsn - 2)
    entries = await chains.sound("acme")
    assert numbers(entries) == list(range(STRANDED + 2))
    assert [entry["t_hlc"] for entry in entries[2:]] == [receipt.hlc for receipt in stranded[1:]]
    assert numbers(await chains.sound("beta")) == [0]


async def test_a_position_that_is_right_is_believed_and_one_that_lags_doubles_nothing(
    run_node: RunNode, settings: Settings, stranded: list[Receipt], superuser: asyncpg.Connection, chains: Chains
) -> None:
    async with run_node(settings) as service:
        await until(lambda: service.node.chained.lsn >= stranded[-1].lsn, "the backlog drains")
        await until(chains.key_recorded, "the node has recorded its key")
    before = {tenant: await chains.sound(tenant) for tenant in await chains.tenants()}
    # A process that was killed leaves a control file that lags: all since is looked up, and found.
    changed_control(settings, chained_lsn=1, signed_lsn=0)
    with structlog.testing.capture_logs() as logs:
        async with run_node(settings) as service:
            assert service._started.recovered == []
    assert "chained_position_not_borne_out" not in [entry["event"] for entry in logs]
    # A lower position than the truth, above what the control file knows.
    changed_control(settings, chained_lsn=1, signed_lsn=0)
    await superuser.execute("UPDATE scheduler.wal_positions SET chained_lsn = 2")
    async with run_node(settings) as service:
        last_lsn = service._started.wal.last_lsn
        assert [pending.lsn for pending in service._started.recovered] == list(range(3, last_lsn + 1))
        await until(lambda: service.node.chained.lsn >= last_lsn, "the backlog drains")
    assert {tenant: await chains.sound(tenant) for tenant in await chains.tenants()} == before


@pytest.mark.parametrize("column", ["chained_lsn", "seen_durable_lsn"])
async def test_a_position_beyond_the_end_of_the_wal_is_refused_and_once_corrected_nothing_is_lost(
    run_node: RunNode,
    settings: Settings,
    stranded: list[Receipt],
    superuser: asyncpg.Connection,
    chains: Chains,
    column: str,
) -> None:
    claimed = await superuser.fetchval(f"SELECT {column} FROM scheduler.wal_positions")
    await superuser.execute(f"UPDATE scheduler.wal_positions SET {column} = {stranded[-1].lsn + 1000}")
    await assert_refused(run_node, settings, WalCorruptError, f"LSN {stranded[-1].lsn + 1000} is known to be durable")
    await superuser.execute(f"UPDATE scheduler.wal_positions SET {column} = {claimed}")
    async with run_node(settings) as service:
        await until(lambda: service.node.chained.lsn >= stranded[-1].lsn, "the backlog drains")
    assert numbers(await chains.sound("acme")) == list(range(STRANDED + 2))
