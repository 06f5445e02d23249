"""Records that are answered once they are chained come together before they are synced, and none is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.node.service import Service
from app.write.intake import coalescing
from app.write.intake.coalescing import WriteCoalescer
from ledger.errors import DurabilityTimeoutError, LedgerError, WalPoisonedError
from ledger.positions import Lsn
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import LOCAL, created
from tests.app.postgres_proxy import PostgresProxy
from tests.wal.logs import NODE, WAIT_S, WAL_ID, hlc_of, lsns_in, payload_of
from wal.format import QueuedRecord
from wal.group_commit import GroupCommit
from wal.log import Log


def record(lsn: int) -> QueuedRecord:
    return hlc_of(lsn), 1, payload_of(lsn)


class Node:
    """What a coalescer needs of one."""

    def __init__(self, folder: Path) -> None:
        log = Log(folder, node_id=NODE, wal_id=WAL_ID, epoch=1, next_lsn=1, segment_bytes=1 << 20)  # type: ignore[arg-type]
        self.writer = GroupCommit(log, on_failure=lambda _: None)
        self.is_chaining = False
        self.failures: list[LedgerError] = []
        self.seen: list[int] = []
        """How many records the WAL was given before each that came by ``come``."""
        self.coalescer = WriteCoalescer(self.writer, lambda: self.is_chaining, self.failures.append)

    async def has_synced(self, *batches: int) -> None:
        """So many records each, and nothing else."""
        await until(lambda: self.writer.durable_lsn == sum(batches), "they are synced")
        assert [batch.entries for batch in self.writer.take_durable()] == list(batches)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.writer.close(WAIT_S)


async def test_what_comes_in_one_turn_of_the_loop_is_one_batch(node: Node) -> None:
    assert [node.coalescer.append_until_chained(record(lsn)) for lsn in (1, 2, 3)] == [1, 2, 3]
    assert (node.writer.next_lsn, node.coalescer.next_lsn) == (1, 4)
    await node.has_synced(3)


async def test_while_a_transaction_is_under_way_records_wait_for_its_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coalescing, "GATHER_S", 3600)
    node.is_chaining = True
    for lsn in range(1, 6):
        node.coalescer.append_until_chained(record(lsn))
        await asyncio.sleep(0)
    assert node.writer.next_lsn == 1
    node.is_chaining = False
    node.coalescer.chained()
    await node.has_synced(5)
    node.coalescer.append_until_chained(record(6))
    await until(lambda: node.writer.durable_lsn == 6, "the next need not wait")


async def chain(node: Node, first: int, last: int) -> None:
    """A transaction begins, with those that wait; these records come while it is under way, and it ends."""
    node.coalescer.flush()
    await until(lambda: node.writer.durable_lsn == first - 1, "they are synced")
    node.is_chaining = True
    for lsn in range(first, last + 1):
        node.coalescer.append_until_chained(record(lsn))
    node.is_chaining = False
    node.coalescer.chained()


async def test_at_the_end_of_a_transaction_as_many_are_awaited_as_were_in_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coalescing, "GATHER_S", 3600)
    monkeypatch.setattr(coalescing, "RETURN_PART", 1e12)
    for lsn in (1, 2, 3):
        node.coalescer.append_until_chained(record(lsn))
    await chain(node, 4, 5)
    for lsn in (6, 7):
        node.coalescer.append_until_chained(record(lsn))
        await asyncio.sleep(0)
    assert node.writer.next_lsn == 4, "one more is to come back"
    node.coalescer.append_until_chained(record(8))
    assert node.writer.next_lsn == 9
    await node.has_synced(3, 5)


async def test_those_who_do_not_come_back_are_not_waited_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalescing, "GATHER_S", 3600)
    node.coalescer.append_until_chained(record(1))
    await chain(node, 2, 3)
    await node.has_synced(1, 2)


async def test_nobody_is_awaited_behind_a_transaction_that_answers_nobody(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coalescing, "GATHER_S", 3600)
    monkeypatch.setattr(coalescing, "RETURN_PART", 1e12)
    await chain(node, 1, 2)
    assert node.writer.next_lsn == 3
    node.coalescer.chained()
    node.is_chaining = True
    node.coalescer.append_until_chained(record(3))
    node.coalescer.chained()
    assert node.writer.next_lsn == 4, "those of the first were answered before"


async def test_none_waits_long_for_a_transaction_that_does_not_end(node: Node) -> None:
    node.is_chaining = True
    node.coalescer.append_until_chained(record(1))
    node.coalescer.append_until_chained(record(2))
    await node.has_synced(2)


async def test_a_record_that_is_answered_before_it_is_chained_goes_at_once_behind_those_that_wait(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(coalescing, "GATHER_S", 3600)
    node.is_chaining = True
    assert node.coalescer.append_until_chained(record(1)) == 1
    assert node.coalescer.append_all([record(2), record(3)]) == 2
    await until(lambda: node.writer.durable_lsn == 3, "all are synced")
    assert node.coalescer.append_until_chained(record(4)) == 4
    node.coalescer.flush()
    node.writer.close(WAIT_S)
    assert lsns_in(tmp_path) == [1, 2, 3, 4]


def come(node: Node, lsn: int, last: int) -> None:
    """A record that somebody waits for, and another in each turn of the loop behind this one, up to ``last``."""
    if lsn < last:
        asyncio.get_running_loop().call_soon(come, node, lsn + 1, last)
    node.seen.append(node.writer.next_lsn - 1)
    assert node.coalescer.append_until_durable(record(lsn)) == lsn


async def test_records_that_are_waited_for_go_together_while_each_turn_of_the_loop_brings_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coalescing, "COMPANY_S", 3600)
    come(node, 1, 5)
    await until(lambda: node.writer.durable_lsn == 5, "they are synced")
    assert node.seen == [0] * 5
    come(node, 6, 6)
    await asyncio.sleep(0)
    assert node.writer.next_lsn == 7, "alone it waits for one turn"


@pytest.mark.parametrize(("name", "most"), [("COMPANY_S", -1), ("COMPANY_ENTRIES", 2)])
async def test_they_go_when_they_are_many_or_have_waited_for_long(
    node: Node, monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setattr(coalescing, name, most)
    come(node, 1, 9)
    await until(lambda: node.writer.durable_lsn == 9, "all are synced")
    assert node.seen == [0, 0, 2, 2, 4, 4, 6, 6, 8]


async def test_what_is_waited_for_takes_along_what_waits_for_a_transaction(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coalescing, "GATHER_S", 3600)
    node.is_chaining = True
    node.coalescer.append_until_chained(record(1))
    come(node, 2, 2)
    await node.has_synced(2)


async def test_what_the_wal_does_not_take_any_more_fails_the_node(node: Node) -> None:
    node.coalescer.append_until_chained(record(1))
    node.writer.close(WAIT_S)
    await until(lambda: node.failures, "it is told")
    assert isinstance(node.failures[0], WalPoisonedError)


# --- a node -------------------------------------------------------------------------------------------


@pytest.fixture
def forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end of a transaction releases the records that wait for it."""
    monkeypatch.setattr(coalescing, "GATHER_S", 3600)


def syncs(service: Service) -> float:
    count = service.metrics.registry.get_sample_value("wal_batch_entries_count")
    assert count is not None
    return count


async def test_what_waits_behind_a_transaction_is_synced_at_its_end_and_chained_by_the_next(
    run_node: RunNode, proxy: PostgresProxy, chains: Chains, forever: None
) -> None:
    async with run_node(url=proxy.url) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await service.key_changes.recorded.wait()
        await until(lambda: not service.appender.is_chaining, "nothing is under way")
        proxy.stall()
        first = asyncio.create_task(service.submitter.submit(created("acme", 1), key=None))
        await until(lambda: service.appender.is_chaining, "the first is being chained")
        synced_lsn, before = service.writer.durable_lsn, syncs(service)
        rest = [asyncio.create_task(service.submitter.submit(created("acme", n), key=None)) for n in range(2, 30)]
        await until(lambda: service.coalescer.next_lsn == synced_lsn + 29, "the others were taken")
        assert service.writer.next_lsn == synced_lsn + 1
        proxy.resume()
        await first
        receipts = await asyncio.gather(*rest)
        assert service.node.durable.lsn >= receipts[-1].lsn
        assert syncs(service) == before + 1
        assert len(await chains.sound("acme")) == 30


async def test_an_event_that_is_answered_at_local_does_not_wait_for_a_transaction(
    run_node: RunNode, proxy: PostgresProxy, forever: None
) -> None:
    async with run_node(url=proxy.url) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await service.key_changes.recorded.wait()
        await until(lambda: not service.appender.is_chaining, "nothing is under way")
        proxy.stall()
        waiting = [asyncio.create_task(service.submitter.submit(created("acme", 1), key=None))]
        await until(lambda: service.appender.is_chaining, "the first is being chained")
        waiting.append(asyncio.create_task(service.submitter.submit(created("acme", 2), key=None)))
        receipt = await service.submitter.submit(created("acme", 3, durability=LOCAL), key=None)
        assert service.node.durable.lsn >= receipt.lsn
        proxy.resume()
        await asyncio.gather(*waiting)


async def test_what_waits_when_the_node_stops_is_in_its_wal(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy, chains: Chains, forever: None
) -> None:
    settings = make_settings(shutdown_grace="1s")
    async with run_node(settings, url=proxy.url) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await service.key_changes.recorded.wait()
        await until(lambda: not service.appender.is_chaining, "nothing is under way")
        proxy.stall()
        waiting = [asyncio.create_task(service.submitter.submit(created("acme", 1), key=None))]
        await until(lambda: service.appender.is_chaining, "the first is being chained")
        waiting.append(asyncio.create_task(service.submitter.submit(created("acme", 2), key=None)))
        await until(lambda: service.coalescer.next_lsn == service.writer.next_lsn + 1, "the second waits")
        last_lsn = Lsn(service.coalescer.next_lsn - 1)
    assert service.writer.durable_lsn == last_lsn
    for told in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(told, DurabilityTimeoutError)
    proxy.resume()
    async with run_node(settings) as service:
        await until(lambda: service.node.chained.lsn >= last_lsn, "what the WAL holds is chained")
    assert len(await chains.sound("acme")) == 3
