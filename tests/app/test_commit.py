"""A batch is committed whole where the chains are as they were read, or not at all: in one statement, with COPY, or of
rows that were copied first."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import asyncpg
import httpx
import pytest
from asyncpg.transaction import Transaction

from app.node.service import Service
from app.store import chaining, commit
from app.store.appended import head_of
from app.store.chaining import ChainHead, LogRows, Step
from app.store.commit import (
    Answer,
    Batch,
    Committed,
    Fenced,
    HeadsMoved,
    KeysChained,
    RowRefused,
    RowsLocked,
    TenantDamaged,
)
from app.store.sessions import Connection
from app.write.chain.pipeline import NextBatch, Pipeline
from app.write.pending.backlog import Pending
from app.write.pending.linking import ChainView, LinkedBatch, link
from app.write.pending.quarantine import Quarantine
from app.write.pending.requests import EventLines
from ledger.chain.record import IdempotencyKey
from ledger.errors import IdempotencyReusedError
from ledger.facts.events import JOB_EVENTS, Durability
from ledger.hlc import Hlc
from ledger.positions import Epoch, Lsn
from tests.app.chain_builder import unguarded
from tests.app.chains import Chains, Entry, committed, numbers, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import created, key
from tests.app.postgres_proxy import PostgresProxy, Trap
from tests.app.test_commitments import free, placement, propose
from tests.conftest import Database, connected_to

EMPTY = ChainHead(0, None, None)
KEY = IdempotencyKey(1, "k", 0, b"a" * 32)
STEP = Step("node-1", Epoch(3), Lsn(10), Lsn(20), Lsn(25))
NOTHING = {"rows": 0, "keys": 0, "heads": {"acme": 0, "beta": 0}, "position": (10, 10)}
ALL = {"rows": 3, "keys": 1, "heads": {"acme": 2, "beta": 1}, "position": (20, 25)}
SMALL, LARGE, PIPELINED = 200, 0, -1
BATCH_ENTRIES = 7
"""Records in a batch of the tests with a node."""


def event(number: int, tenant_id: str, key: IdempotencyKey | None = None) -> Pending:
    kind, payload = JOB_EVENTS["JobCreated"].record_type, b'{"n":%d}' % number
    return Pending(Lsn(number), Epoch(3), Hlc(2, number, "n"), kind, tenant_id, f"j{number}", payload, key, None)


EVENTS = (event(11, "acme"), event(12, "beta", KEY), event(13, "acme"))


def linked(events: Sequence[Pending] = EVENTS) -> LinkedBatch:
    return link(events, ChainView(heads={each.tenant_id: EMPTY for each in events}), {})


def to_commit(batch: LinkedBatch | None = None, step: Step = STEP, *, are_keys_checked: bool = False) -> Batch:
    batch = batch or linked()
    moves = [(name, EMPTY, head_of(links)) for name, links in batch.links.items()]
    return Batch(step, moves, batch.log_rows, batch.keyed_rows, are_keys_checked=are_keys_checked)


@pytest.fixture(scope="module")
async def admin(shared_database: Database) -> AsyncIterator[asyncpg.Connection]:
    """A superuser's connection to the database of the tests without a node."""
    async with connected_to(shared_database.superuser_url) as connection:
        yield connection


@pytest.fixture
async def connection(shared_database: Database, admin: asyncpg.Connection) -> AsyncIterator[Connection]:
    """Of node-1, whose position is where ``STEP`` begins; tenants acme and beta have no entry. What tests before left
    there is gone; checks of heads, which one of them takes away, do not come back."""
    async with unguarded(admin):
        for table in ("scheduler_log", "idempotency", "chain_heads", "wal_positions"):
            await admin.execute(f"DELETE FROM scheduler.{table}")
    await admin.execute("DROP FUNCTION IF EXISTS scheduler.harm() CASCADE")
    await admin.execute("INSERT INTO scheduler.chain_heads (tenant_id, head_seq) VALUES ('acme', 0), ('beta', 0)")
    await admin.execute("INSERT INTO scheduler.wal_positions VALUES ('node-1', 'w', 3, 10, 10)")
    connection = await chaining.connect(shared_database.service_url, 10, 10)
    yield connection
    connection.terminate()


@pytest.fixture(params=[SMALL, LARGE], ids=["in one statement", "copied"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs with a batch that is small, and with one that is large."""
    monkeypatch.setattr(commit, "ROWS_IN_STATEMENT_MAX", request.param)


@pytest.fixture(params=[SMALL, LARGE, PIPELINED], ids=["in one statement", "copied", "pipelined"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``both``, and with rows that are copied before the fence is passed."""
    monkeypatch.setattr(commit, "ROWS_IN_STATEMENT_MAX", request.param)
    committing = commit.commit

    async def copied_first(connection: Connection, batch: Batch) -> Answer:
        return await committing(connection, batch, copied=await commit.copy_first(connection, batch.rows))

    if request.param == PIPELINED:
        monkeypatch.setattr(commit, "commit", copied_first)


@pytest.mark.usefixtures("each_way")
async def test_rows_keys_heads_and_position_are_committed_together(
    connection: Connection, admin: asyncpg.Connection
) -> None:
    batch = linked()
    assert await commit.commit(connection, to_commit(batch)) == Committed()
    assert await committed(admin) == ALL
    columns = ", ".join(chaining.LOG_COLUMNS)
    rows = await admin.fetch(f"SELECT {columns} FROM scheduler.scheduler_log ORDER BY tenant_id, seq")
    assert sorted(map(tuple, rows)) == sorted(batch.log_rows)
    columns = "tenant_id, route, key, line, body_digest, seq, epoch, lsn"
    rows = await admin.fetch(f"SELECT {columns} FROM scheduler.idempotency")
    assert [(*row, 0) for row in rows] == batch.keyed_rows
    ends = {tenant: ChainHead(*head) for tenant, *head in batch.heads()}
    assert await chaining.read_heads(admin) == ends


@pytest.mark.parametrize("job_id", ["a\nb", "\n", ""])
async def test_a_text_that_a_statement_would_read_as_another_is_stored_as_it_is(
    connection: Connection, admin: asyncpg.Connection, job_id: str
) -> None:
    odd = event(12, "beta", KEY)
    odd.job_id = job_id
    assert await commit.commit(connection, to_commit(linked((EVENTS[0], odd, EVENTS[2])))) == Committed()
    assert await committed(admin) == ALL
    assert await admin.fetchval("SELECT job_id FROM scheduler.scheduler_log WHERE tenant_id = 'beta'") == job_id


async def test_a_batch_of_one_has_no_values_but_its_own(connection: Connection, admin: asyncpg.Connection) -> None:
    batch = linked(EVENTS[:1])
    assert await commit.commit(connection, to_commit(batch)) == Committed()
    rows = await admin.fetch(f"SELECT {', '.join(chaining.LOG_COLUMNS)} FROM scheduler.scheduler_log")
    assert list(map(tuple, rows)) == [*batch.log_rows]


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize(
    "step",
    [STEP._replace(epoch=Epoch(2)), STEP._replace(old_chained_lsn=Lsn(9)), STEP._replace(node_id="node-2")],
    ids=["epoch", "position", "node"],
)
async def test_nothing_passes_the_fence_of_another(
    connection: Connection, admin: asyncpg.Connection, step: Step, is_empty: bool
) -> None:
    batch = to_commit(LinkedBatch() if is_empty else linked(), step)
    assert await commit.commit(connection, batch) == Fenced()
    assert await committed(admin) == NOTHING


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    "change",
    [
        f"UPDATE scheduler.chain_heads SET head_seq = 1, head_chain_link = '{'ab' * 32}', head_hlc = '1:0:m'",
        "UPDATE scheduler.chain_heads SET head_seq = 1",
        f"UPDATE scheduler.chain_heads SET head_chain_link = '{'ab' * 32}'",
        "UPDATE scheduler.chain_heads SET head_hlc = '1:0:m'",
        "DELETE FROM scheduler.chain_heads",
    ],
)
async def test_nothing_is_chained_onto_another_head_than_it_was_linked_to(
    connection: Connection, admin: asyncpg.Connection, change: str
) -> None:
    for guard in ("seq", "link", "hlc"):
        await admin.execute(f"ALTER TABLE scheduler.chain_heads DROP CONSTRAINT IF EXISTS chain_heads_{guard}")
    await admin.execute(f"{change} WHERE tenant_id = 'beta'")
    before = await committed(admin)
    assert await commit.commit(connection, to_commit()) == HeadsMoved()
    assert await committed(admin) == before


async def test_a_chain_that_another_node_began_is_not_begun_again(
    connection: Connection, admin: asyncpg.Connection
) -> None:
    batch = linked([event(11, "gamma")])
    begins = Batch(STEP, to_commit(batch).moves, batch.log_rows, new_chains={"gamma"})
    await admin.execute("INSERT INTO scheduler.chain_heads (tenant_id, head_seq) VALUES ('gamma', 0)")
    assert await commit.commit(connection, begins) == HeadsMoved()
    await admin.execute("DELETE FROM scheduler.chain_heads WHERE tenant_id = 'gamma'")
    assert await commit.commit(connection, begins) == Committed()
    assert (await committed(admin))["heads"] == {"acme": 0, "beta": 0, "gamma": 1}


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize(
    ("line", "digest"), [(0, b"a" * 32), (0, b"b" * 32), (7, b"b" * 32)], ids=["same", "other body", "other line"]
)
async def test_nothing_is_chained_of_a_batch_with_a_key_that_the_chain_has(
    connection: Connection, admin: asyncpg.Connection, line: int, digest: bytes
) -> None:
    await admin.execute("INSERT INTO scheduler.idempotency VALUES ('beta', 1, 'k', $1, $2, 1, 1, 1)", line, digest)
    assert await commit.commit(connection, to_commit()) == KeysChained()
    assert await committed(admin) == {**NOTHING, "keys": 1}


@pytest.mark.usefixtures("each_way")
async def test_lines_are_added_to_a_key_of_which_it_is_known_what_the_chain_has(
    connection: Connection, admin: asyncpg.Connection
) -> None:
    await admin.execute("INSERT INTO scheduler.idempotency VALUES ('beta', 1, 'k', 7, $1, 1, 1, 1)", b"a" * 32)
    assert await commit.commit(connection, to_commit(are_keys_checked=True)) == Committed()
    assert await committed(admin) == {**ALL, "keys": 2}


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("known", [0, 1, 2])
async def test_a_request_goes_on_while_the_chain_has_no_other_lines_of_it_than_this_node_stored(
    connection: Connection, admin: asyncpg.Connection, known: int
) -> None:
    await admin.execute("INSERT INTO scheduler.idempotency VALUES ('beta', 1, 'k', 7, $1, 1, 1, 1)", b"a" * 32)
    batch = to_commit()
    ((*row, _),) = batch.keyed
    answer = await commit.commit(connection, dataclasses.replace(batch, keyed=[(*row, known)]))
    assert answer == (Committed() if known == 1 else KeysChained())
    assert (await committed(admin))["keys"] == (2 if known == 1 else 1)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize(
    ("event", "table", "does"),
    [
        ("INSERT", "scheduler_log", "RETURN NULL"),
        ("INSERT", "idempotency", "RETURN NULL"),
        ("UPDATE", "chain_heads", "RETURN NULL"),
        ("UPDATE", "chain_heads", "NEW.head_seq := NEW.head_seq + 1; RETURN NEW"),
    ],
)
async def test_all_is_stored_or_nothing(
    connection: Connection, admin: asyncpg.Connection, event: str, table: str, does: str
) -> None:
    await admin.execute(
        f"CREATE FUNCTION scheduler.harm() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {does}; END $$;"
        f"CREATE TRIGGER harm BEFORE {event} ON scheduler.{table} FOR EACH ROW EXECUTE FUNCTION scheduler.harm()"
    )
    answer = await commit.commit(connection, to_commit())
    assert isinstance(answer, TenantDamaged)
    assert answer.error.tenant_id in ("acme", "beta")
    assert await committed(admin) == NOTHING


@pytest.mark.usefixtures("each_way")
async def test_a_position_that_a_trigger_keeps_is_not_passed(connection: Connection, admin: asyncpg.Connection) -> None:
    await admin.execute(
        "CREATE FUNCTION scheduler.harm() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;"
        "CREATE TRIGGER harm BEFORE UPDATE ON scheduler.wal_positions FOR EACH ROW EXECUTE FUNCTION scheduler.harm()"
    )
    assert await commit.commit(connection, to_commit()) == Fenced()
    assert await committed(admin) == NOTHING


@pytest.mark.usefixtures("both")
async def test_rows_that_are_there_already_are_refused_and_the_connection_is_used_again(
    connection: Connection, admin: asyncpg.Connection
) -> None:
    assert await commit.commit(connection, to_commit()) == Committed()
    await admin.execute("UPDATE scheduler.chain_heads SET head_seq = 0, head_chain_link = NULL, head_hlc = NULL")
    again = STEP._replace(old_chained_lsn=Lsn(20), new_chained_lsn=Lsn(30))
    answer = await commit.commit(connection, to_commit(linked(EVENTS[::2]), again))
    assert isinstance(answer, RowRefused)
    assert answer.is_duplicate
    assert (await committed(admin))["position"] == (20, 25)
    assert await commit.commit(connection, to_commit(LinkedBatch(), again)) == Committed()


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("is_moved", [True, False])
async def test_a_commit_that_waits_for_a_head_sees_it_as_it_was_left(
    connection: Connection, shared_database: Database, admin: asyncpg.Connection, is_moved: bool
) -> None:
    async with connected_to(shared_database.service_url) as other:
        transaction = other.transaction()
        await transaction.start()
        await chaining.lock_heads(other, ["acme"])
        if is_moved:
            await chaining.move_heads(other, [("acme", 1, "ab" * 32, "1:0:m")])
        waiting = asyncio.create_task(commit.commit(connection, to_commit()))
        waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock')"
        await until(lambda: admin.fetchval(waits, connection.get_server_pid()), "it waits for the lock")
        await transaction.commit()
        assert await waiting == (HeadsMoved() if is_moved else Committed())
    assert await committed(admin) == ({**NOTHING, "heads": {"acme": 1, "beta": 0}} if is_moved else ALL)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("is_taken_over", [True, False])
async def test_a_commit_that_waits_for_its_position_sees_who_took_over_meanwhile(
    connection: Connection, shared_database: Database, admin: asyncpg.Connection, is_taken_over: bool
) -> None:
    async with connected_to(shared_database.service_url) as other:
        transaction = other.transaction()
        await transaction.start()
        epoch = 4 if is_taken_over else 3
        await other.execute("UPDATE scheduler.wal_positions SET epoch = $1 WHERE node_id = 'node-1'", epoch)
        waiting = asyncio.create_task(commit.commit(connection, to_commit()))
        waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock')"
        await until(lambda: admin.fetchval(waits, connection.get_server_pid()), "it waits for the lock")
        await transaction.commit()
        assert await waiting == (Fenced() if is_taken_over else Committed())
    assert await committed(admin) == (NOTHING if is_taken_over else ALL)


@pytest.mark.usefixtures("both")
async def test_a_head_that_stays_locked_is_not_waited_for(
    connection: Connection, shared_database: Database, admin: asyncpg.Connection
) -> None:
    await connection.execute("SET lock_timeout = '50ms'")
    async with connected_to(shared_database.service_url) as other, other.transaction():
        await chaining.lock_heads(other, ["acme"])
        assert isinstance(await commit.commit(connection, to_commit()), RowsLocked)
    assert await committed(admin) == NOTHING


async def test_who_holds_a_head_and_stores_in_the_same_place_goes_first(
    connection: Connection, shared_database: Database, admin: asyncpg.Connection
) -> None:
    # Nobody waits for a deadlock to be found.
    await admin.execute(f"ALTER DATABASE {shared_database.name} SET deadlock_timeout = '1h'")
    batch = to_commit()
    async with connected_to(shared_database.service_url) as other, other.transaction():
        copied = await commit.copy_first(connection, batch.rows)
        await chaining.lock_heads(other, ["acme", "beta"])
        copying = asyncio.create_task(chaining.copy_entries(other, batch.rows))
        # Each waits for the other, and only the one that copied first gives way.
        assert isinstance(await commit.commit(connection, batch, copied=copied), RowsLocked)
        await copying
        await chaining.move_heads(other, linked().heads())
    assert await committed(admin) == {**ALL, "keys": 0, "position": (10, 10)}
    await admin.execute(f"ALTER DATABASE {shared_database.name} RESET deadlock_timeout")


# --- a node -------------------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """What became of each batch of entries of tenants that was committed."""
    given: list[Answer] = []
    committing = commit.commit

    async def noted(connection: Connection, batch: Batch, **how: Any) -> Answer:
        answer = await committing(connection, batch, **how)
        if {tenant_id for tenant_id, *_ in batch.moves} - {"_system"}:
            given.append(answer)
        return answer

    monkeypatch.setattr(commit, "commit", noted)
    return given


@pytest.fixture(params=[SMALL, LARGE, PIPELINED], ids=["in one statement", "copied", "pipelined"])
def small_batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a node are small, and go each way."""
    monkeypatch.setattr("app.write.chain.appender.BATCH_ENTRIES_MAX", BATCH_ENTRIES)
    monkeypatch.setattr(commit, "ROWS_IN_STATEMENT_MAX", request.param)
    monkeypatch.setattr("app.write.chain.appender.PIPELINED_ENTRIES_MIN", 1 if request.param == PIPELINED else 10_000)
    monkeypatch.setattr("app.write.chain.pipeline.PAUSE_S", 0)


async def submitted(service: Service, tenant_ids: tuple[str, ...], ns: range, keyed: bool = False) -> None:
    drafts = {n: created(tenant_ids[n % len(tenant_ids)], n) for n in ns}
    await asyncio.gather(
        *(service.submitter.submit(draft, key=key(f"k{n}") if keyed else None) for n, draft in drafts.items())
    )


async def all_of(chains: Chains, tenant_ids: tuple[str, ...]) -> list[Entry]:
    return [entry for tenant_id in tenant_ids for entry in await chains.sound(tenant_id)]


@pytest.mark.usefixtures("small_batches")
async def test_batches_that_follow_one_another_are_chained_in_order(
    run_node: RunNode, chains: Chains, answers: list[Answer]
) -> None:
    tenants = ("acme", "beta", "gamma")
    async with run_node() as service:
        await submitted(service, tenants, range(3))
        await submitted(service, tenants, range(3, 100))
        await submitted(service, tenants, range(100, 150), keyed=True)
        assert len(answers) > 20
        assert set(answers) == {Committed()}
        entries = await all_of(chains, tenants)
        assert sorted(numbers(entries)) == list(range(150))
        for tenant in tenants:
            hlcs = [Hlc.parse(entry["t_hlc"]) for entry in entries if entry["tenant_id"] == tenant]
            assert hlcs == sorted(hlcs)


@pytest.mark.usefixtures("small_batches")
async def test_connections_lost_around_commit_of_batches_among_many(
    run_node: RunNode, proxy: PostgresProxy, chains: Chains, answers: list[Answer]
) -> None:
    async with run_node(url=proxy.url) as service:
        await submitted(service, ("acme",), range(1))
        end = 1
        for trap in (Trap.BEFORE_COMMIT, Trap.AFTER_COMMIT, Trap.AT_COMMIT):
            sprung_before = proxy.sprung
            writing = asyncio.create_task(submitted(service, ("acme",), range(end, end + 100)))
            end += 100
            for sprung in (sprung_before + 1, sprung_before + 2):
                before = len(answers)
                await until(
                    lambda writing=writing, before=before: writing.done() or len(answers) > before, "some are chained"
                )
                proxy.set_traps(trap)
                await until(
                    lambda writing=writing, sprung=sprung: writing.done() or proxy.sprung == sprung,
                    "a connection was lost",
                )
            await writing
            proxy.set_traps()
            assert proxy.sprung > sprung_before, trap
            assert sorted(numbers(await chains.sound("acme"))) == list(range(end)), trap
        assert service.node.failure is None


@pytest.mark.usefixtures("small_batches")
async def test_two_nodes_that_write_to_the_same_tenants_make_one_chain_of_each(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, answers: list[Answer]
) -> None:
    tenants = ("acme", "beta")
    async with run_node(make_settings("one")) as one, run_node(make_settings("two")) as two:
        await submitted(one, tenants, range(2))
        await asyncio.gather(submitted(one, tenants, range(2, 60)), submitted(two, tenants, range(60, 120)))
        for n, service in enumerate((one, two, one)):
            await submitted(service, tenants, range(120 + 2 * n, 122 + 2 * n))
        assert sorted(numbers(await all_of(chains, tenants))) == list(range(126))
        assert {one.appender.database_error, two.appender.database_error} == {None}
        assert HeadsMoved() in answers


async def test_a_pipelined_batch_is_good_only_for_its_batch_and_the_heads_it_was_linked_onto(
    connection: Connection, shared_database: Database, admin: asyncpg.Connection
) -> None:
    pipeline = Pipeline(lambda: chaining.connect(shared_database.service_url, 10, 10))
    heads = {"acme": EMPTY, "beta": EMPTY}
    moved = {**heads, "beta": ChainHead(1, "ab" * 32, "1:0:m")}
    following = NextBatch(EVENTS, heads, linked())
    pipeline.start(following)
    assert pipeline.linked(EVENTS, heads) is following.linked
    taken = await pipeline.take(connection)
    assert taken is not None
    taken.connection.terminate()
    assert not pipeline.is_paused
    for batch, onto in ((EVENTS, moved), (EVENTS[:2], heads)):
        pipeline.start(following)
        assert pipeline.linked(batch, onto) is None
        assert not pipeline.batch
        assert pipeline.is_paused
    idle = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = $1 AND state LIKE 'idle in transaction%')"
    await until(lambda: admin.fetchval(idle, shared_database.name), "the transactions are rolled back")
    assert await committed(admin) == NOTHING


async def test_a_node_waits_for_a_locked_head_with_a_pipelined_batch_too(
    run_node: RunNode,
    chains: Chains,
    database: Database,
    answers: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.write.chain.appender.BATCH_ENTRIES_MAX", BATCH_ENTRIES)
    passed_over: list[str] = []
    copy_first, begin_wait = commit.copy_first, Quarantine.begin_wait

    def noted(quarantine: Quarantine, tenant_id: str, *given: Any) -> None:
        passed_over.append(tenant_id)
        begin_wait(quarantine, tenant_id, *given)

    async with connected_to(database.service_url) as other, run_node() as service:
        transaction, locking = other.transaction(), list[asyncio.Task[object]]()

        async def then_lock(connection: Connection, rows: LogRows) -> Transaction:
            copied = await copy_first(connection, rows)
            if not locking:  # It has the lock as soon as the batch before is committed.
                locking.append(asyncio.create_task(chaining.lock_heads(other, ["acme"])))
            return copied

        await submitted(service, ("acme",), range(1))
        monkeypatch.setattr(Quarantine, "begin_wait", noted)
        monkeypatch.setattr("app.write.chain.pipeline.copy_first", then_lock)
        monkeypatch.setattr(commit, "ROWS_IN_STATEMENT_MAX", 0)
        monkeypatch.setattr("app.write.chain.appender.PIPELINED_ENTRIES_MIN", 1)
        await transaction.start()
        writing = asyncio.create_task(submitted(service, ("acme",), range(1, 60)))
        await until(lambda: any(isinstance(each, RowsLocked) for each in answers), "a commit met the lock")
        await transaction.commit()
        await writing
        assert numbers(await chains.sound("acme")) == list(range(60))
    assert passed_over == []


@pytest.mark.parametrize("way", ["copied", "pipelined"])
async def test_full_batches_behind_one_another_are_pipelined(
    run_node: RunNode, chains: Chains, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    entries_min = 5 if way == "pipelined" else BATCH_ENTRIES + 1
    monkeypatch.setattr(commit, "ROWS_IN_STATEMENT_MAX", 0)
    monkeypatch.setattr("app.write.chain.appender.BATCH_ENTRIES_MAX", BATCH_ENTRIES)
    monkeypatch.setattr("app.write.chain.appender.PIPELINED_ENTRIES_MIN", entries_min)
    copied: list[int] = []
    copy_first = commit.copy_first

    async def counted(connection: Connection, rows: LogRows) -> Transaction:
        copied.append(len(rows))
        return await copy_first(connection, rows)

    monkeypatch.setattr("app.write.chain.pipeline.copy_first", counted)
    async with run_node() as service:
        await submitted(service, ("acme", "beta"), range(2))
        await submitted(service, ("acme", "beta"), range(2, 300))
        assert sorted(numbers(await all_of(chains, ("acme", "beta")))) == list(range(300))
    assert (sum(copied) > 100) is (way == "pipelined")
    assert max(copied, default=0) <= BATCH_ENTRIES


async def test_a_key_that_another_node_chained_is_found(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    async with run_node(make_settings("one")) as one, run_node(make_settings("two")) as two:
        for n, service in enumerate((one, two)):
            await submitted(service, ("acme",), range(n, n + 1))
        first, second = await asyncio.gather(
            *(service.submitter.submit(created("acme", 7), key=key("same")) for service in (one, two))
        )
        assert first._replace(replayed=False) == second._replace(replayed=False)
        reused = [service.submitter.submit(created("acme", 8), key=key("same", "other")) for service in (one, two)]
        for refused in await asyncio.gather(*reused, return_exceptions=True):
            assert isinstance(refused, IdempotencyReusedError)
        assert sorted(numbers(await chains.sound("acme"))) == [0, 1, 7]


@pytest.mark.usefixtures("small_batches")
async def test_a_keyed_request_of_several_batches_is_linked_once_and_answered_alike_again(
    run_node: RunNode, chains: Chains, answers: list[Answer]
) -> None:
    tenants = ("acme", "beta")
    async with run_node() as service:
        await submitted(service, tenants, range(2))
        lines = EventLines.of([created(tenants[n % 2], n) for n in range(2, 60)])
        ask = partial(service.submitter.submit_lines, lines, durability=Durability.GLOBAL, key=key("many"))
        first = await ask()
        assert answers.count(KeysChained()) == 0
        assert len(answers) > 8
        assert await ask() == first._replace(replayed=True)
        assert sorted(numbers(await all_of(chains, tenants))) == list(range(60))


async def test_a_key_that_comes_again_costs_no_other_batch_anything(
    run_server: RunServer, answers: list[Answer]
) -> None:
    async with run_server() as client:
        first, again = [await propose(client, placement("c1", "n1"), key="same") for _ in range(2)]
        assert again.headers["Idempotent-Replay"] == "true"
        assert first.content == again.content
        await propose(client, placement("c2", "n1"))
        assert answers[-2:] == [KeysChained(), Committed()]


async def test_two_nodes_that_judge_for_one_tenant_make_one_chain_and_book_nothing_twice(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains, answers: list[Answer]
) -> None:
    async def race(client: httpx.AsyncClient, who: str) -> list[int]:
        statuses = []
        for first in range(0, 40, 8):
            bets = (propose(client, placement(f"{who}{n}", f"n{n}"), free(f"n{n}")) for n in range(first, first + 8))
            statuses += [answer.status_code for answer in await asyncio.gather(*bets)]
        return statuses

    async with run_server(make_settings("one")) as one, run_server(make_settings("two")) as two:
        statuses = await asyncio.gather(race(one, "a"), race(two, "b"))
        assert [sorted(pair) for pair in zip(*statuses, strict=True)] == [[201, 409]] * 40
        actions = [entry["action"] for entry in await chains.sound("acme")]
        assert (actions.count("PROPOSE_ACCEPTED"), actions.count("PROPOSE_REJECTED")) == (40, 40)
        verdict = (await two.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
        assert (verdict["valid"], verdict["verdicts"]["projection"]) == (True, "ok")
    assert {Committed(), HeadsMoved()} == set(answers)


@pytest.mark.usefixtures("small_batches")
async def test_a_record_that_postgres_refuses_is_found_in_its_batch(
    run_node: RunNode, chains: Chains, superuser: asyncpg.Connection, answers: list[Answer]
) -> None:
    await superuser.execute(
        "ALTER TABLE scheduler.scheduler_log ADD CONSTRAINT no_13"
        " CHECK (action = 'REFUSED' OR payload::text !~ '\"n\":13[,}]')"
    )
    async with run_node() as service:
        await submitted(service, ("acme",), range(1))
        submitting = (service.submitter.submit(created("acme", n), key=None) for n in range(1, 20))
        given = await asyncio.gather(*submitting, return_exceptions=True)
        assert [n for n, answer in enumerate(given, 1) if isinstance(answer, BaseException)] == [13]
        assert any(isinstance(each, RowRefused) for each in answers)
        assert len(await chains.sound("acme")) == 20
