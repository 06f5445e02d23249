"""Submitting: order, what is known of jobs, turns and room."""

from __future__ import annotations

import asyncio
import json

import pytest

from app.edge.routes.events import lines_of
from app.node.service import Service
from app.runtime.sharing import LINES_PER_TURN
from app.write.pending.requests import Draft, EventLines, Receipt
from ledger.chain import record
from ledger.errors import (
    DatabaseUnavailableError,
    DurabilityTimeoutError,
    InvalidEventError,
    JobEndedError,
    JobNotFoundError,
    RecordTooLargeError,
    RequestTooLargeError,
    WalFullError,
    WalPoisonedError,
)
from ledger.facts.events import JOB_EVENTS
from ledger.hlc import Hlc
from tests.app.chains import UNTIL_S, Chains, numbers, until, wal_of
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, LOCAL, accepted, completed, created, progressed
from tests.app.postgres_proxy import PostgresProxy
from tests.app.shared import Shared
from tests.turns import counted_turns

# --- order ----------------------------------------------------------------------------------------


async def test_hlc_and_lsn_rise_together_and_the_chain_keeps_the_order_of_the_wal(shared: Shared, tenant: str) -> None:
    async def write(worker: int) -> list[Receipt]:
        receipts = []
        for n in range(20):
            job = await shared.service.submitter.submit(created(tenant, 100 * worker + n, durability=LOCAL), key=None)
            receipts.append(job)
            receipts.append(await shared.service.submitter.submit(accepted(tenant, job.job_id, "dc1"), key=None))
        return receipts

    written = await asyncio.gather(*(write(worker) for worker in range(16)))
    receipts = sorted((receipt for part in written for receipt in part), key=lambda receipt: receipt.lsn)
    hlcs = [Hlc.parse(receipt.hlc) for receipt in receipts]
    assert hlcs == sorted(set(hlcs))
    assert len({receipt.lsn for receipt in receipts}) == len(receipts) == 640

    await until(lambda: shared.service.node.chained.lsn >= shared.service.writer.durable_lsn, "all is chained")
    records = wal_of(shared.service.settings, shared.service, shared.service.writer.durable_lsn)
    assert [entry.lsn for entry in records] == list(range(1, len(records) + 1))
    assert [entry.hlc for entry in records] == sorted(entry.hlc for entry in records)
    in_wal = [entry.hlc.text() for entry in records if record.decode(entry.payload).tenant_id == tenant]
    in_chain = [entry["t_hlc"] for entry in await shared.chains.sound(tenant)]
    assert in_wal == in_chain
    assert in_wal == [receipt.hlc for receipt in receipts]


async def test_a_tenant_begins_with_an_entry_in_the_chain_of_the_system(shared: Shared, tenant: str) -> None:
    tenants = [f"{tenant}-{end}" for end in "ab"]
    submit = shared.service.submitter.submit
    await asyncio.gather(*(submit(created(each, n), key=None) for n in range(5) for each in tenants))
    begun = [entry["job_id"] for entry in await shared.chains.sound("_system") if entry["action"] == "TENANT_CREATED"]
    assert sorted(each for each in begun if each.startswith(f"tenant:{tenant}-")) == [
        f"tenant:{each}" for each in tenants
    ]
    assert sorted(numbers(await shared.chains.sound(tenants[0]))) == [0, 1, 2, 3, 4]


async def test_a_made_job_id_is_that_of_the_event_that_created_the_job(shared: Shared, tenant: str) -> None:
    receipt = await shared.service.submitter.submit(created(tenant, 1), key=None)
    hlc = Hlc.parse(receipt.hlc)
    assert receipt.job_id == f"local-{hlc.physical_ms}-{shared.service.node.gate}-{hlc.logical:05d}"


async def test_the_payload_is_canonical_with_the_fence_that_was_given_or_chosen(shared: Shared, tenant: str) -> None:
    job = await shared.service.submitter.submit(created(tenant, 1), key=None)
    fenced = accepted(tenant, job.job_id, "dc1")._replace(fence_token=7)
    receipts = [
        await shared.service.submitter.submit(draft, key=None) for draft in (fenced, fenced._replace(fence_token=None))
    ]
    assert [receipt.fence_token for receipt in (job, *receipts)] == [1, 7, 7]
    payloads = [entry["payload"] for entry in await shared.chains.sound(tenant)]
    assert payloads[0] == '{"fence_token":1,"spec":{"n":1},"type":"JobCreated"}'
    assert [json.loads(payload)["fence_token"] for payload in payloads] == [1, 7, 7]


# --- jobs -----------------------------------------------------------------------------------------


async def test_events_of_jobs_that_do_not_exist_or_have_ended_are_refused(run_node: RunNode, chains: Chains) -> None:
    async with run_node() as service:
        job = await service.submitter.submit(created("acme", 1), key=None)
        await service.submitter.submit(completed("acme", job.job_id), key=None)
        await service.key_changes.recorded.wait()
        next_lsn = service.writer.next_lsn
        with pytest.raises(JobNotFoundError):
            await service.submitter.submit(completed("acme", "nobody"), key=None)
        with pytest.raises(JobNotFoundError):
            await service.submitter.submit(progressed("beta", job.job_id, 1), key=None)
        with pytest.raises(JobEndedError):
            await service.submitter.submit(progressed("acme", job.job_id, 1), key=None)
        with pytest.raises(InvalidEventError) as refusal:
            await service.submitter.submit_lines(
                EventLines.of([created("acme", 2), progressed("acme", job.job_id, 1)]), durability=None, key=None
            )
        assert refusal.value.line == 2
        assert service.writer.next_lsn == next_lsn
    async with run_node() as service:
        with pytest.raises(JobEndedError):
            await service.submitter.submit(progressed("acme", job.job_id, 1), key=None)
    assert len(await chains.sound("acme")) == 2


async def test_a_job_that_waits_to_be_chained_exists_also_after_a_restart(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy, chains: Chains
) -> None:
    settings = make_settings(shutdown_grace="1s")
    async with run_node(settings, url=proxy.url) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await proxy.refuse()
        job = await service.submitter.submit(created("acme", 1, durability=LOCAL), key=None)
        await service.submitter.submit(progressed("acme", job.job_id, 1), key=None)
        ended = await service.submitter.submit(created("acme", 2, durability=LOCAL), key=None)
        await service.submitter.submit(completed("acme", ended.job_id, durability=LOCAL), key=None)
    async with run_node(settings) as service:
        await service.submitter.submit(progressed("acme", job.job_id, 2), key=None)
        with pytest.raises(JobEndedError):
            await service.submitter.submit(progressed("acme", ended.job_id, 2), key=None)
        await until(lambda: service.node.chained.lsn >= service.writer.durable_lsn, "all is chained")
    assert len(await chains.sound("acme")) == 6


async def test_a_job_created_in_a_request_may_have_events_in_the_lines_behind_it(shared: Shared, tenant: str) -> None:
    drafts = [
        created(tenant, 1, job_id="mine"),
        accepted(tenant, "mine", "dc1"),
        completed(tenant, "mine"),
        created(tenant, 2),
    ]
    receipt = await shared.service.submitter.submit_lines(EventLines.of(drafts), durability=None, key=None)
    entries = await shared.chains.sound(tenant)
    assert [entry["action"] for entry in entries] == ["ENQUEUE", "DEQUEUE", "COMPLETE", "ENQUEUE"]
    assert receipt.job_ids == ["mine", entries[3]["job_id"]]
    assert (receipt.first_hlc, receipt.last_hlc) == (entries[0]["t_hlc"], entries[3]["t_hlc"])


async def test_what_the_lines_of_a_request_say_of_a_job_is_known_at_once(shared: Shared, tenant: str) -> None:
    drafts = [
        created(tenant, 1, job_id="mine"),
        accepted(tenant, "mine", "dc1"),
        accepted(tenant, "mine", "dc1")._replace(fence_token=7),
        accepted(tenant, "mine", "dc2"),
        accepted(tenant, "mine", "dc1")._replace(fence_token=3),
        accepted(tenant, "mine", "dc2"),
        completed(tenant, "mine")._replace(fence_token=6),
        created(tenant, 2, job_id="another"),
        completed(tenant, "another"),
    ]
    await shared.service.submitter.submit_lines(EventLines.of(drafts[:4]), durability=LOCAL, key=None)
    await shared.service.submitter.submit_lines(EventLines.of(drafts[4:]), durability=LOCAL, key=None)
    mine, another = shared.service.job_index.get((tenant, "mine")), shared.service.job_index.get((tenant, "another"))
    assert mine is not None
    assert another is not None
    assert (mine.fence_token, mine.ended) == (7, None)
    assert (another.fence_token, another.ended is not None) == (1, True)
    await shared.service.node.chained.reached(shared.service.writer.durable_lsn, UNTIL_S)
    fences = [json.loads(entry["payload"])["fence_token"] for entry in await shared.chains.sound(tenant)]
    assert fences == [1, 1, 7, 7, 3, 7, 6, 1, 1]


# --- turns -----------------------------------------------------------------------------------------


async def test_others_get_their_turn_while_lines_are_encoded(shared: Shared, tenant: str) -> None:
    line = b'{"tenant_id":"%b","type":"JobCreated"}\n' % tenant.encode()
    lines = await lines_of(line * (4 * LINES_PER_TURN), 1 << 20, "ci")
    with counted_turns() as turns:
        fences, payloads = await shared.service.submitter._encoded(lines, None)
    assert turns.count >= 3
    assert fences == [1] * len(lines)
    assert payloads == [lines.payload(number, 1, None) for number in range(len(lines))]


# --- room -----------------------------------------------------------------------------------------


async def test_an_event_over_the_bound_of_a_record_is_refused_and_nothing_of_its_request_is_taken(
    shared: Shared, tenant: str
) -> None:
    huge = Draft(tenant, None, JOB_EVENTS["JobCreated"], {"spec": {"n": "x" * (1 << 20)}}, None, GLOBAL)
    next_lsn = shared.service.writer.next_lsn
    with pytest.raises(RecordTooLargeError):
        await shared.service.submitter.submit(huge, key=None)
    with pytest.raises(InvalidEventError) as refusal:
        await shared.service.submitter.submit_lines(
            EventLines.of([created(tenant, 1), huge]), durability=None, key=None
        )
    assert refusal.value.line == 2
    assert shared.service.writer.next_lsn == next_lsn
    assert await shared.chains.entries(tenant) == []


async def test_without_postgres_local_events_are_taken_until_the_backlog_is_full_and_chained_afterwards(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy, chains: Chains
) -> None:
    settings = make_settings(wal={"backlog_max_entries": 50}, write={"timeout": "5s"})
    async with run_node(settings, url=proxy.url) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await until(chains.key_recorded, "the node has recorded its key")
        await until(lambda: not service.backlog, "nothing waits")
        await proxy.refuse()

        taken = [await service.submitter.submit(created("acme", n, durability=LOCAL), key=None) for n in range(1, 41)]
        assert {receipt.achieved for receipt in taken} == {LOCAL}
        with pytest.raises(DurabilityTimeoutError) as timeout:
            await service.submitter.submit(created("acme", 41), key=None)
        assert (timeout.value.epoch, timeout.value.lsn, timeout.value.achieved) == (1, taken[-1].lsn + 1, LOCAL)
        assert timeout.value.job_id is not None
        with pytest.raises(WalFullError):
            await service.submitter.submit_lines(
                EventLines.of([created("acme", n) for n in range(1000, 1010)]), durability=LOCAL, key=None
            )
        for n in range(42, 51):
            await service.submitter.submit(created("acme", n, durability=LOCAL), key=None)
        assert len(service.backlog) == 50
        for _ in range(3):
            with pytest.raises(WalFullError):
                await service.submitter.submit(created("acme", 99, durability=LOCAL), key=None)

        await proxy.accept()
        await until(lambda: not service.backlog, "the backlog drains")
        late = await service.submitter.submit(created("acme", 51), key=None)
        assert late.chain is not None
        entries = await chains.sound("acme")
        assert numbers(entries) == list(range(52))
        (timed_out,) = [entry for entry in entries if numbers([entry]) == [41]]
        assert (timed_out["t_hlc"], timed_out["job_id"]) == (timeout.value.hlc, timeout.value.job_id)


async def test_a_request_that_needs_postgres_before_it_may_be_taken_says_that_postgres_is_away(
    service: Service, run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy
) -> None:
    async with run_node(make_settings("other"), url=proxy.url) as other:
        job = await service.submitter.submit(created("acme", 0), key=None)
        await other.key_changes.recorded.wait()
        await proxy.refuse()
        next_lsn = other.writer.next_lsn
        with pytest.raises(DatabaseUnavailableError):
            await other.submitter.submit(progressed("acme", job.job_id, 1), key=None)
        assert other.writer.next_lsn == next_lsn


async def test_requests_that_are_entered_in_turns_never_take_each_others_room(
    run_node: RunNode,
    make_settings: MakeSettings,
    proxy: PostgresProxy,
    chains: Chains,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.write.intake.submit.LINES_PER_TURN", 3)
    async with run_node(make_settings(wal={"backlog_max_entries": 100}), url=proxy.url) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await until(chains.key_recorded, "the node has recorded its key")
        await until(lambda: not service.backlog, "nothing waits")
        await proxy.refuse()
        requests = [[created("acme", 100 * request + n) for n in range(40)] for request in range(1, 6)]
        results = await asyncio.gather(
            *(service.submitter.submit_lines(EventLines.of(drafts), durability=LOCAL, key=None) for drafts in requests),
            return_exceptions=True,
        )
        taken = [drafts for drafts, result in zip(requests, results, strict=True) if not isinstance(result, Exception)]
        assert {type(result) for result in results if isinstance(result, Exception)} == {WalFullError}
        assert 1 <= len(taken) <= 2
        assert len(service.backlog) == 40 * len(taken)
        await proxy.accept()
        await until(lambda: not service.backlog, "the backlog drains")
    expected = [0, *(100 * request + n for request in range(1, 6) if requests[request - 1] in taken for n in range(40))]
    assert sorted(numbers(await chains.sound("acme"))) == expected


async def test_the_bytes_of_the_backlog_have_a_bound_too(
    run_node: RunNode,
    make_settings: MakeSettings,
    proxy: PostgresProxy,
    chains: Chains,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.write.pending.backlog.BYTES_MAX_MIN", 200_000)
    monkeypatch.setattr("app.write.intake.submit.LINES_PER_TURN", 2)

    def large(n: int) -> Draft:
        fields: dict[str, object] = {"spec": {"n": n, "text": "x" * 9_000}}
        return Draft("acme", None, JOB_EVENTS["JobCreated"], fields, None, LOCAL)

    small = {"backlog_max_entries": 100, "record_bytes_max": 65_536}
    async with run_node(make_settings(wal=small), url=proxy.url) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await until(chains.key_recorded, "the node has recorded its key")
        await until(lambda: not service.backlog, "nothing waits")
        await proxy.refuse()
        requests = [[large(n) for _ in range(8)] for n in (1, 2, 3)]
        results = await asyncio.gather(
            *(service.submitter.submit_lines(EventLines.of(drafts), durability=None, key=None) for drafts in requests),
            return_exceptions=True,
        )
        refused = [n for n, result in enumerate(results, 1) if isinstance(result, WalFullError)]
        # Mostly the last one; a turn that took long lets others go first.
        assert len(refused) == 1
        assert {type(result).__name__ for result in results} == {"BatchReceipt", "WalFullError"}
        for _ in range(4):
            await service.submitter.submit(large(4), key=None)
        with pytest.raises(WalFullError):
            await service.submitter.submit(large(5), key=None)
        await proxy.accept()
        await until(lambda: not service.backlog, "the backlog drains")
        await service.submitter.submit(large(6), key=None)
        await until(lambda: not service.backlog, "the backlog drains")
    taken = [n for n in (1, 2, 3) if n not in refused for _ in range(8)]
    assert sorted(numbers(await chains.sound("acme"))) == [0, *taken, *[4] * 4, 6]


# --- what can never fit ---------------------------------------------------------------------------


async def test_a_request_larger_than_the_whole_backlog_is_too_large_instead_of_early(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    async with run_node(make_settings(wal={"backlog_max_entries": 50})) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await until(chains.key_recorded, "the node has recorded its key")
        await until(lambda: not service.backlog, "nothing waits")
        next_lsn = service.writer.next_lsn
        for drafts in ([created("acme", n) for n in range(51)], [created("beta", n) for n in range(50)]):
            with pytest.raises(RequestTooLargeError, match=r"51 entries; wal\.backlog_max_entries is 50"):
                await service.submitter.submit_lines(EventLines.of(drafts), durability=LOCAL, key=None)
        assert service.writer.next_lsn == next_lsn
        receipt = await service.submitter.submit_lines(
            EventLines.of([created("acme", n) for n in range(1, 51)]), durability=GLOBAL, key=None
        )
        assert receipt.accepted == 50
    assert numbers(await chains.sound("acme")) == list(range(51))


async def test_events_larger_than_all_bytes_that_may_wait_are_too_large(
    run_node: RunNode, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.pending.backlog.BYTES_MAX_MIN", 100_000)
    text = "x" * 9_000
    drafts = [Draft("acme", None, JOB_EVENTS["JobCreated"], {"spec": {"text": text}}, None, LOCAL)] * 12
    small = {"backlog_max_entries": 90, "record_bytes_max": 65_536}
    async with run_node(make_settings(wal=small)) as service:
        with pytest.raises(RequestTooLargeError, match="100000 may wait at once"):
            await service.submitter.submit_lines(EventLines.of(drafts), durability=None, key=None)
        assert (
            await service.submitter.submit_lines(EventLines.of(drafts[:9]), durability=None, key=None)
        ).accepted == 9


async def test_an_end_with_a_stale_fence_ends_its_job_no_sooner_than_the_chain_says(
    run_node: RunNode, chains: Chains
) -> None:
    def with_fence(draft: Draft, fence_token: int) -> Draft:
        return draft._replace(fence_token=fence_token, durability=LOCAL)

    async with run_node() as service:
        job_id = (await service.submitter.submit(created("acme", 1), key=None)).job_id
        await service.submitter.submit(with_fence(progressed("acme", job_id, 1), 3), key=None)
        stale = await service.submitter.submit(with_fence(completed("acme", job_id), 2), key=None)
        # Neither on its way to the chain, nor chained, nor found there.
        await service.submitter.submit(with_fence(progressed("acme", job_id, 2), 3), key=None)
        await until(lambda: service.node.chained.lsn >= stale.lsn, "it is chained")
        await service.submitter.submit(progressed("acme", job_id, 3), key=None)
        # One that the fold takes for the end, though a creation had a higher fence.
        high = created("acme", 2)._replace(fence_token=9)
        other_id = (await service.submitter.submit(high, key=None)).job_id
        ended = await service.submitter.submit(with_fence(completed("acme", other_id), 1), key=None)
        await until(lambda: service.node.chained.lsn >= ended.lsn, "it is chained")
        with pytest.raises(JobEndedError):
            await service.submitter.submit(progressed("acme", other_id, 1), key=None)
    async with run_node() as service:
        await service.submitter.submit(progressed("acme", job_id, 4), key=None)
        await service.submitter.submit(with_fence(completed("acme", job_id), 3), key=None)
        with pytest.raises(JobEndedError):
            await service.submitter.submit(progressed("acme", job_id, 5), key=None)
    actions = [entry["action"] for entry in await chains.sound("acme") if entry["job_id"] == job_id]
    assert actions == ["ENQUEUE", "EXECUTE", "COMPLETE", *["EXECUTE"] * 3, "COMPLETE"]


# --- a WAL that is taken away ---------------------------------------------------------------------


async def test_a_segment_that_was_removed_ends_the_node_and_what_was_acknowledged_is_chained_all_the_same(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy, chains: Chains
) -> None:
    settings = make_settings()
    async with run_node(settings, url=proxy.url) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        proxy.stall()
        receipts = [await service.submitter.submit(created("acme", n, durability=LOCAL), key=None) for n in range(1, 9)]
        (segment,) = (settings.wal_dir / service.node.node_id).glob("*.wal")
        segment.unlink()
        await until(lambda: service.node.failure, "an idle node misses its segment")
        assert isinstance(service.node.failure, WalPoisonedError)
        assert service.lifecycle.stop_requested.is_set()
        with pytest.raises(WalPoisonedError, match="removed, renamed or replaced"):
            await service.submitter.submit(created("acme", 9, durability=LOCAL), key=None)
        proxy.resume()
    rows = await chains.sound("acme")
    assert {receipt.job_id for receipt in receipts} < {row["job_id"] for row in rows}
