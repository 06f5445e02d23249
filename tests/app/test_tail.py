"""The tail of a chain: who reads from a position sees every entry once, in order, as the chain's list has it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import orjson
import pytest

from app.node.service import Service
from app.runtime.answers import json_bytes
from app.runtime.sharing import BUSY, IDLE, Share
from app.share.watch import tail as tail_module
from app.share.watch.blocks import WatchedEntry
from app.store import chain_reads
from app.store.reading import reading
from ledger.errors import ChainDamagedError, TenantNotFoundError
from tests.app.chain_builder import edit
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import LOCAL, accepted, completed, created, progressed
from tests.app.postgres_proxy import PostgresProxy
from tests.app.shared import Shared


async def write(service: Service, tenant_id: str, numbers: Iterable[int]) -> None:
    """Jobs of the tenant, of these numbers, chained."""
    await asyncio.gather(*(service.submitter.submit(created(tenant_id, n), key=None) for n in numbers))


async def read(service: Service, tenant_id: str, upto_seq: int, after_seq: int = 0) -> list[WatchedEntry]:
    """What one who keeps his position reads of the tail, up to ``upto_seq``."""
    found: list[WatchedEntry] = []
    async with service.tails.watching(tenant_id) as tail:
        while after_seq < upto_seq:
            await tail.grown_beyond(after_seq)
            block = tail.after(after_seq) or await service.tails.page(tail, after_seq, with_dcs=False)
            found += [entry for entry in block.entries if entry.seq > after_seq]
            after_seq = block.last_seq
    return found


async def listed(service: Service, tenant_id: str) -> list[object]:
    """The tenant's entries as they are listed."""
    async with reading(service._pool) as connection:
        entries, more = await chain_reads.list_entries(connection, tenant_id, 1, 1000)
    assert not more
    return [orjson.loads(json_bytes(entry.as_listed())) for entry in entries]


def data_of(entries: Iterable[WatchedEntry]) -> list[object]:
    return [orjson.loads(entry.event.partition(b"\ndata: ")[2]) for entry in entries]


async def test_a_reader_sees_each_entry_once_while_it_is_written(shared: Shared, tenant: str) -> None:
    await write(shared.service, tenant, range(3))
    reader = asyncio.create_task(read(shared.service, tenant, 120))
    for n in range(3, 120, 13):
        await write(shared.service, tenant, range(n, min(n + 13, 120)))
    found = await reader
    assert data_of(found) == await listed(shared.service, tenant)
    assert [entry.event.split(b"\n")[:2] for entry in found[:2]] == [
        [b"id: 1", b"event: ENQUEUE"],
        [b"id: 2", b"event: ENQUEUE"],
    ]


async def test_what_this_node_chained_is_not_read_back(
    shared: Shared, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(shared.service, tenant, range(3))
    async with shared.service.tails.watching(tenant) as tail:
        await tail.grown_beyond(2)

        async def no_reads(*_: object) -> None:
            raise AssertionError("an entry was read from the log")

        monkeypatch.setattr(chain_reads, "list_entries", no_reads)
        await write(shared.service, tenant, range(3, 30))
        assert [entry.seq for entry in await read(shared.service, tenant, 30, after_seq=3)] == [*range(4, 31)]


async def test_readers_at_two_nodes_see_what_both_write(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    async with run_node(make_settings("one")) as one, run_node(make_settings("two")) as two:
        await write(one, "acme", range(1))
        readers = [asyncio.create_task(read(node, "acme", 101)) for node in (one, two)]
        for n in range(1, 101, 10):
            await asyncio.gather(write(one, "acme", range(n, n + 5)), write(two, "acme", range(n + 5, n + 10)))
        for reader in readers:
            assert data_of(await reader) == await listed(one, "acme")
    assert {entry["hlc_node"] for entry in await chains.sound("acme")} == {one.node.node_id, two.node.node_id}


async def test_what_the_tail_no_longer_keeps_is_read_from_the_log(
    shared: Shared, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "TAIL_BYTES_MAX", 4000)
    monkeypatch.setattr("app.share.watch.blocks.BLOCK_BYTES_MAX", 2000)
    await write(shared.service, tenant, range(1))
    async with shared.service.tails.watching(tenant) as tail:
        await write(shared.service, tenant, range(1, 200))
        await tail.grown_beyond(199)
        assert tail.first_seq > 190
        assert data_of(await read(shared.service, tenant, 200)) == await listed(shared.service, tenant)
        assert [entry.seq for entry in await read(shared.service, tenant, 200, after_seq=150)] == [*range(151, 201)]


async def test_rows_that_wait_for_the_tail_have_a_bound(
    shared: Shared, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "ROWS_BYTES_MAX", 500)
    await write(shared.service, tenant, range(1))
    reader = asyncio.create_task(read(shared.service, tenant, 151))
    await write(shared.service, tenant, range(1, 151))
    assert [entry.seq for entry in await reader] == [*range(1, 152)]


async def test_a_chain_that_nobody_watches_costs_nothing(shared: Shared, tenant: str) -> None:
    await write(shared.service, tenant, range(2))
    assert len(await read(shared.service, tenant, 2)) == 2
    assert not shared.service.tails._tails
    assert not shared.service.tails._tails
    with pytest.raises(TenantNotFoundError):
        async with shared.service.tails.watching("nobody"):
            pass


async def test_an_entry_that_somebody_removed_ends_the_tail(shared: Shared, tenant: str) -> None:
    await write(shared.service, tenant, range(3))
    await edit(shared.superuser, "DELETE FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = 2", tenant)
    with pytest.raises(ChainDamagedError, match="seq 2 is missing"):
        await read(shared.service, tenant, 3)
    assert not shared.service.tails._tails


async def test_a_database_that_was_away_leaves_no_gap(
    run_node: RunNode, proxy: PostgresProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "RETRY_PAUSE_S", 0.05)
    async with run_node(url=proxy.url) as service:
        await write(service, "acme", range(3))
        reader = asyncio.create_task(read(service, "acme", 43))
        await until(lambda: service.tails._tails, "the reader is there")
        await proxy.refuse()
        drafts = [created("acme", n, durability=LOCAL) for n in range(3, 43)]
        await asyncio.gather(*(service.submitter.submit(draft, key=None) for draft in drafts))
        await until(lambda: service.tails.last_error is not None, "the tail has met it")
        await proxy.accept()
        found = await reader
        assert data_of(found) == await listed(service, "acme")
        assert service.tails.last_error is None


async def test_entries_say_which_data_centres_they_concern(shared: Shared, tenant: str) -> None:
    job = await shared.service.submitter.submit(created(tenant, 1), key=None)
    for dc in ("a", "b"):
        await shared.service.submitter.submit(accepted(tenant, job.job_id, dc), key=None)
    await shared.service.submitter.submit(progressed(tenant, job.job_id, 1), key=None)
    await shared.service.submitter.submit(completed(tenant, job.job_id), key=None)
    async with shared.service.tails.watching(tenant, with_dcs=True) as tail:
        await tail.grown_beyond(4)
        block = await shared.service.tails.page(tail, 0, with_dcs=True)
        assert block is not None
        found = [(entry.action, sorted(entry.dcs or ())) for entry in block.entries]
    assert found == [
        ("ENQUEUE", ["a", "b"]),
        ("DEQUEUE", ["a"]),
        ("DEQUEUE", ["b"]),
        ("EXECUTE", ["dc1"]),
        ("COMPLETE", ["a", "b"]),
    ]


# --- the share of the event loop --------------------------------------------------------------------


async def test_turns_come_in_the_order_of_asking() -> None:
    share, order = Share(), []

    async def take(n: int) -> None:
        await share.turn()
        order.append(n)

    running = asyncio.create_task(share.run())
    await asyncio.gather(*(take(n) for n in range(100)))
    assert order == [*range(100)]
    running.cancel()


@pytest.mark.parametrize("is_busy", [False, True])
async def test_turns_take_their_share_of_the_time_and_no_more(is_busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who works in turns of a millisecond comes to his share; while others work, to the smaller one."""
    share = Share()
    tasks = [asyncio.create_task(share.run())]

    def work(seconds: float) -> None:
        until_s = time.thread_time() + seconds
        while time.thread_time() < until_s:
            pass

    async def others() -> None:
        while True:
            work(0.005)
            await asyncio.sleep(0.002)

    if is_busy:
        tasks.append(asyncio.create_task(others()))
        await share.turn()
    began_s, turns = time.perf_counter(), 20 if is_busy else 100
    for _ in range(turns):
        await share.turn()
        work(0.001)
        share.spent(0.001)
    took_s = time.perf_counter() - began_s
    assert turns * 0.001 / took_s <= (BUSY if is_busy else IDLE) * 1.1
    for task in tasks:
        task.cancel()
