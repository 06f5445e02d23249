"""Readers of a chain while its rows leave: each answers for one state, or says where the entries are. None takes what
left for damage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.edge.writes import ProposalWrites
from app.read import full_walk
from app.read.consistency import Promise, ReadLevel
from app.read.folded_jobs import JobTableWalk
from app.read.full_walk import FullWalk
from app.read.jobs import JobReader
from app.read.verification import ChainVerifier
from app.runtime.principals import EVERYBODY
from app.share.bundle.export import BundleExporter
from app.share.bundle.receipts import ReceiptMaker
from app.share.watch import Watcher, Watchers, tail
from app.share.watch.blocks import EVERYTHING
from app.share.webhooks import WebhookRegistry, new_webhook
from app.store import Connection
from app.store.chain_reader import consistent_reader
from app.store.chaining import read_heads
from app.store.entry_check import EntryCheck
from app.store.jobs import table as job_table
from app.store.jobs.order import ListRange
from app.write.chain.commitments import CommitmentMemory
from ledger.bundle.format import EVIDENCE
from ledger.errors import ArchivedError
from ledger.machines.job_search import JobFilter
from ledger.verification import verify
from ledger.verification.verdict import Break
from signing.judging import verify_file
from signing.keys import Keyring
from tests.app.bundles import statement_of
from tests.app.chains import until
from tests.app.drafts import completed, created, progressed
from tests.app.receiver import receiving
from tests.app.test_prunes import JOBS, TENANT, Running, RunSite, fill, run, signed, steps
from tests.app.test_webhooks import LOOPBACK

__all__ = ["run"]

LEFT = 2 * JOBS
"""Entries that leave with ``prune``."""
NOW = Promise(ReadLevel.EVENTUAL, (), 0)


async def prune(node: Running, to_seq: int = LEFT) -> None:
    """Let all jobs leave, or entries up to a seq."""
    assert (await node.prunes.prune(TENANT, to_seq, "ops")).seq is not None
    await node.removed(to_seq)


def assert_no_break(node: Running) -> None:
    assert node.service.breaks.of_tenant(TENANT) == []


async def may_watch() -> bool:
    return True


def watching(node: Running, after_seq: int | None) -> Any:
    watchers: Watchers = node.services[Watchers]
    return watchers.open(TENANT, EVERYTHING, after_seq, None, may_watch)


async def next_piece(watcher: Watcher) -> bytes:
    async with asyncio.timeout(60):
        piece = await watcher.next()
    watcher.sent()
    return piece


async def test_a_watcher_of_old_entries_is_told_that_it_lags(run: RunSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "ENTRIES_BEFORE", 0)
    monkeypatch.setattr(tail, "PAGE_ENTRIES", 4)
    async with run() as node:
        await fill(node)
        async with watching(node, 0) as watcher:
            assert (await next_piece(watcher)).count(b"event: ") == 4
            await prune(node)
            assert (await next_piece(watcher)).startswith(b'event: lagged\ndata: {"from_seq":5,')
            assert await next_piece(watcher) == b""
        assert_no_break(node)


async def test_a_watch_that_begins_behind_what_left_goes_on(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        await prune(node)
        async with watching(node, None) as watcher:
            await node.service.submitter.submit(created(TENANT, 99), key=None)
            assert b"event: ENQUEUE" in await next_piece(watcher)
        assert_no_break(node)


async def test_a_watch_whose_tail_comes_too_late_ends_without_damage(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        reads = node.service.tails._reads
        for _ in range(tail.READS_MAX):
            await reads.acquire()
        async with watching(node, None) as watcher:
            await prune(node)
            for _ in range(tail.READS_MAX):
                reads.release()
            assert await next_piece(watcher) == b""
        assert_no_break(node)
        async with watching(node, None) as watcher:
            await node.service.submitter.submit(created(TENANT, 99), key=None)
            assert b"event: ENQUEUE" in await next_piece(watcher)


# --- bundles, receipts, verification --------------------------------------------------------------


async def bundle_of(node: Running, path: Path, meanwhile: Callable[[], Awaitable[None]]) -> Path:
    """An export from seq 1 on, with something happening once it has begun."""
    exporter: BundleExporter = node.services[BundleExporter]
    async with aclosing(exporter.export(TENANT, 1)) as pieces:
        written = await anext(pieces)
        await meanwhile()
        written += b"".join([piece async for piece in pieces])
    path.write_bytes(written)
    return path


async def test_an_export_that_has_begun_is_of_the_state_that_it_began_with(run: RunSite, tmp_path: Path) -> None:
    async with run() as node:
        await fill(node)
        path = await bundle_of(node, tmp_path / "bundle.tar", lambda: prune(node))
        found = await verify_file(path, await node.service.trust.keyring())
        assert (found.verdict["valid"], found.verdict["from_seq"]) == (True, 1), found.verdict
        assert found.verdict["entries_checked"] >= LEFT
        assert_no_break(node)


async def test_evidence_of_a_chain_that_was_pruned_names_no_gap(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        await prune(node)
        node.service.breaks.report(TENANT, Break(LEFT + 1, "link", "reported by a test"), "test")
        exporter: BundleExporter = node.services[BundleExporter]
        for from_seq in (None, 1, LEFT + 2):
            async with aclosing(exporter.evidence(TENANT, from_seq)) as pieces:
                written = b"".join([piece async for piece in pieces])
            breaks = statement_of(written, EVIDENCE)["predicate"]["breaks"]
            assert [each["kind"] for each in breaks] == ["link"], breaks


async def test_a_receipt_of_an_entry_that_leaves_before_it_is_read_says_where_it_is(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        maker: ReceiptMaker = node.services[ReceiptMaker]

        async def published_late(tenant_id: str) -> Keyring:
            await prune(node)
            return await maker.published(tenant_id)

        late = replace(maker, published=published_late)
        with pytest.raises(ArchivedError, match="entries up to seq 20"):
            await late.of_entry(TENANT, 5, None)
        assert_no_break(node)


async def test_a_verification_is_of_the_state_that_it_began_with(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        pool = node.service._pool
        async with pool.acquire() as connection, consistent_reader(connection, TENANT) as reader:
            assert await reader.head() is not None
            await prune(node)
            verdict = await verify(reader, tenant_id=TENANT)
        assert (verdict.first_break, verdict.from_seq, verdict.floor) == (None, 1, None)


async def test_a_range_that_left_is_not_verified_as_if_it_were_there(run: RunSite) -> None:
    async with run() as node:
        await fill(node)
        await prune(node)
        verifier: ChainVerifier = node.services[ChainVerifier]
        with pytest.raises(ArchivedError) as raised:
            await verifier.full(TENANT, 1, LEFT)
        assert raised.value.verified_from_seq == LEFT + 1
        verdict = (await verifier.full(TENANT, 1, LEFT + 1)).verdict
        assert (verdict.is_valid, verdict.from_seq, verdict.entries_checked) == (True, LEFT + 1, 1)


async def test_all_readers_find_no_break_while_rows_leave_step_by_step(run: RunSite, tmp_path: Path) -> None:
    async with run() as node:
        await fill(node)
        node.prunes.wake_removal = lambda: None
        place = await node.prunes.prune(TENANT, LEFT, "ops")
        await until(lambda: signed(node, place.seq or 0), "the entry is signed")
        for _ in range(JOBS):
            removing = asyncio.create_task(steps(node, 1))
            assert await node.is_valid()
            page = await node.services[JobReader].list(TENANT, NOW, JobFilter(), ListRange(), 100)
            assert page.damaged == []
            await removing
        assert await node.first_seq() == LEFT + 1
        assert_no_break(node)


async def test_a_walk_whose_range_leaves_goes_on_behind_it(run: RunSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_walk, "RANGE_ENTRIES", 5)
    monkeypatch.setattr(full_walk, "SHARE", 1.0)
    async with run(verify={"on_start": False, "full_interval": "24h"}) as node:
        await fill(node)
        verifier: ChainVerifier = node.services[ChainVerifier]
        again, ranges = verifier.again, list[tuple[int | None, int | None]]()

        async def leaving_meanwhile(tenant_id: str, *args: Any, **named: Any) -> Any:
            if tenant_id == TENANT and args:
                ranges.append(args[:2])
                if len(ranges) == 2:
                    await prune(node)
            return await again(tenant_id, *args, **named)

        monkeypatch.setattr(verifier, "again", leaving_meanwhile)
        walk: FullWalk = node.services[FullWalk]
        done = walk.walks_done
        await walk._walk()
        assert ranges[0][0] == 1
        assert ranges[2][0] == LEFT + 1
        assert walk.walks_done == done + 1
        assert_no_break(node)


async def test_a_read_on_spark_whose_entries_leave_fails_and_a_stream_passes_nothing_over(run: RunSite) -> None:
    from pyspark.sql.types import StructType

    from pipeline.source.data_source import LedgerReader, LedgerStreamReader

    async with run() as node:
        options = {"dsn": node.service.database_url, "tenant": TENANT, "rows_a_piece": "8"}
        schema = StructType().add("tenant_id", "string").add("seq", "long")
        await fill(node)
        stream = LedgerStreamReader(options, schema)

        def rows_of(reader: LedgerReader, planned: list[Any]) -> int:
            return sum(batch.num_rows for each in planned for batch in reader.read(each))

        reader = LedgerReader(options, schema)
        planned = await asyncio.to_thread(reader.partitions)
        assert await asyncio.to_thread(rows_of, reader, planned) == LEFT + 1
        await prune(node)
        with pytest.raises(ArchivedError):
            await asyncio.to_thread(rows_of, reader, planned)
        # Planned anew, it begins where the chain does now; a stream that had begun before does not.
        again = await asyncio.to_thread(reader.partitions)
        assert await asyncio.to_thread(rows_of, reader, again) == 2
        with pytest.raises(ArchivedError):
            await asyncio.to_thread(stream.partitions, {TENANT: 5}, {TENANT: LEFT + 1})
        assert await asyncio.to_thread(stream.partitions, {}, {TENANT: LEFT + 1})


# --- jobs -----------------------------------------------------------------------------------------


LARGE = 2 * job_table.ENTRIES_MAX + 2 * JOBS
"""Entries of a job that is read by several statements."""


async def fill_large(node: Running) -> str:
    """``fill`` with one job of many entries; returns its id."""
    submitter = node.service.submitter
    job_id = (await submitter.submit(created(TENANT, 0), key=None)).job_id
    await asyncio.gather(*(submitter.submit(progressed(TENANT, job_id, done), key=None) for done in range(LARGE - 2)))
    await submitter.submit(completed(TENANT, job_id), key=None)
    await node.changes.set_policy(TENANT, 1, None, "ops")
    await node.service.notary.sign_now(TENANT)

    async def is_prunable() -> bool:
        return (await node.prunes.planner.plan(TENANT)).plan.to_seq >= LARGE

    await until(is_prunable, "the entries are old enough and archived")
    return job_id


async def test_a_job_that_leaves_between_two_statements_is_archived_and_not_damaged(run: RunSite) -> None:
    async with run() as node:
        job_id = await fill_large(node)
        check, meanwhile = node.service.job_folds.check, [lambda: prune(node, LARGE)]

        class CheckMeanwhile(EntryCheck):
            async def require(self, connection: Connection, tenant_id: str, rows: Sequence[tuple[Any, ...]]) -> None:
                while meanwhile:
                    await meanwhile.pop()()
                await check.require(connection, tenant_id, rows)

        node.service.job_folds._folds.clear()
        node.service.job_folds.check = CheckMeanwhile(lambda _: None)
        with pytest.raises(ArchivedError):
            await node.services[JobReader].read(TENANT, job_id, NOW, None)
        assert_no_break(node)


async def test_a_large_job_whose_beginning_left_is_compared_by_what_is_here(run: RunSite) -> None:
    async with run() as node:
        job_id = await fill_large(node)
        reader: JobReader = node.services[JobReader]
        assert (await reader.read(TENANT, job_id, NOW, None))["completed"] == LARGE - 3
        await prune(node, LARGE // 20 * 10)
        await node.services[JobTableWalk]._walk(TENANT)
        for tenant_id in (TENANT, None):
            with pytest.raises(ArchivedError):
                await reader.read(tenant_id, job_id, NOW, None)
        assert_no_break(node)


async def test_an_appender_that_was_behind_judges_by_what_is_carried_while_rows_leave(run: RunSite) -> None:
    async with run() as node:
        pool, proposals = node.service._pool, node.services[ProposalWrites].proposals
        memory = CommitmentMemory(node.service.entry_check, pool, floor_of=node.service.retention.commitments)

        async def cpu_of(name: str) -> int:
            async with pool.acquire() as connection:
                machines, _ = await memory.at(connection, await read_heads(connection, [TENANT]))
            capacity = machines[TENANT].state.nodes[name].capacity
            assert capacity is not None
            return capacity.cpu_millis

        async def set_cpu(name: str, cpu_millis: int) -> None:
            wanted = {"tenant_id": TENANT, "capacity": {"cpu_millis": cpu_millis}}
            await proposals.set_capacity(name, wanted, None)

        await set_cpu("n1", 1)
        assert await cpu_of("n1") == 1
        await set_cpu("n2", 2)
        await set_cpu("n1", 3)
        await fill(node)
        node.prunes.wake_removal = lambda: None
        place = await node.prunes.prune(TENANT, LEFT, "ops")
        await until(lambda: signed(node, place.seq or 0), "the entry is signed")
        # Entries 1 and 3 leave together, entry 2 is there.
        await steps(node, 1)
        assert (await cpu_of("n1"), await cpu_of("n2")) == (3, 2)


# --- webhooks -------------------------------------------------------------------------------------


async def test_a_webhook_that_was_stopped_says_where_what_it_missed_is(run: RunSite) -> None:
    async with receiving() as receiver, run(**LOOPBACK) as node:
        receiver.judge = lambda _: 410
        registry: WebhookRegistry = node.services[WebhookRegistry]
        webhook = new_webhook(TENANT, receiver.url, None, None, "standard")
        await registry.add(webhook, 1, EVERYBODY)
        await fill(node)

        async def state() -> str | None:
            (shown,) = await registry.listed(TENANT)
            return shown.last_error if shown.is_stopped else None

        await until(state, "the receiver is gone")
        await prune(node)
        with pytest.raises(ArchivedError):
            await registry.resume(webhook.webhook_id, EVERYBODY, with_dead_letters=False)
        with pytest.raises(ArchivedError):
            await registry.add(new_webhook(TENANT, receiver.url, None, None, "standard"), LEFT, EVERYBODY)
        # A row that says less than was delivered leads to no damage, and nothing is passed over.
        asked = len(receiver.requests)
        await node.superuser.execute("UPDATE scheduler.webhooks SET stopped_at = NULL, last_error = NULL")
        registry.deliveries.changed.set()
        said = await until(state, "it is stopped again")
        assert "entries up to seq 20 are in the archive" in said
        assert len(receiver.requests) == asked
        assert_no_break(node)
