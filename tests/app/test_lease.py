"""Leases on logs: in PostgreSQL, and in a real etcd."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import asyncpg
import httpx
import pytest
from structlog.testing import capture_logs

from app.dev.cluster import free_port
from app.node.lease import EtcdLeases, Lease, Leases, holder_of
from app.runtime.metrics import Metrics
from app.runtime.postgres import DATABASE_FAULTS
from app.store.node import PostgresLeases
from ledger.errors import LedgerError
from tests.app.chains import until
from tests.app.postgres_proxy import proxy_to
from tests.conftest import Database

TTL_S = 4.0


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[str]:
    """The URL of an etcd of one member."""
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    process = await asyncio.create_subprocess_exec(
        "etcd",
        *("--data-dir", str(tmp_path / "etcd"), "--log-level", "error"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"default={peer}"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    async def answers() -> bool:
        async with httpx.AsyncClient(trust_env=False) as http:
            with suppress(httpx.HTTPError):
                return (await http.get(f"{client}/health")).status_code == 200
        return False

    try:
        await until(answers, "etcd answers")
        yield client
    finally:
        process.kill()
        await process.wait()


@pytest.fixture(params=["postgres", "etcd"])
def leases(request: pytest.FixtureRequest) -> Leases:
    if request.param == "etcd":
        return EtcdLeases(["http://127.0.0.1:1", request.getfixturevalue("etcd")], None)
    database: Database = request.getfixturevalue("database")
    return PostgresLeases(database.service_url)


class Suspended:
    """A clock that a test moves on, as it is after the machine slept: the loop's clock knows nothing of that."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def lease(leases: Leases, holder: str, run: str) -> Lease:
    return Lease(leases, "node-a", holder, run, TTL_S, DATABASE_FAULTS)


async def test_a_lease_is_waited_for_until_it_runs_out(leases: Leases) -> None:
    await lease(leases, "one", "run-1").take()
    held = await leases.take("node-a", "two", "run-2", TTL_S)
    assert (held.holder, held.run) == ("one", "run-1")
    assert 0 <= held.left_s <= TTL_S
    await asyncio.wait_for(lease(leases, "two", "run-2").take(), 60)
    assert not await leases.renew("node-a", "run-1", TTL_S)


async def test_who_keeps_it_keeps_it_and_who_lost_it_learns_that(leases: Leases) -> None:
    first = lease(leases, "one", "run-1")
    await first.take()
    lost: list[LedgerError] = []
    keeping = asyncio.create_task(first.keep(lost.append))
    waiting = asyncio.create_task(lease(leases, "two", "run-2").take())
    _, still = await asyncio.wait((waiting,), timeout=2 * TTL_S)
    assert still
    assert not lost
    await leases.take("node-a", "three", "run-3", TTL_S, seize=True)
    await asyncio.wait_for(keeping, 60)
    assert "lease of node-a" in str(lost[0])
    waiting.cancel()


async def test_a_lease_is_relied_on_for_a_ttl_from_before_it_was_asked_for_whatever_the_machine_slept(
    database: Database,
) -> None:
    clock = Suspended()
    async with proxy_to(database.service_url) as proxy:
        held = Lease(PostgresLeases(proxy.url), "node-a", "one", "run-1", TTL_S, DATABASE_FAULTS, now_s=clock)
        assert not held.is_held()
        proxy.stall()
        taking = asyncio.create_task(held.take())
        await asyncio.sleep(0)  # it is asked for
        clock.now += 1
        proxy.resume()
        await taking
        clock.now += TTL_S - 1.1
        assert held.is_held()
        clock.now += 0.1
        assert not held.is_held(), "the answer took a second of it"

        keeping = asyncio.create_task(held.keep(lambda error: pytest.fail(str(error))))
        await until(held.is_held, "it is renewed")
        clock.now += TTL_S
        assert not held.is_held()
        keeping.cancel()


async def test_a_lease_that_is_let_go_or_ones_own_is_had_at_once(leases: Leases) -> None:
    first = lease(leases, "one", "run-1")
    await first.take()
    await lease(leases, "one", "run-2").take()
    await first.release()
    assert (await leases.take("node-a", "two", "run-3", TTL_S)).run == "run-2", "it was not his to release any more"
    second = lease(leases, "one", "run-2")
    await second.release()
    assert (await leases.take("node-a", "two", "run-3", TTL_S)).run == "run-3"


async def test_who_waits_goes_on_waiting_while_none_can_be_asked(database: Database) -> None:
    leases = PostgresLeases(database.service_url)
    await lease(leases, "one", "run-1").take()

    def told(event: str) -> bool:
        return any(line["event"] == event for line in lines)

    async with proxy_to(database.service_url) as proxy:
        with capture_logs() as lines:
            waiting = asyncio.create_task(lease(PostgresLeases(proxy.url), "two", "run-2").take())
            await until(lambda: told("wal_lease_waiting"), "it waits")
            await proxy.refuse()
            await until(lambda: told("wal_lease_not_asked"), "it cannot ask")
            assert not waiting.done()
            await leases.release("node-a", "run-1")
            await proxy.accept()
            await asyncio.wait_for(waiting, 60)


async def test_a_postgres_that_was_away_gives_a_standby_no_lease_that_its_holder_renews_then(
    database: Database, superuser: asyncpg.Connection
) -> None:
    ttl_s = 5.0
    async with proxy_to(database.service_url) as near_writer, proxy_to(database.service_url) as near_standby:
        writer = Lease(PostgresLeases(near_writer.url), "node-a", "one", "run-1", ttl_s, DATABASE_FAULTS)
        standby = Lease(PostgresLeases(near_standby.url), "node-a", "two", "run-2", ttl_s, DATABASE_FAULTS)
        await writer.take()
        lost: list[LedgerError] = []
        keeping = asyncio.create_task(writer.keep(lost.append))

        def told(event: str) -> int:
            return sum(line["event"] == event for line in lines)

        async def has_run_out() -> bool:
            return bool(await superuser.fetchval("SELECT expires_at < clock_timestamp() FROM scheduler.wal_leases"))

        with capture_logs() as lines:
            waiting = asyncio.create_task(standby.take())
            await until(lambda: told("wal_lease_waiting") == 1, "the standby waits")
            await near_writer.refuse()
            await near_standby.refuse()
            await until(has_run_out, "the lease ran out")
            await near_standby.accept()
            await until(lambda: told("wal_lease_waiting") == 2 or waiting.done(), "the standby asks again")
            assert not waiting.done()
            await near_writer.accept()

            async def is_renewed() -> bool:
                return not await has_run_out()

            await until(is_renewed, "the writer renews it")
            assert not waiting.done()
            await near_writer.refuse()
            await asyncio.wait_for(waiting, 60)  # a writer that is away alone loses it
            await near_writer.accept()
            await asyncio.wait_for(keeping, 60)
        assert len(lost) == 1


async def test_it_is_measured_whether_the_lease_is_renewed(database: Database) -> None:
    metrics = Metrics()
    async with proxy_to(database.service_url) as proxy:
        held = lease(PostgresLeases(proxy.url), "one", "run-1")
        metrics.read(lambda: {"wal_lease_reached": held.is_reached})
        await held.take()
        lost: list[LedgerError] = []
        keeping = asyncio.create_task(held.keep(lost.append))
        assert b"\nwal_lease_reached 1.0\n" in metrics.render()[0]
        await proxy.refuse()
        await until(lambda: b"\nwal_lease_reached 0.0\n" in metrics.render()[0], "it cannot be renewed")
        await proxy.accept()
        await until(lambda: b"\nwal_lease_reached 1.0\n" in metrics.render()[0], "it is renewed again")
        assert not lost
        keeping.cancel()


async def test_where_none_can_be_asked_that_is_said() -> None:
    for leases in (EtcdLeases(["http://127.0.0.1:1"], None), PostgresLeases("postgresql://nobody@127.0.0.1:1/x")):
        with pytest.raises(DATABASE_FAULTS):
            await leases.take("node-a", "one", "run-1", TTL_S)


def test_every_run_on_a_folder_is_one_holder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert holder_of(tmp_path / "a") == holder_of(tmp_path / "a") != holder_of(tmp_path / "b")
