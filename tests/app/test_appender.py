"""The appender: each event in its chain exactly once, in WAL order, whatever the way to Postgres does."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import asyncpg
import httpx
import pytest

from app.node.readiness import readiness_checks
from app.node.service import Service
from app.node.wiring import running
from app.store import chaining
from app.write.pending.requests import EventLines, Receipt
from ledger import canonical
from ledger.errors import ChainDamagedError, DatabaseWentBackError, EventRefusedError, FencedError, LedgerError
from ledger.facts.events import JOB_EVENTS, Durability, SystemAction
from ledger.hlc import Hlc
from ledger.machines.jobs import refused_job_id
from tests.app.chains import Chains, Entry, numbers, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import GLOBAL, LOCAL, accepted, completed, created, key, progressed
from tests.app.postgres_proxy import PostgresProxy, Trap
from tests.conftest import Database, connected_to


@pytest.fixture
async def behind_proxy(run_node: RunNode, proxy: PostgresProxy, chains: Chains) -> AsyncIterator[Service]:
    """A node that has begun tenant acme, and reaches Postgres through ``proxy``."""
    async with run_node(url=proxy.url) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        await until(chains.key_recorded, "the node has recorded its key")
        yield service


async def submit_numbered(service: Service, tenant_id: str, ns: range) -> list[Receipt]:
    """Submit one job a number, all at once."""
    return list(await asyncio.gather(*(service.submitter.submit(created(tenant_id, n), key=None) for n in ns)))


def assert_in_chain_once_in_order(receipts: Sequence[Receipt], entries: Sequence[Entry]) -> None:
    """Each receipt says where its event is, each event is there once, and chain order is WAL order."""
    by_hlc = {entry["t_hlc"]: entry for entry in entries}
    assert len(by_hlc) == len(entries)
    for receipt in receipts:
        assert receipt.chain is not None
        entry = by_hlc[receipt.hlc]
        assert receipt.chain == (entry["seq"], entry["chain_link"], entry["prev_chain_link"])
        assert receipt.job_id == entry["job_id"]
    in_wal_order = sorted(receipts, key=lambda receipt: receipt.lsn)
    seqs = [receipt.chain.seq for receipt in in_wal_order if receipt.chain]
    assert seqs == sorted(seqs)


# --- the way to Postgres breaks -------------------------------------------------------------------


async def test_connections_lost_around_commit_neither_lose_nor_repeat_an_event(
    behind_proxy: Service, proxy: PostgresProxy, chains: Chains
) -> None:
    receipts: list[Receipt] = []
    n = 1
    for traps in (
        [Trap.AFTER_COMMIT],
        [Trap.BEFORE_COMMIT],
        [Trap.AT_COMMIT],
        [Trap.LATE],
        [Trap.AFTER_COMMIT] * 3,
        [Trap.BEFORE_COMMIT, Trap.AFTER_COMMIT, Trap.AT_COMMIT, Trap.BEFORE_COMMIT],
    ):
        sprung_before = proxy.sprung
        proxy.set_traps(*traps)
        while proxy.sprung < sprung_before + len(traps):
            receipts += await submit_numbered(behind_proxy, "acme", range(n, n + 20))
            n += 20
        receipts += await submit_numbered(behind_proxy, "acme", range(n, n + 20))
        n += 20
        entries = await chains.sound("acme")
        assert sorted(numbers(entries)) == list(range(n)), traps
        assert_in_chain_once_in_order(receipts, entries)
        assert behind_proxy.node.failure is None, traps


async def test_while_postgres_stalls_local_writes_go_on_and_nothing_is_said_to_be_chained(
    behind_proxy: Service, proxy: PostgresProxy, chains: Chains
) -> None:
    job = await behind_proxy.submitter.submit(created("acme", 1), key=None)
    proxy.stall()
    waiting = asyncio.create_task(submit_numbered(behind_proxy, "acme", range(2, 12)))
    reports = [
        await behind_proxy.submitter.submit(progressed("acme", job.job_id, done), key=None) for done in range(10)
    ]
    assert {(report.achieved, report.chain) for report in reports} == {(LOCAL, None)}
    assert not waiting.done()
    assert (await chains.head("acme"))[0] == 2

    proxy.resume()
    receipts = await waiting
    await until(lambda: behind_proxy.node.chained.lsn >= reports[-1].lsn, "the backlog drains")
    entries = await chains.sound("acme")
    assert_in_chain_once_in_order(receipts, entries)
    assert len(entries) == 22


async def test_a_batch_that_postgres_does_not_take_makes_the_node_not_ready(
    behind_proxy: Service, proxy: PostgresProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.chain.appender.OVERDUE_S", 0.2)
    chaining_fault = readiness_checks(behind_proxy)["chaining"]
    await behind_proxy.submitter.submit(created("acme", 0), key=None)
    proxy.stall()
    waiting = asyncio.create_task(submit_numbered(behind_proxy, "acme", range(1, 5)))
    assert "has not taken a batch" in await until(chaining_fault, "it is told")
    proxy.resume()
    await waiting
    await until(lambda: chaining_fault() is None, "all is well")


async def test_a_stalled_connection_is_given_up_and_the_batch_goes_another_way(
    run_node: RunNode, proxy: PostgresProxy, chains: Chains, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.node.service.STATEMENT_TIMEOUT_S", 0.2)
    async with run_node(url=proxy.url) as service:
        await service.submitter.submit(created("acme", 0), key=None)
        proxy.stall()
        waiting = asyncio.create_task(submit_numbered(service, "acme", range(1, 30)))
        await until(lambda: service.appender.database_error, "the appender gives the connection up")
        proxy.resume()
        receipts = await waiting
        entries = await chains.sound("acme")
        assert_in_chain_once_in_order(receipts, entries)
        assert sorted(numbers(entries)) == list(range(30))
        # What it chains of its own may have met the short timeout since.
        await until(lambda: service.appender.database_error is None, "the appender is well")


async def test_connections_cut_at_any_moment_neither_lose_nor_repeat_an_event(
    behind_proxy: Service, proxy: PostgresProxy, chains: Chains
) -> None:
    waiting = asyncio.create_task(submit_numbered(behind_proxy, "acme", range(1, 400)))
    for seq in (1, 50, 120, 200, 300):
        await until(lambda seq=seq: behind_proxy.node.chained.lsn >= seq, "some are chained")  # type: ignore[misc]
        proxy.cut()
    receipts = await waiting
    entries = await chains.sound("acme")
    assert_in_chain_once_in_order(receipts, entries)
    assert sorted(numbers(entries)) == list(range(400))


async def test_after_postgres_refused_connections_the_backlog_drains_in_wal_order(
    behind_proxy: Service, proxy: PostgresProxy, chains: Chains
) -> None:
    await proxy.refuse()
    drafts = [created("acme", n, durability=LOCAL) for n in range(1, 101)]
    receipts = [await behind_proxy.submitter.submit(draft, key=None) for draft in drafts]
    assert (await chains.head("acme"))[0] == 1

    await proxy.accept()
    await until(lambda: behind_proxy.node.chained.lsn >= receipts[-1].lsn, "the backlog drains")
    entries = await chains.sound("acme")
    assert numbers(entries) == list(range(101))
    assert [entry["t_hlc"] for entry in entries[1:]] == [receipt.hlc for receipt in receipts]


async def test_an_outcome_resolves_only_after_its_row_is_committed(service: Service, chains: Chains) -> None:
    receipts = []
    for n in range(30):
        receipts.append(await service.submitter.submit(created("acme", n), key=None))
        assert (await chains.head("acme"))[0] == n + 1
    assert_in_chain_once_in_order(receipts, await chains.sound("acme"))


# --- the fence ------------------------------------------------------------------------------------


async def refused_ever_after(service: Service, kind: type[LedgerError]) -> None:
    """The write that meets the change fails, and so does every later one, of any level."""
    with pytest.raises(kind):
        await service.submitter.submit(created("acme", 99), key=None)
    assert isinstance(service.node.failure, kind)
    assert service.lifecycle.stop_requested.is_set()
    for draft in (created("acme", 100), created("acme", 101, durability=LOCAL)):
        with pytest.raises(kind):
            await service.submitter.submit(draft, key=None)
    with pytest.raises(kind):
        await service.submitter.submit_lines(EventLines.of([created("acme", 102)]), durability=LOCAL, key=None)


async def test_a_node_whose_epoch_was_taken_over_chains_nothing_any_more(
    service: Service, chains: Chains, superuser: asyncpg.Connection
) -> None:
    await submit_numbered(service, "acme", range(5))
    await service.key_changes.recorded.wait()
    written_lsn = service.writer.next_lsn
    await superuser.execute("UPDATE scheduler.wal_positions SET epoch = epoch + 1")
    await refused_ever_after(service, FencedError)
    assert sorted(numbers(await chains.sound("acme"))) == list(range(5))
    assert service.writer.next_lsn == written_lsn + 1


async def test_what_a_failed_node_records_of_itself_is_chained_by_the_next_process(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, superuser: asyncpg.Connection
) -> None:
    async with run_node(make_settings()) as service:
        await service.key_changes.recorded.wait()
        await superuser.execute("UPDATE scheduler.wal_positions SET epoch = epoch + 1")
        await refused_ever_after(service, FencedError)
        lsn = service.writer.next_lsn
        recording = asyncio.create_task(
            service.system_entries.record(SystemAction.BREAK_ACKNOWLEDGED, "tenant:acme", {"reason": "seen"})
        )
        await until(lambda: recording.done() or service.node.durable.lsn >= lsn, "it is durable")
        assert not recording.done()
        recording.cancel()
    await superuser.execute("UPDATE scheduler.wal_positions SET epoch = epoch - 1")
    async with run_node(make_settings()) as service:
        await until(lambda: service.node.chained.lsn >= lsn, "it is chained")
        entries = [each for each in await chains.sound("_system") if each["action"] == SystemAction.BREAK_ACKNOWLEDGED]
        assert [each["job_id"] for each in entries] == ["tenant:acme"]


async def test_a_fence_met_by_the_retry_of_a_lost_commit_holds_too(
    behind_proxy: Service, proxy: PostgresProxy, chains: Chains, superuser: asyncpg.Connection
) -> None:
    await proxy.refuse()
    receipt = await behind_proxy.submitter.submit(created("acme", 1, durability=LOCAL), key=None)
    await superuser.execute("UPDATE scheduler.wal_positions SET epoch = epoch + 1")
    await proxy.accept()
    await until(lambda: behind_proxy.node.failure, "the node sees that it is fenced")
    assert isinstance(behind_proxy.node.failure, FencedError)
    assert behind_proxy.node.chained.lsn < receipt.lsn
    assert numbers(await chains.sound("acme")) == [0]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE scheduler.wal_positions SET chained_lsn = chained_lsn - 1",
        "UPDATE scheduler.wal_positions SET epoch = epoch - 1",
        "DELETE FROM scheduler.wal_positions",
    ],
)
async def test_a_database_that_went_back_under_a_running_node_stops_it(
    service: Service, chains: Chains, superuser: asyncpg.Connection, change: str
) -> None:
    await submit_numbered(service, "acme", range(5))
    before = await chains.entries("acme")
    await superuser.execute(change)
    await refused_ever_after(service, DatabaseWentBackError)
    assert await chains.entries("acme") == before


async def test_a_head_that_was_read_before_an_append_of_this_node_is_no_sign_that_the_database_went_back(
    service: Service, superuser: asyncpg.Connection
) -> None:
    """An import reads heads without their lock, while the appender goes on."""
    await submit_numbered(service, "acme", range(3))

    async def read(connection: asyncpg.Connection, tenant_ids: Sequence[str]) -> dict[str, chaining.ChainHead]:
        heads = await chaining.read_heads(connection, tenant_ids)
        await service.submitter.submit(created("acme", 3), key=None)
        return heads

    heads = service.appender.heads
    assert [head.seq for head in (await heads.stored(superuser, ["acme"], read)).values()] == [3]
    assert heads.seen["acme"].seq == 4
    await superuser.execute("UPDATE scheduler.chain_heads SET head_seq = 3 WHERE tenant_id = 'acme'")
    with pytest.raises(ChainDamagedError, match="this node has seen seq 4"):
        await heads.stored(superuser, ["acme"])


# --- poison ---------------------------------------------------------------------------------------

REFUSE_POISON = """
CREATE FUNCTION scheduler.refuse_poison() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.job_id LIKE 'poison-%' THEN
        RAISE EXCEPTION 'poison' USING ERRCODE = substr(NEW.job_id, 8, 5);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER refuse_poison BEFORE INSERT ON scheduler.scheduler_log
    FOR EACH ROW EXECUTE FUNCTION scheduler.refuse_poison();
"""


def assert_refused(entry: Entry, job_id: str, payload: bytes, sqlstate: str) -> None:
    """The row stands in for the event, with all of its bytes."""
    assert entry["action"] == "REFUSED"
    assert json.loads(entry["payload"]) == {
        "type": "Refused",
        "sqlstate": sqlstate,
        "record_type": JOB_EVENTS["JobCreated"].record_type,
        "job_id": base64.b64encode(job_id.encode()).decode(),
        "payload": base64.b64encode(payload).decode(),
    }


async def test_a_record_that_a_constraint_refuses_is_chained_as_refused_and_all_others_as_they_are(
    service: Service, chains: Chains, superuser: asyncpg.Connection
) -> None:
    await superuser.execute(
        "ALTER TABLE scheduler.scheduler_log ADD CONSTRAINT no_poison CHECK (job_id NOT LIKE 'poison%')"
    )
    drafts = [created("acme", n, job_id=f"{'poison' if n in (0, 17, 18, 63) else 'job'}-{n}") for n in range(64)]
    with pytest.raises(EventRefusedError) as refusal:
        await service.submitter.submit_lines(EventLines.of(drafts), durability=GLOBAL, key=None)
    assert (refusal.value.line, refusal.value.seq) == (1, 1)

    entries = await chains.sound("acme")
    assert len(entries) == 64
    for n, entry in enumerate(entries):
        payload = canonical.encode({"type": "JobCreated", "fence_token": 1, "spec": {"n": n}})
        if n in (0, 17, 18, 63):
            assert_refused(entry, f"poison-{n}", payload, "23514")
        else:
            assert (entry["job_id"], entry["payload"].encode()) == (f"job-{n}", payload)
    assert service.node.failure is None
    assert service.appender.database_error is None


async def test_every_class_of_refused_data_becomes_a_refused_entry(
    service: Service, chains: Chains, superuser: asyncpg.Connection
) -> None:
    await superuser.execute(REFUSE_POISON)
    for tenant_id, sqlstate in (("out-of-range", "22003"), ("null", "23502"), ("too-long", "54000")):
        job_ids = ["job-1", f"poison-{sqlstate}", "job-2"]
        drafts = [created(tenant_id, n, job_id=job_id) for n, job_id in enumerate(job_ids)]
        with pytest.raises(EventRefusedError, match=f"SQLSTATE {sqlstate}") as refusal:
            await service.submitter.submit_lines(EventLines.of(drafts), durability=GLOBAL, key=None)
        assert (refusal.value.line, refusal.value.seq) == (2, 2)
        entries = await chains.sound(tenant_id)
        assert [entry["action"] for entry in entries] == ["ENQUEUE", "REFUSED", "ENQUEUE"]
        payload = canonical.encode({"type": "JobCreated", "fence_token": 1, "spec": {"n": 1}})
        assert_refused(entries[1], f"poison-{sqlstate}", payload, sqlstate)


@pytest.mark.parametrize("level", [LOCAL, GLOBAL])
async def test_a_refused_event_is_never_answered_as_if_it_were_fine(
    run_node: RunNode, chains: Chains, superuser: asyncpg.Connection, level: Durability
) -> None:
    await superuser.execute("ALTER TABLE scheduler.scheduler_log ADD CONSTRAINT no_poison CHECK (job_id <> 'poison')")
    poison = created("acme", 1, job_id="poison", durability=level)
    drafts = [created("acme", 0), poison, created("acme", 2)]

    async def refusals(service: Service) -> list[EventRefusedError]:
        """Of the keyed event, and of the keyed lines, each sent again."""
        found = []
        for repeated in (
            service.submitter.submit(poison, key=key("one")),
            service.submitter.submit_lines(EventLines.of(drafts), durability=level, key=key("many", route=4)),
        ):
            with pytest.raises(EventRefusedError, match="SQLSTATE 23514") as refusal:
                await repeated
            found.append(refusal.value)
        return found

    async with run_node() as service:
        if level is LOCAL:
            early = await service.submitter.submit(poison, key=key("one"))
            await service.submitter.submit_lines(EventLines.of(drafts), durability=LOCAL, key=key("many", route=4))
            assert early.chain is None
            await until(lambda: service.node.chained.lsn >= service.writer.durable_lsn, "all is chained")
        first, at_once = await refusals(service), await refusals(service)
    async with run_node() as service:
        second = await refusals(service)
    for again in (at_once, second):
        for one, other in zip(first, again, strict=True):
            assert (str(one), vars(one)) == (str(other), vars(other))
    entries = await chains.sound("acme")
    assert [entry["action"] for entry in entries] == ["REFUSED", "ENQUEUE", "REFUSED", "ENQUEUE"]
    assert [refusal.seq for refusal in second] == [1, 3]
    assert [refusal.hlc for refusal in second] == [entries[0]["t_hlc"], entries[2]["t_hlc"]]
    assert second[1].line == 2


async def test_a_refused_event_is_a_problem_over_http(
    client: httpx.AsyncClient, chains: Chains, superuser: asyncpg.Connection
) -> None:
    await superuser.execute("ALTER TABLE scheduler.scheduler_log ADD CONSTRAINT no_poison CHECK (job_id <> 'poison')")
    line = {"tenant_id": "acme", "type": "JobCreated", "job_id": "poison"}
    lines = "\n".join(json.dumps(each) for each in (line | {"job_id": "fine"}, line)).encode()
    single = await client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": "poison"})
    many = await client.post("/v1/events", content=lines, headers={"content-type": "application/x-ndjson"})
    for answer, seq in ((single, 1), (many, 3)):
        problem = answer.json()
        assert (answer.status_code, problem["type"]) == (422, "https://tallystick.dev/problems/event-refused")
        entry = (await chains.sound("acme"))[seq - 1]
        assert (problem["seq"], problem["hlc"]) == (seq, entry["t_hlc"])
        assert entry["action"] == "REFUSED"
    assert many.json()["line"] == 2


IN_THE_WAY = (
    "CREATE FUNCTION in_the_way() RETURNS trigger LANGUAGE plpgsql AS"
    " $$BEGIN RAISE data_exception USING MESSAGE = 'in the way'; END$$;"
)
HINDERS = {
    "a constraint": "ALTER TABLE scheduler.wal_positions ADD CONSTRAINT in_the_way CHECK (chained_lsn < 0) NOT VALID",
    "a trigger": f"{IN_THE_WAY} CREATE TRIGGER in_the_way BEFORE UPDATE ON scheduler.wal_positions"
    " FOR EACH ROW EXECUTE FUNCTION in_the_way()",
    "a trigger at COMMIT": f"{IN_THE_WAY} CREATE CONSTRAINT TRIGGER in_the_way AFTER UPDATE ON scheduler.wal_positions"
    " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION in_the_way()",
}


async def test_what_hinders_the_position_of_the_node_neither_ends_it_nor_stops_local_writes(
    run_node: RunNode, superuser: asyncpg.Connection, chains: Chains
) -> None:
    async with run_node() as service:
        await service.submitter.submit(created("acme", 0), key=None)
        for at, (what, hinders) in enumerate(HINDERS.items()):
            await superuser.execute(hinders)
            await service.submitter.submit(created("acme", 2 * at + 1, durability=LOCAL), key=None)
            await until(lambda: re.search("in.the.way", service.appender.database_error or ""), f"{what} is told")
            await service.submitter.submit(created("acme", 2 * at + 2, durability=LOCAL), key=None)
            assert service.node.failure is None, what
            await superuser.execute(
                "DROP FUNCTION IF EXISTS in_the_way() CASCADE;"
                " ALTER TABLE scheduler.wal_positions DROP CONSTRAINT IF EXISTS in_the_way"
            )
            await until(lambda: not len(service.backlog), f"it goes on without {what}")
            await until(lambda: service.appender.database_error is None, "all is well")
    async with run_node() as service:
        await until(lambda: not len(service.backlog), "what was held back is chained")
    assert numbers(await chains.sound("acme")) == [*range(2 * len(HINDERS) + 1)]


async def test_the_reader_of_a_job_is_shown_what_postgres_refused_of_it_though_it_was_acknowledged(
    client: httpx.AsyncClient, chains: Chains, superuser: asyncpg.Connection
) -> None:
    async def post(path: str, **fields: object) -> httpx.Response:
        return await client.post(path, json={"tenant_id": "acme", "durability": "LOCAL", **fields})

    async def read(job_id: str, **params: str) -> httpx.Response:
        return await client.get(f"/v1/jobs/{job_id}", params={"tenant_id": "acme", **params})

    # All of it is acknowledged before any of it can be chained, or refused.
    async with superuser.transaction():
        for rule in ("no_poison CHECK (job_id NOT LIKE 'poison%')", "no_end CHECK (action <> 'COMPLETE')"):
            await superuser.execute(f"ALTER TABLE scheduler.scheduler_log ADD CONSTRAINT {rule}")
        for path, fields in (
            ("/v1/jobs", {"job_id": "poison", "spec": {}}),
            ("/v1/jobs/poison/events", {"type": "JobAccepted", "dc_id": "dc1"}),
            ("/v1/jobs", {"job_id": "fine"}),
            ("/v1/jobs/fine/events", {"type": "JobCompleted"}),
        ):
            answer = await post(path, **fields)
            assert answer.status_code == 201, answer.text
    await until(lambda: all_refused(chains), "all of it is chained")
    entries = await chains.sound("acme")
    assert [entry["action"] for entry in entries] == ["REFUSED", "REFUSED", "ENQUEUE", "REFUSED"]
    # 1. The job that never was: shown, by any way to it, and it takes no events.
    creation = {"type": "JobCreated", "hlc": entries[0]["t_hlc"], "reason": "sqlstate-23514", "seq": 1, "lost_to": None}
    for params in ({}, {"as_of": entries[1]["t_hlc"]}):
        seen = (await read("poison", **params)).json()
        assert (seen["status"], seen["last_seq"], seen["refused"]) == ("REFUSED", 1, creation)
    assert (await client.get("/v1/jobs/poison")).json()["refused"] == creation
    listed = (await client.get("/v1/jobs/poison/events", params={"tenant_id": "acme"})).json()["items"]
    assert [(item["seq"], item["action"]) for item in listed] == [(1, "REFUSED"), (2, "REFUSED")]
    before = f"{int(entries[0]['hlc_physical']) - 1}:0:x"
    assert [(await read(*each)).status_code for each in (("poison2",),)] == [404]
    assert (await read("poison", as_of=before)).status_code == 404
    for path, fields in (("events", {"type": "JobAccepted", "dc_id": "dc1"}), ("cancel", {})):
        answer = await post(f"/v1/jobs/poison/{path}", **fields)
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (409, "job-ended"), answer.text
        assert "REFUSED entry at seq 1" in answer.json()["detail"]
    # 2. Of a job that is there, what was refused.
    seen = (await read("fine")).json()
    assert (seen["status"], seen["refused"]["type"], seen["refused"]["seq"]) == ("SUBMITTED", "JobCompleted", 4)
    # 3. Not what somebody did to a job by the name under which refused events are kept.
    assert (await post("/v1/jobs", job_id=refused_job_id("poison"), durability="GLOBAL")).status_code == 201
    shown = (await client.get("/v1/jobs/poison/events", params={"tenant_id": "acme"})).json()["items"]
    assert [item["seq"] for item in shown] == [1, 2]
    # 4. Mended, it can be created, and is as any other.
    await superuser.execute("ALTER TABLE scheduler.scheduler_log DROP CONSTRAINT no_poison")
    assert (await post("/v1/jobs", job_id="poison", spec={}, durability="GLOBAL")).status_code == 201
    assert (await post("/v1/jobs/poison/events", type="JobAccepted", dc_id="dc1")).status_code == 201
    assert (await read("poison")).json()["status"] in ("SUBMITTED", "ACCEPTED")


async def all_refused(chains: Chains) -> bool:
    return len(await chains.entries("acme")) == 4


async def test_a_refused_end_leaves_its_job_open(
    service: Service, chains: Chains, superuser: asyncpg.Connection
) -> None:
    job = await service.submitter.submit(created("acme", 1), key=None)
    await superuser.execute("ALTER TABLE scheduler.scheduler_log ADD CONSTRAINT no_end CHECK (action <> 'COMPLETE')")
    with pytest.raises(EventRefusedError):
        await service.submitter.submit(completed("acme", job.job_id), key=None)
    report = await service.submitter.submit(progressed("acme", job.job_id, 1, durability=GLOBAL), key=None)
    assert report.chain is not None
    assert [entry["action"] for entry in await chains.sound("acme")] == ["ENQUEUE", "REFUSED", "EXECUTE"]


async def test_an_error_that_is_not_about_the_data_is_tried_again_until_it_passes(
    service: Service, chains: Chains, superuser: asyncpg.Connection
) -> None:
    await superuser.execute(REFUSE_POISON)
    waiting = asyncio.create_task(service.submitter.submit(created("acme", 1, job_id="poison-53100"), key=None))
    await until(lambda: service.appender.database_error, "Postgres says that its disk is full")
    assert not waiting.done()
    await superuser.execute("DROP TRIGGER refuse_poison ON scheduler.scheduler_log")
    assert (await waiting).chain is not None
    assert [entry["job_id"] for entry in await chains.sound("acme")] == ["poison-53100"]


async def test_a_refused_first_entry_of_a_tenant_stops_neither_the_tenant_nor_the_system_chain(
    service: Service, chains: Chains, superuser: asyncpg.Connection
) -> None:
    await superuser.execute("ALTER TABLE scheduler.scheduler_log ADD CONSTRAINT no_bad CHECK (job_id <> 'tenant:bad')")
    await service.submitter.submit_lines(
        EventLines.of([created("bad", 1), created("good", 2)]), durability=GLOBAL, key=None
    )
    assert numbers(await chains.sound("bad")) == [1]
    assert numbers(await chains.sound("good")) == [2]
    actions = [entry["action"] for entry in await chains.sound("_system")]
    assert actions.count("REFUSED") == 1
    assert actions.count("TENANT_CREATED") == 1


# --- two nodes, one database ----------------------------------------------------------------------


class Pair(NamedTuple):
    """Two nodes that tests share, and the chains of their database."""

    one: Service
    two: Service
    chains: Chains

    async def begun(self, *tenants: str) -> list[str]:
        """The entries by which these tenants began."""
        begun = {f"tenant:{tenant}" for tenant in tenants}
        entries = await self.chains.sound("_system")
        return sorted(e["job_id"] for e in entries if e["action"] == "TENANT_CREATED" and e["job_id"] in begun)


@pytest.fixture(scope="module")
async def pair(shared_database: Database, make_shared_settings: MakeSettings) -> AsyncIterator[Pair]:
    one, two = (running(make_shared_settings(name), shared_database.service_url) for name in ("one", "two"))
    async with one as (first, _), two as (second, _), connected_to(shared_database.superuser_url) as superuser:
        yield Pair(first, second, Chains(superuser))


async def test_two_nodes_that_write_to_the_same_tenants_make_one_gapless_chain_of_each(pair: Pair) -> None:
    tenants = ("acme", "beta", "gamma")
    one, two, chains = pair
    assert one.node.node_id != two.node.node_id

    async def write(service: Service, first: int) -> list[Receipt]:
        receipts = []
        for n in range(first, first + 15):
            tenant = tenants[n % 3]
            job = await service.submitter.submit(created(tenant, n), key=None)
            for follower in (accepted(tenant, job.job_id, "dc1"), completed(tenant, job.job_id)):
                receipts.append(await service.submitter.submit(follower, key=None))
            receipts.append(job)
        return receipts

    written = await asyncio.gather(*(write(one, n) for n in (0, 100, 200)), *(write(two, n) for n in (300, 400)))

    for tenant in tenants:
        entries = await chains.sound(tenant)
        for service, services in ((one, written[:3]), (two, written[3:])):
            mine = [receipt for part in services for receipt in part if receipt.tenant_id == tenant]
            assert_in_chain_once_in_order(mine, entries)
            hlcs = [entry["t_hlc"] for entry in entries if entry["hlc_node"] == service.node.node_id]
            assert sorted(hlcs) == sorted(receipt.hlc for receipt in mine)
    assert await pair.begun(*tenants) == [f"tenant:{tenant}" for tenant in tenants]


async def test_events_of_one_job_from_two_nodes_are_merged_into_one_state(pair: Pair, tenant: str) -> None:
    one, two, chains = pair
    job = await one.submitter.submit(created(tenant, 1), key=None)

    async def report(service: Service, dc: str) -> None:
        for _ in range(10):
            await service.submitter.submit(accepted(tenant, job.job_id, dc), key=None)

    await asyncio.gather(report(one, "dc1"), report(two, "dc2"), report(one, "dc3"), report(two, "dc4"))
    entries = await chains.sound(tenant)
    assert len(entries) == 41


async def test_one_key_on_two_nodes_is_chained_once_and_answered_alike(pair: Pair, tenant: str) -> None:
    one, two, chains = pair
    for round_ in range(10):
        name = f"key-{round_}"
        receipts = await asyncio.gather(
            *(service.submitter.submit(created(tenant, round_), key=key(name)) for service in (one, two, one, two))
        )
        assert len({receipt._replace(replayed=False) for receipt in receipts}) == 1
        assert [receipt.replayed for receipt in receipts].count(False) == 1
    assert numbers(await chains.sound(tenant)) == list(range(10))


async def test_one_key_with_two_bodies_on_two_nodes_is_refused_on_one(pair: Pair, tenant: str) -> None:
    one, two, chains = pair
    for round_ in range(10):
        results = await asyncio.gather(
            one.submitter.submit(created(tenant, round_), key=key(f"key-{round_}", "first")),
            two.submitter.submit(created(tenant, round_), key=key(f"key-{round_}", "second")),
            return_exceptions=True,
        )
        kinds = sorted(type(result).__name__ for result in results)
        assert kinds == ["IdempotencyReusedError", "Receipt"]
    assert numbers(await chains.sound(tenant)) == list(range(10))


async def test_a_row_that_another_node_began_meanwhile_is_locked_not_begun_again(pair: Pair, tenant: str) -> None:
    tenants = [f"{tenant}-{n:02}" for n in range(20)]
    one, two, chains = pair
    await asyncio.gather(
        *(
            service.submitter.submit(created(each, n), key=None)
            for n, service in enumerate((one, two))
            for each in (tenants if service is one else reversed(tenants))
        )
    )
    for each in tenants:
        assert sorted(numbers(await chains.sound(each))) == [0, 1]
    assert await pair.begun(*tenants) == [f"tenant:{each}" for each in tenants]


async def test_what_is_written_after_an_entry_of_another_node_has_a_later_hlc(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    # Far enough ahead that no wait of this test reaches it, and within what is learnt from.
    skew = {"max_clock_skew": "10m"}
    async with (
        run_node(make_settings("one", hlc=skew)) as one,
        run_node(make_settings("two", hlc=skew)) as two,
    ):
        one.node.clock.observe(Hlc(time.time_ns() // 1_000_000 + 300_000, 7, one.node.node_id))
        ahead = await one.submitter.submit(created("acme", 1), key=None)
        meeting = await two.submitter.submit(created("acme", 2), key=None)
        assert Hlc.parse(meeting.hlc) < Hlc.parse(ahead.hlc)
        later = await two.submitter.submit(created("acme", 3), key=None)
        assert Hlc.parse(later.hlc) > Hlc.parse(ahead.hlc)
        assert two.node.clock.skew_rejections == 0
        one.node.clock.observe(Hlc(time.time_ns() // 1_000_000 + 400_000, 7, one.node.node_id))
        ahead = await one.submitter.submit(created("acme", 4), key=None)
    async with run_node(make_settings("three", hlc=skew)) as three:
        later = await three.submitter.submit(created("beta", 5), key=None)
        assert Hlc.parse(later.hlc) > Hlc.parse(ahead.hlc)
    assert numbers(await chains.sound("acme")) == [1, 2, 3, 4]


async def test_an_entry_of_another_node_from_far_ahead_does_not_move_the_clock(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    async with run_node(make_settings("one")) as one, run_node(make_settings("two")) as two:
        one.node.clock.observe(Hlc(time.time_ns() // 1_000_000 + 3_600_000, 0, one.node.node_id))
        ahead = await one.submitter.submit(created("acme", 1), key=None)
        for n in (2, 3):
            receipt = await two.submitter.submit(created("acme", n), key=None)
            assert Hlc.parse(receipt.hlc) < Hlc.parse(ahead.hlc)
        assert two.node.clock.skew_rejections > 0
    assert numbers(await chains.sound("acme")) == [1, 2, 3]


async def test_a_job_row_that_someone_damaged_does_not_stop_the_chain(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    async with run_node(make_settings("node")) as service:
        job = await service.submitter.submit(created("acme", 1), key=None)
    await superuser.execute("UPDATE scheduler.jobs SET seqs = '{7}'")
    async with run_node(make_settings("node")) as service:
        receipt = await service.submitter.submit(accepted("acme", job.job_id, "dc1"), key=None)
        assert receipt.chain is not None
        assert receipt.chain.seq == 2
        assert service.node.failure is None
