"""Requests with an Idempotency-Key happen once, however often, wherever and whenever they are sent again."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Sequence

import asyncpg
import pytest

from app.node.service import Service
from app.node.wiring import running
from app.runtime.settings.config import Settings
from app.store import idempotency
from app.store.idempotency import ChainedLine
from app.write.pending.requests import Draft, EventLines
from ledger import canonical
from ledger.chain.record import IdempotencyKey
from ledger.errors import (
    DatabaseUnavailableError,
    DurabilityTimeoutError,
    IdempotencyReusedError,
    JobEndedError,
    JobNotFoundError,
)
from ledger.keyed import key_digest
from tests.app.chains import Chains, held, numbers, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, LOCAL, accepted, completed, created, key, progressed
from tests.app.hurry import hurried
from tests.app.postgres_proxy import PostgresProxy
from tests.app.shared import Shared
from tests.conftest import EXAMPLES, EXAMPLES_USUAL, Database, connected_to

ROUNDS = 10 if EXAMPLES > EXAMPLES_USUAL else 4


@pytest.fixture
def hasty(make_settings: MakeSettings) -> Settings:
    """Settings of a node that does not wait long for the backlog when it stops."""
    return make_settings(shutdown_grace="1s")


# --- one event ------------------------------------------------------------------------------------


async def test_the_same_request_again_gives_the_same_receipt_and_adds_nothing(shared: Shared, tenant: str) -> None:
    first = await shared.service.submitter.submit(created(tenant, 1), key=key("k"))
    again = await shared.service.submitter.submit(created(tenant, 1), key=key("k"))
    assert not first.replayed
    assert again == first._replace(replayed=True)
    assert numbers(await shared.chains.sound(tenant)) == [1]


async def test_what_is_sent_again_after_a_restart_gives_the_same_receipt_and_adds_nothing(
    run_node: RunNode, chains: Chains
) -> None:
    many = [(LOCAL, lines(30, ["many"])), (GLOBAL, lines(30, ["acme-3", "beta-3", "gamma-3"]))]
    async with run_node() as service:
        submit, submit_lines = service.submitter.submit, service.submitter.submit_lines
        job = await submit(created("acme", 1), key=key("k"))
        report = await submit(progressed("acme", job.job_id, 3, durability=LOCAL), key=key("k", route=2))
        ending = await submit(created("beta", 1), key=None)
        end = await submit(completed("beta", ending.job_id), key=key("k"))
        assert await submit(completed("beta", ending.job_id), key=key("k")) == end._replace(replayed=True)
        with pytest.raises(JobEndedError):
            await submit(completed("beta", ending.job_id), key=key("other"))
        receipts = []
        for level, drafts in many:
            first = await submit_lines(EventLines.of(drafts), durability=level, key=key("k"))
            assert (first.accepted, len(first.job_ids), first.replayed) == (30, 30, False)
            together = await asyncio.gather(
                *(submit_lines(EventLines.of(drafts), durability=level, key=key("k")) for _ in range(5))
            )
            assert together == [first._replace(replayed=True)] * 5
            receipts.append(first)
    async with run_node() as service:
        submit, submit_lines = service.submitter.submit, service.submitter.submit_lines
        assert await submit(created("acme", 1), key=key("k")) == job._replace(replayed=True)
        assert await submit(
            progressed("acme", job.job_id, 3, durability=LOCAL), key=key("k", route=2)
        ) == report._replace(replayed=True)
        # Though the job has ended.
        assert await submit(completed("beta", ending.job_id), key=key("k")) == end._replace(replayed=True)
        for (level, drafts), first in zip(many, receipts, strict=True):
            again = await submit_lines(EventLines.of(drafts), durability=level, key=key("k"))
            assert again == first._replace(replayed=True)
    assert len(await chains.sound("acme")) == len(await chains.sound("beta")) == 2
    for _, drafts in many:
        entries = [entry for tenant in {each.tenant_id for each in drafts} for entry in await chains.sound(tenant)]
        assert sorted(numbers(entries)) == list(range(30))


async def test_concurrent_duplicates_wait_for_the_first_and_get_its_receipt(shared: Shared, tenant: str) -> None:
    await shared.service.submitter.submit(created(tenant, 0), key=None)
    next_lsn = shared.service.writer.next_lsn
    receipts = await asyncio.gather(
        *(shared.service.submitter.submit(created(tenant, 1), key=key("k")) for _ in range(50))
    )
    assert shared.service.writer.next_lsn == next_lsn + 1
    assert [receipt.replayed for receipt in receipts].count(False) == 1
    assert len({receipt._replace(replayed=False) for receipt in receipts}) == 1
    assert numbers(await shared.chains.sound(tenant)) == [0, 1]


async def test_without_postgres_local_keys_are_known_on_this_node_and_another_body_or_a_global_one_is_refused(
    run_node: RunNode, proxy: PostgresProxy, hasty: Settings, chains: Chains
) -> None:
    async with run_node(hasty, url=proxy.url) as service:
        submit = service.submitter.submit
        await submit(created("acme", 0), key=None)
        await service.key_changes.recorded.wait()
        await proxy.refuse()
        draft = created("acme", 1, durability=LOCAL)
        receipts = [await submit(draft, key=key("k", "one")) for _ in range(3)]
        assert len({receipt._replace(replayed=False) for receipt in receipts}) == 1
        next_lsn = service.writer.next_lsn
        with pytest.raises(IdempotencyReusedError):
            await submit(created("acme", 2, durability=LOCAL), key=key("k", "two"))
        with pytest.raises(DatabaseUnavailableError):
            await submit(created("acme", 2), key=key("global"))
        assert service.writer.next_lsn == next_lsn
        await proxy.accept()
        await until(lambda: service.node.chained.lsn >= receipts[0].lsn, "the backlog drains")
        assert await submit(draft, key=key("k", "one")) == receipts[0]._replace(replayed=True)
        for _ in range(2):
            with pytest.raises(IdempotencyReusedError):
                await submit(created("acme", 2), key=key("k", "two"))
    assert numbers(await chains.sound("acme")) == [0, 1]


async def test_a_key_counts_for_its_route_and_tenant_only(shared: Shared, tenant: str) -> None:
    other = f"{tenant}-other"
    receipts = [
        await shared.service.submitter.submit(created(each, 1), key=key("k", f"{each} {route}", route=route))
        for each in (tenant, other)
        for route in (1, 2)
    ]
    assert len({receipt.hlc for receipt in receipts}) == 4
    assert not any(receipt.replayed for receipt in receipts)


async def test_a_request_that_was_refused_leaves_its_key_free(shared: Shared, tenant: str) -> None:
    with pytest.raises(JobNotFoundError):
        await shared.service.submitter.submit(completed(tenant, "nobody"), key=key("k", "one"))
    receipt = await shared.service.submitter.submit(created(tenant, 1), key=key("k", "two"))
    assert not receipt.replayed


async def test_duplicates_that_wait_for_a_request_that_is_refused_are_judged_by_themselves(
    shared: Shared, tenant: str
) -> None:
    results = await asyncio.gather(
        shared.service.submitter.submit(completed(tenant, "nobody"), key=key("k", "one")),
        shared.service.submitter.submit(completed(tenant, "nobody"), key=key("k", "one")),
        shared.service.submitter.submit(created(tenant, 1), key=key("k", "two")),
        return_exceptions=True,
    )
    assert [type(result).__name__ for result in results] == ["JobNotFoundError", "JobNotFoundError", "Receipt"]


async def test_a_timeout_is_not_the_outcome_and_the_key_gives_the_outcome_later(
    run_node: RunNode, proxy: PostgresProxy, hasty: Settings, chains: Chains, superuser: asyncpg.Connection
) -> None:
    async with run_node(hasty, url=proxy.url) as service:
        submit = service.submitter.submit
        await submit(created("acme", 0), key=None)
        await service.key_changes.recorded.wait()
        proxy.stall()
        local = created("acme", 1, durability=LOCAL)
        entered = await submit(local, key=key("local"))
        with hurried(service, 2.0), pytest.raises(DurabilityTimeoutError) as timeout:
            await submit(created("acme", 2), key=None)
        assert (timeout.value.lsn, timeout.value.achieved) == (entered.lsn + 1, LOCAL)
        proxy.resume()
        await until(lambda: service.node.chained.lsn > entered.lsn, "the backlog drains")
        later = await submit(local, key=key("local"))
        assert later == entered._replace(replayed=True)

        # Under way, and held up in the database.
        async with superuser.transaction():
            await superuser.execute("LOCK TABLE scheduler.wal_positions IN ACCESS EXCLUSIVE MODE")
            for _ in range(2):
                with hurried(service, 2.0), pytest.raises(DurabilityTimeoutError) as timeout:
                    await submit(created("acme", 3), key=key("k"))
                assert timeout.value.achieved is LOCAL
        receipt = await submit(created("acme", 3), key=key("k"))
        assert receipt.replayed
        assert (receipt.hlc, receipt.lsn, receipt.epoch, receipt.job_id) == (
            timeout.value.hlc,
            timeout.value.lsn,
            timeout.value.epoch,
            timeout.value.job_id,
        )
        assert receipt.chain is not None
    assert numbers(await chains.sound("acme")) == [0, 1, 2, 3]


async def test_a_local_event_whose_key_turns_out_to_be_taken_is_in_the_chain_as_refused_also_after_a_crash(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy, hasty: Settings, chains: Chains
) -> None:
    async with run_node(make_settings("other")) as other:
        winners = [await other.submitter.submit(created("acme", 0), key=key(name, "one")) for name in ("k", "m")]
        async with run_node(hasty, url=proxy.url) as service:
            await service.submitter.submit(created("beta", 0), key=None)
            await proxy.refuse()
            taken = await service.submitter.submit(created("acme", 1, durability=LOCAL), key=key("k", "two"))
            many = [created("acme", n, durability=LOCAL) for n in (2, 3)]
            lines_taken = await service.submitter.submit_lines(
                EventLines.of(many), durability=LOCAL, key=key("m", "three")
            )
            await proxy.accept()
            await until(lambda: service.node.chained.lsn >= service.writer.durable_lsn, "the backlog drains")
            for name, body in (("k", "two"), ("m", "three")):
                with pytest.raises(IdempotencyReusedError):
                    await service.submitter.submit(created("acme", 1, durability=LOCAL), key=key(name, body))
            await proxy.refuse()
            left = await service.submitter.submit(created("beta", 1, durability=LOCAL), key=key("k", "one"))
        await other.submitter.submit(created("beta", 2), key=key("k", "two"))
    async with run_node(hasty) as service:
        await until(lambda: service.node.chained.lsn >= left.lsn, "the backlog drains")
    assert [(entry["action"], entry["t_hlc"] == left.hlc) for entry in await chains.sound("beta")] == [
        ("ENQUEUE", False),
        ("ENQUEUE", False),
        ("REFUSED", True),
    ]
    entries = await chains.sound("acme")
    assert [entry["action"] for entry in entries] == [*["ENQUEUE"] * 2, *["REFUSED"] * 3]
    assert [entries[2]["t_hlc"], entries[4]["t_hlc"]] == [taken.hlc, lines_taken.last_hlc]
    for entry, n, job_id in zip(entries[2:], (1, 2, 3), (taken.job_id, *lines_taken.job_ids), strict=True):
        winner = winners[n > 1]
        used = key("k", "two") if n == 1 else key("m", "three")
        line_key = IdempotencyKey(used.route, used.key, max(n - 2, 0), used.body_digest)
        facts = {"type": "JobCreated", "fence_token": 1, "spec": {"n": n}, "idempotency": key_digest("acme", line_key)}
        assert entry["job_id"] == job_id
        assert json.loads(entry["payload"]) == {
            "type": "Refused",
            "reason": "idempotency-key-reused",
            "idempotency_key": used.key,
            "lost_to": {"job_id": winner.job_id, "hlc": winner.hlc},
            "record_type": 1,
            "job_id": base64.b64encode(job_id.encode()).decode(),
            "payload": base64.b64encode(canonical.encode(facts)).decode(),
        }


# --- many lines -----------------------------------------------------------------------------------


def lines(count: int, tenants: Sequence[str] = ("acme",)) -> list[Draft]:
    """A request of ``count`` numbered jobs, dealt out to ``tenants``."""
    return [created(tenants[n % len(tenants)], n) for n in range(count)]


async def test_lines_of_one_request_are_in_each_chain_in_their_order(shared: Shared, tenant: str) -> None:
    other = f"{tenant}-other"
    await shared.service.submitter.submit_lines(
        EventLines.of(lines(1500, [tenant, other])), durability=None, key=key("k")
    )
    assert numbers(await shared.chains.sound(tenant)) == list(range(0, 1500, 2))
    assert numbers(await shared.chains.sound(other)) == list(range(1, 1500, 2))


async def test_of_concurrent_requests_that_share_a_key_and_a_tenant_one_is_taken_whole_and_the_other_leaves_nothing(
    shared: Shared, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.intake.submit.LINES_PER_TURN", 2)
    service, chains = shared.service, shared.chains
    for level in (LOCAL, GLOBAL):
        for round_ in range(3):
            name = f"{tenant}-{level.name.lower()}{round_}"
            first = lines(12, [f"{name}-a", f"{name}-b"])
            second = lines(12, [f"{name}-b", f"{name}-c"])
            results = await asyncio.gather(
                service.submitter.submit_lines(EventLines.of(first), durability=level, key=key(name, "first")),
                service.submitter.submit_lines(EventLines.of(second), durability=level, key=key(name, "second")),
                return_exceptions=True,
            )
            assert [type(result).__name__ for result in results] == ["BatchReceipt", "IdempotencyReusedError"]
            await until(lambda: service.node.chained.lsn >= service.writer.durable_lsn, "all is chained")
            assert len(await chains.sound(f"{name}-a")) == 6
            assert [entry["action"] for entry in await chains.sound(f"{name}-b")] == ["ENQUEUE"] * 6
            assert await chains.entries(f"{name}-c") == []


# --- seven days -----------------------------------------------------------------------------------


async def test_a_key_is_forgotten_after_seven_days_and_no_earlier(
    shared: Shared, tenant: str, shared_database: Database
) -> None:
    submit = shared.service.submitter.submit
    for name in ("old", "young"):
        await submit(created(tenant, 1), key=key(name, "one"))
    aged = "UPDATE scheduler.idempotency SET created_at = now() - make_interval(days => 7, secs => $3)"
    for name, secs in (("old", 60.0), ("young", -60.0)):
        await shared.superuser.execute(f"{aged} WHERE tenant_id = $1 AND key = $2", tenant, name, secs)
    async with connected_to(shared_database.service_url) as connection:
        await idempotency.forget_old(connection)
    again = await submit(created(tenant, 2), key=key("old", "two"))
    assert not again.replayed
    with pytest.raises(IdempotencyReusedError):
        await submit(created(tenant, 2), key=key("young", "two"))
    assert numbers(await shared.chains.sound(tenant)) == [1, 1, 2]


async def test_a_running_node_forgets_old_keys_by_itself(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    async with run_node(make_settings(wal={"retain": "1s"})) as service:
        await service.submitter.submit(created("acme", 1), key=key("k"))
        await superuser.execute("UPDATE scheduler.idempotency SET created_at = now() - make_interval(days => 8)")

        async def forgotten() -> bool:
            return await superuser.fetchval("SELECT count(*) FROM scheduler.idempotency") == 0

        await until(forgotten, "the key is forgotten")


# --- many batches ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def other(
    shared: Shared, make_shared_settings: MakeSettings, shared_database: Database
) -> AsyncIterator[Service]:
    """Another node of the ledger of ``shared``."""
    async with running(make_shared_settings("other"), shared_database.service_url) as (service, _services):
        await service.key_changes.recorded.wait()
        yield service


@pytest.mark.exhaustive
async def test_one_key_with_two_bodies_of_many_lines_on_two_nodes_adds_the_lines_of_one(
    shared: Shared, other: Service, tenant: str
) -> None:
    one, two = shared.service, other
    expected: list[int] = []
    for round_ in range(ROUNDS):
        first = [created(tenant, 1000 * round_ + n) for n in range(5)]
        second = [created(tenant, 1000 * round_ + 500 + n) for n in range(9)]
        results = await asyncio.gather(
            one.submitter.submit_lines(EventLines.of(first), durability=GLOBAL, key=key(f"k{round_}", "first")),
            two.submitter.submit_lines(EventLines.of(second), durability=GLOBAL, key=key(f"k{round_}", "second")),
            return_exceptions=True,
        )
        kinds = sorted(type(result).__name__ for result in results)
        assert kinds == ["BatchReceipt", "IdempotencyReusedError"]
        won = second if isinstance(results[0], IdempotencyReusedError) else first
        expected += [draft.fields["spec"]["n"] for draft in won]  # type: ignore[index]
    assert numbers(await shared.chains.sound(tenant)) == expected


async def test_long_keyed_requests_of_two_nodes_are_chained_once_in_many_overlapping_batches(
    shared: Shared, other: Service, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.chain.appender.BATCH_ENTRIES_MAX", 20)
    beta = f"{tenant}-beta"
    drafts = lines(300, [tenant, beta])
    nodes = (shared.service, other)
    receipts = await asyncio.gather(
        *(service.submitter.submit_lines(EventLines.of(drafts), durability=GLOBAL, key=key("k")) for service in nodes),
        *(
            service.submitter.submit_lines(EventLines.of(lines(100, [tenant])), durability=GLOBAL, key=None)
            for service in nodes
        ),
    )
    assert receipts[0]._replace(replayed=False) == receipts[1]._replace(replayed=False)
    assert sorted(numbers(await shared.chains.sound(tenant))) == sorted([*range(0, 300, 2), *range(100), *range(100)])
    assert numbers(await shared.chains.sound(beta)) == list(range(1, 300, 2))


async def test_a_row_that_comes_after_the_rows_were_read_is_not_taken_for_one_that_is_gone(
    shared: Shared, other: Service, tenant: str, shared_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = shared.service, other
    tenants = [tenant, f"{tenant}-beta", f"{tenant}-gamma"]
    drafts = EventLines.of(lines(3, tenants))
    locked: dict[str, asyncpg.Connection] = {}

    async def last_seq(tenant_id: str) -> int:
        return (await shared.chains.head(tenant_id))[0]

    await one.submitter.submit_lines(drafts, durability=GLOBAL, key=None)
    for tenant_id in tenants[1:]:
        locked[tenant_id] = await asyncpg.connect(shared_database.superuser_url)
        await locked[tenant_id].execute("BEGIN")
        await locked[tenant_id].execute("SELECT FROM scheduler.chain_heads WHERE tenant_id = $1 FOR UPDATE", tenant_id)
    first = asyncio.ensure_future(one.submitter.submit_lines(drafts, durability=GLOBAL, key=key("k")))
    await until(lambda: _is_two(last_seq(tenant)), "the line that nothing holds up is chained")
    find_lines = two.submitter.keyed._find_lines

    async def find_before_another_is_chained(asked: Sequence[str], route: int, name: str) -> list[ChainedLine]:
        found = await find_lines(asked, route, name)
        if locked:
            tenant_id, holder = next(iter(locked.items()))
            del locked[tenant_id]
            await holder.close()
            await until(lambda: _is_two(last_seq(tenant_id)), "another line is chained")
        return found

    monkeypatch.setattr(two.submitter.keyed, "_find_lines", find_before_another_is_chained)
    again = await two.submitter.submit_lines(drafts, durability=GLOBAL, key=key("k"))
    assert again == (await first)._replace(replayed=True)
    for tenant_id in tenants:
        assert len(await shared.chains.sound(tenant_id)) == 2


async def _is_two(seq: Awaitable[int]) -> bool:
    return await seq == 2


async def test_lines_entered_twice_because_their_request_was_torn_are_chained_once(
    shared: Shared, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.chain.appender.BATCH_ENTRIES_MAX", 10)
    monkeypatch.setattr("app.write.intake.submit.LINES_PER_TURN", 5)
    service = shared.service
    await service.submitter.submit(created(tenant, 1000), key=None)
    drafts = lines(100, [tenant])
    async with held(shared.superuser):
        first_lsn = service.writer.next_lsn
        torn = asyncio.create_task(
            service.submitter.submit_lines(EventLines.of(drafts), durability=GLOBAL, key=key("k"))
        )
        while service.writer.next_lsn == first_lsn:
            await asyncio.sleep(0)
        torn.cancel()
        await asyncio.gather(torn, return_exceptions=True)
        entered = service.writer.next_lsn - first_lsn
        assert 0 < entered < 100

        repeated = asyncio.create_task(
            service.submitter.submit_lines(EventLines.of(drafts), durability=GLOBAL, key=key("k"))
        )
        await until(lambda: service.writer.next_lsn == first_lsn + entered + 100, "all lines are entered")
    assert (await repeated).accepted == 100
    assert numbers(await shared.chains.sound(tenant)) == [1000, *range(100)]


async def test_states_of_jobs_whose_events_come_in_many_batches_are_the_fold_of_all(
    shared: Shared, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.chain.appender.BATCH_ENTRIES_MAX", 10)
    jobs = [await shared.service.submitter.submit(created(tenant, n), key=None) for n in range(5)]
    reports = [accepted(tenant, jobs[n % 5].job_id, f"dc{n}") for n in range(200)]
    await shared.service.submitter.submit_lines(EventLines.of(reports), durability=GLOBAL, key=None)
    assert len(await shared.chains.sound(tenant)) == 205
