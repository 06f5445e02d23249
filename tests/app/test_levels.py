"""Levels: an answer is given no earlier than what it says has happened, and what it waits for is not put off."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import asyncpg
import pytest

from app.node.service import Service
from app.node.start.quorum import quorum_survives
from app.write.followers import checkpoints
from ledger.errors import (
    DurabilityTimeoutError,
    WalPoisonedError,
)
from ledger.facts.events import Durability
from tests.app.chains import UNTIL_S, Chains, numbers, until, wal_of
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, LOCAL, created


async def test_nothing_is_said_to_be_durable_that_is_not_in_the_synced_file(
    service: Service, make_settings: MakeSettings
) -> None:
    settings = make_settings()

    async def write(worker: int) -> None:
        for n in range(25):
            receipt = await service.submitter.submit(created("acme", 100 * worker + n, durability=LOCAL), key=None)
            assert service.writer.durable_lsn >= receipt.lsn
            if n % 8 == 0:
                found = wal_of(settings, service, receipt.lsn)[-1]
                assert (found.lsn, found.hlc.text()) == (receipt.lsn, receipt.hlc)

    await asyncio.gather(*(write(worker) for worker in range(8)))


async def test_in_asynchronous_mode_nothing_is_claimed_at_local_and_all_is_chained_all_the_same(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    async with run_node(make_settings(wal={"ack_mode": "LOCAL_ASYNC"})) as service:
        receipts = [await service.submitter.submit(created("acme", n, durability=LOCAL), key=None) for n in range(20)]
        assert {(receipt.achieved, receipt.survives) for receipt in receipts} == {(Durability.NONE, ())}
        chained = await service.submitter.submit(created("acme", 20), key=None)
        assert (chained.achieved, chained.survives) == (GLOBAL, ("process",))
    assert numbers(await chains.sound("acme")) == list(range(21))


async def test_what_an_answer_survives_is_what_the_operator_said_of_postgres(
    run_node: RunNode, make_settings: MakeSettings
) -> None:
    async with run_node(make_settings(topology={"postgres_survives": "region"})) as service:
        local = await service.submitter.submit(created("acme", 1, durability=LOCAL), key=None)
        chained = await service.submitter.submit(created("acme", 2, durability=Durability.REGIONAL), key=None)
    assert local.survives == ("process",)
    assert chained.survives == ("process", "node", "region")
    assert chained.achieved is Durability.REGIONAL


@pytest.mark.parametrize(
    ("members", "survives"),
    [
        (["127.0.0.1:1", "localhost:2", "[::1]:3"], "process"),
        (["127.0.0.1:1", "127.0.0.1:2", "other:3"], "process"),
        (["127.0.0.1:1", "other:2", "third:3"], "node"),
        ([{"address": "127.0.0.1:1"}, {"address": "other:2", "region": "eu1"}], "process"),
    ],
)
def test_a_quorum_outlives_the_node_where_a_majority_of_its_voters_is_elsewhere(
    make_settings: MakeSettings, tmp_path: Path, members: list[object], survives: str
) -> None:
    files = {name: tmp_path / name for name in ("tls_cert", "tls_key", "tls_ca")}
    settings = make_settings(
        node_id="node-a", wal={"ack_mode": "REPLICATED_QUORUM"}, replication={"members": members, **files}
    )
    assert quorum_survives(settings) == survives


@pytest.fixture
def _wal_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are written by Python, whose calls a test can hold. Faults below the queue in C are those of strace, in
    ``tests/wal/test_faults.py`` and ``tests/crash``."""
    monkeypatch.setattr("wal.native._module", None)


@pytest.mark.usefixtures("_wal_in_python")
async def test_nothing_is_answered_or_chained_while_the_fsync_is_under_way(
    service: Service, chains: Chains, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.submitter.submit(created("acme", 0), key=None)
    await until(chains.key_recorded, "the node has recorded its key")
    sync, may_sync = os.fdatasync, threading.Event()

    def slow_sync(descriptor: int) -> None:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(checkpoints.NAME):
            assert may_sync.wait(UNTIL_S)
        sync(descriptor)

    monkeypatch.setattr("wal.log.os.fdatasync", slow_sync)
    try:
        answers = [
            asyncio.create_task(service.submitter.submit(created("acme", n, durability=level), key=None))
            for n, level in ((1, LOCAL), (2, GLOBAL))
        ]
        await until(lambda: service.writer.written_lsn > service.writer.durable_lsn, "the records are written")
        # Something else may wake the appender; and then Postgres answers several times.
        service.appender.wake()
        await service.notary.sign_now("acme")
        assert not any(answer.done() for answer in answers)
        assert service.node.durable.lsn < service.writer.written_lsn
        assert numbers(await chains.sound("acme")) == [0]
    finally:
        may_sync.set()
    for receipt in await asyncio.gather(*answers):
        assert service.writer.durable_lsn >= receipt.lsn
    await until(lambda: service.node.chained.lsn >= service.writer.durable_lsn, "all is chained")
    assert numbers(await chains.sound("acme")) == [0, 1, 2]


@pytest.mark.usefixtures("_wal_in_python")
async def test_after_a_failed_fsync_nothing_is_acknowledged_any_more_and_a_restart_recovers(
    run_node: RunNode, chains: Chains, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_node() as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await until(chains.key_recorded, "the node has recorded its key")

        def failing_sync(descriptor: int) -> None:
            raise OSError(errno.EIO, "the disk is gone")

        with monkeypatch.context() as broken:
            broken.setattr("wal.log.os.fdatasync", failing_sync)
            results = await asyncio.gather(
                *(
                    service.submitter.submit(created("acme", n, durability=level), key=None)
                    for n, level in ((1, LOCAL), (2, GLOBAL))
                ),
                return_exceptions=True,
            )
            assert [type(result).__name__ for result in results] == ["WalPoisonedError", "WalPoisonedError"]
            assert isinstance(service.node.failure, WalPoisonedError)
            assert service.lifecycle.stop_requested.is_set()
        for durability in (LOCAL, GLOBAL):
            with pytest.raises(WalPoisonedError):
                await service.submitter.submit(created("acme", 3, durability=durability), key=None)
    assert numbers(await chains.sound("acme")) == [0]
    async with run_node() as service:
        await service.submitter.submit(created("acme", 4), key=None)
    chained = numbers(await chains.sound("acme"))
    assert chained[0] == 0
    assert chained[-1] == 4
    assert chained[1:-1] in ([], [1], [1, 2])


async def test_what_nobody_waits_for_is_chained_together_and_at_once_when_somebody_does(
    service: Service, chains: Chains, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.submitter.submit(created("acme", 0), key=None)
    await until(chains.key_recorded, "the node has recorded its key")
    monkeypatch.setattr("app.write.chain.appender.COLLECT_S", 3600)
    for numbered in (range(1, 4), range(5, 8)):
        before = service.node.chained.lsn
        receipts = [await service.submitter.submit(created("acme", n, durability=LOCAL), key=None) for n in numbered]
        await service.notary.sign_now("acme")
        assert service.node.chained.lsn == before
        if numbered.start == 1:
            await service.submitter.submit(created("acme", 4), key=None)
        await service.node.chained.reached(receipts[-1].lsn, UNTIL_S)
    assert numbers(await chains.sound("acme")) == list(range(8))


async def test_a_full_batch_is_chained_though_nobody_waits(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    await service.submitter.submit(created("acme", 0), key=None)
    monkeypatch.setattr("app.write.chain.appender.COLLECT_S", 3600)
    monkeypatch.setattr("app.write.chain.appender.BATCH_ENTRIES_MAX", 3)
    for n in range(1, 7):
        await service.submitter.submit(created("acme", n, durability=LOCAL), key=None)
    # What the ledger writes about itself may have filled up the first batch.
    await until(lambda: len(service.backlog) < 3, "full batches are chained")


async def test_half_a_backlog_is_chained_though_nobody_waits(
    run_node: RunNode, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_node(make_settings(wal={"backlog_max_entries": 8})) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await service.key_changes.recorded.wait()
        await until(lambda: not len(service.backlog), "the backlog is empty")
        monkeypatch.setattr("app.write.chain.appender.COLLECT_S", 3600)
        for n in range(1, 9):
            await service.submitter.submit(created("acme", n, durability=LOCAL), key=None)
        await until(lambda: len(service.backlog) < 4, "what waits is chained")


async def test_a_stop_answers_who_waits_behind_one_who_has_left(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection[asyncpg.Record]
) -> None:
    async with run_node(make_settings(shutdown_grace="1s")) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        async with superuser.transaction():
            await superuser.execute("SELECT FROM scheduler.chain_heads FOR UPDATE")
            asked = [asyncio.create_task(service.submitter.submit(created("acme", n), key=None)) for n in (1, 2)]
            await until(lambda: len(service.backlog) >= len(asked), "both wait")
            asked[0].cancel()
            service.lifecycle.begin_stop()
            with pytest.raises(DurabilityTimeoutError, match="the service stops"):
                await asked[1]
