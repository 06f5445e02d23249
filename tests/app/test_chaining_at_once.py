"""A small batch is chained in one statement where all is as the node knows it, and in the usual way where it is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import cast

import asyncpg
import httpx
import pytest

from app.node.service import Service
from app.store import chaining
from app.store.chaining import ChainHead, Step
from app.store.chaining_at_once import AtOnce
from app.store.entry_check import EntryCheck
from app.store.reading import Pool
from app.write.chain.at_once import ENTRIES_MAX, LinkedAtOnce, LinkingAtOnce
from app.write.chain.promised import Promised
from app.write.pending.backlog import Pending
from ledger.chain.record import IdempotencyKey
from ledger.errors import IdempotencyReusedError
from ledger.facts.events import JOB_EVENTS, SYSTEM_TENANT
from ledger.hlc import Hlc
from ledger.positions import Epoch, Lsn
from tests.app.chains import Chains, committed, numbers, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import created, key
from tests.app.test_commitments import free, placement, propose
from tests.conftest import Database, connected_to

EMPTY = ChainHead(0, None, None)
KEY = IdempotencyKey(1, "k", 0, b"a" * 32)
STEP = Step("node-1", Epoch(3), Lsn(10), Lsn(20), Lsn(25))
NOTHING = {"rows": 0, "keys": 0, "heads": {"acme": 0, "beta": 0}, "position": (10, 10)}
ALL = {"rows": 3, "keys": 1, "heads": {"acme": 2, "beta": 1}, "position": (20, 25)}
CREATED = JOB_EVENTS["JobCreated"].record_type


def event(number: int, tenant_id: str, key: IdempotencyKey | None = None, kind: int = CREATED) -> Pending:
    payload = b'{"n":%d}' % number
    return Pending(Lsn(number), Epoch(3), Hlc(2, number, "n"), kind, tenant_id, f"j{number}", payload, key, None)


PROMISED = Promised(EntryCheck(lambda tenant_id: None), cast(Pool, None))
BATCH = (event(11, "acme"), event(12, "beta", KEY), event(13, "acme"))


def linked(known: Mapping[str, ChainHead] | None = None) -> LinkedAtOnce:
    at_once = LinkingAtOnce(known or {"acme": EMPTY, "beta": EMPTY}, PROMISED, {}).link(BATCH)
    assert at_once is not None
    return at_once


@pytest.fixture
async def connection(
    database: Database, superuser: asyncpg.Connection
) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """Of node-1, which stands where ``STEP`` begins; tenants acme and beta have no entry."""
    await superuser.execute("INSERT INTO scheduler.chain_heads (tenant_id, head_seq) VALUES ('acme', 0), ('beta', 0)")
    await superuser.execute("INSERT INTO scheduler.wal_positions VALUES ('node-1', 'w', 3, 10, 10)")
    connection = await chaining.connect(database.service_url, 10, 10)
    yield connection
    connection.terminate()


async def test_rows_keys_heads_and_position_are_committed_by_one_statement(
    connection: asyncpg.Connection[asyncpg.Record], superuser: asyncpg.Connection
) -> None:
    at_once = linked()
    assert await at_once.commit(connection, STEP) is AtOnce.CHAINED
    assert await committed(superuser) == ALL
    columns = ", ".join(chaining.LOG_COLUMNS)
    rows = await superuser.fetch(f"SELECT {columns} FROM scheduler.scheduler_log ORDER BY tenant_id, seq")
    assert sorted(map(tuple, rows)) == sorted(at_once.linked.log_rows)
    columns = "tenant_id, route, key, line, body_digest, seq, epoch, lsn"
    rows = await superuser.fetch(f"SELECT {columns} FROM scheduler.idempotency")
    assert [tuple(row) for row in rows] == at_once.linked.idempotency_rows
    ends = {tenant: ChainHead(*head) for tenant, *head in at_once.linked.heads()}
    assert await chaining.read_heads(superuser) == ends


@pytest.mark.parametrize("job_id", ["a\nb", "\n", ""])
async def test_a_text_that_would_be_read_as_another_is_not_sent(
    connection: asyncpg.Connection[asyncpg.Record], superuser: asyncpg.Connection, job_id: str
) -> None:
    odd = event(12, "beta", KEY)
    odd.job_id = job_id
    at_once = LinkingAtOnce({"acme": EMPTY, "beta": EMPTY}, PROMISED, {}).link((BATCH[0], odd, BATCH[2]))
    assert at_once is not None
    assert await at_once.commit(connection, STEP) is AtOnce.UNSENT
    assert await committed(superuser) == NOTHING


async def test_a_batch_of_one_has_no_values_but_its_own(
    connection: asyncpg.Connection[asyncpg.Record], superuser: asyncpg.Connection
) -> None:
    at_once = LinkingAtOnce({"acme": EMPTY}, PROMISED, {}).link(BATCH[:1])
    assert at_once is not None
    assert await at_once.commit(connection, STEP) is AtOnce.CHAINED
    rows = await superuser.fetch(f"SELECT {', '.join(chaining.LOG_COLUMNS)} FROM scheduler.scheduler_log")
    assert list(map(tuple, rows)) == [*at_once.linked.log_rows]


@pytest.mark.parametrize(
    "step",
    [STEP._replace(epoch=Epoch(2)), STEP._replace(old_chained_lsn=Lsn(9)), STEP._replace(node_id="node-2")],
    ids=["epoch", "position", "node"],
)
async def test_nothing_passes_the_fence_of_another(
    connection: asyncpg.Connection[asyncpg.Record], superuser: asyncpg.Connection, step: Step
) -> None:
    assert await linked().commit(connection, step) is AtOnce.ELSEWHERE
    assert await committed(superuser) == NOTHING


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
    connection: asyncpg.Connection[asyncpg.Record], superuser: asyncpg.Connection, change: str
) -> None:
    for guard in ("seq", "link", "hlc"):
        await superuser.execute(f"ALTER TABLE scheduler.chain_heads DROP CONSTRAINT IF EXISTS chain_heads_{guard}")
    await superuser.execute(f"{change} WHERE tenant_id = 'beta'")
    before = await committed(superuser)
    assert await linked().commit(connection, STEP) is AtOnce.ELSEWHERE
    assert await committed(superuser) == before


@pytest.mark.parametrize(
    ("line", "digest"), [(0, b"a" * 32), (0, b"b" * 32), (7, b"b" * 32)], ids=["same", "other body", "other line"]
)
async def test_nothing_is_chained_of_a_batch_with_a_key_that_the_chain_has(
    connection: asyncpg.Connection[asyncpg.Record], superuser: asyncpg.Connection, line: int, digest: bytes
) -> None:
    await superuser.execute("INSERT INTO scheduler.idempotency VALUES ('beta', 1, 'k', $1, $2, 1, 1, 1)", line, digest)
    assert await linked().commit(connection, STEP) is AtOnce.KEYED
    assert await committed(superuser) == {**NOTHING, "keys": 1}


@pytest.mark.parametrize(
    ("event", "table"),
    [
        ("INSERT", "scheduler_log"),
        ("INSERT", "idempotency"),
        ("UPDATE", "chain_heads"),
        ("UPDATE", "wal_positions"),
    ],
)
@pytest.mark.parametrize("does", ["RETURN NULL", "NEW.head_seq := NEW.head_seq + 1; RETURN NEW"])
async def test_all_is_stored_or_nothing(
    connection: asyncpg.Connection[asyncpg.Record], superuser: asyncpg.Connection, event: str, table: str, does: str
) -> None:
    if "head_seq" in does and table != "chain_heads":
        does = "RETURN NULL"
    await superuser.execute(
        f"CREATE FUNCTION scheduler.harm() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {does}; END $$;"
        f"CREATE TRIGGER harm BEFORE {event} ON scheduler.{table} FOR EACH ROW EXECUTE FUNCTION scheduler.harm()"
    )
    with pytest.raises(asyncpg.DivisionByZeroError) as caught:
        await linked().commit(connection, STEP)
    assert chaining.is_record_fault(caught.value)
    assert await committed(superuser) == NOTHING


@pytest.mark.parametrize("is_moved", [True, False])
async def test_who_waits_for_a_head_sees_it_as_it_was_left(
    connection: asyncpg.Connection[asyncpg.Record], database: Database, superuser: asyncpg.Connection, is_moved: bool
) -> None:
    async with connected_to(database.service_url) as other:
        transaction = other.transaction()
        await transaction.start()
        await chaining.lock_heads(other, ["acme"])
        if is_moved:
            await chaining.move_heads(other, [("acme", 1, "ab" * 32, "1:0:m")])
        waiting = asyncio.create_task(linked().commit(connection, STEP))
        waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock')"
        await until(lambda: superuser.fetchval(waits, connection.get_server_pid()), "it waits for the lock")
        await transaction.commit()
        assert await waiting is (AtOnce.ELSEWHERE if is_moved else AtOnce.CHAINED)
    assert await committed(superuser) == ({**NOTHING, "heads": {"acme": 1, "beta": 0}} if is_moved else ALL)


def test_what_is_to_be_asked_first_is_not_linked() -> None:
    known = {"acme": EMPTY, "odd": ChainHead(3, None, None)}
    linking = LinkingAtOnce(known, PROMISED, {})
    assert linking.link([event(1, "acme")] * ENTRIES_MAX) is not None
    assert linking.link([event(1, "acme")] * (ENTRIES_MAX + 1)) is None
    assert linking.link([event(1, "acme"), event(2, "beta")]) is None, "a head that is not known"
    assert linking.link([event(1, "odd")]) is None, "a head that is none"
    linking.pause()
    assert linking.link([event(1, "acme")]) is None


# --- a node -------------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[AtOnce | None]:
    """What became of each batch that was tried at once, but of a node's own key, which comes when it is ready; None
    where PostgreSQL refused it. Nothing is paused for."""
    results: list[AtOnce | None] = []
    commit = LinkedAtOnce.commit

    async def counted(linked: LinkedAtOnce, connection: asyncpg.Connection[asyncpg.Record], step: Step) -> AtOnce:
        try:
            outcome = await commit(linked, connection, step)
        except asyncpg.PostgresError:
            results.append(None)
            raise
        if linked.heads.keys() != {SYSTEM_TENANT}:
            results.append(outcome)
        return outcome

    monkeypatch.setattr(LinkedAtOnce, "commit", counted)
    monkeypatch.setattr("app.write.chain.at_once.PAUSE_S", 0)
    return results


async def submitted(service: Service, tenant_id: str, ns: range, keyed: bool = False) -> None:
    await asyncio.gather(
        *(service.submitter.submit(created(tenant_id, n), key=key(f"k{n}") if keyed else None) for n in ns)
    )


async def test_small_batches_of_events_are_chained_at_once_and_in_order(
    run_node: RunNode, chains: Chains, at_once: list[AtOnce | None]
) -> None:
    async with run_node() as service:
        for first in range(0, 60, 10):
            await submitted(service, "acme", range(first, first + 10), keyed=first % 20 == 0)
        assert at_once.count(AtOnce.CHAINED) >= 5
        entries = await chains.sound("acme")
        assert sorted(numbers(entries)) == list(range(60))
        hlcs = [Hlc.parse(entry["t_hlc"]) for entry in entries]
        assert hlcs == sorted(hlcs)


async def test_a_key_that_another_node_chained_is_found_in_the_usual_way(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, at_once: list[AtOnce | None]
) -> None:
    async with run_node(make_settings("one")) as one, run_node(make_settings("two")) as two:
        for n, service in enumerate((one, two)):
            await submitted(service, "acme", range(n, n + 1))
        first, second = await asyncio.gather(
            *(service.submitter.submit(created("acme", 7), key=key("same")) for service in (one, two))
        )
        assert first._replace(replayed=False) == second._replace(replayed=False)
        reused = [service.submitter.submit(created("acme", 8), key=key("same", "other")) for service in (one, two)]
        for refused in await asyncio.gather(*reused, return_exceptions=True):
            assert isinstance(refused, IdempotencyReusedError)
        assert sorted(numbers(await chains.sound("acme"))) == [0, 1, 7]


async def test_a_key_that_comes_again_keeps_no_other_batch_from_being_chained_at_once(
    run_server: RunServer, at_once: list[AtOnce | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.chain.at_once.PAUSE_S", 3600)
    async with run_server() as client:
        first, again = [await propose(client, placement("c1", "n1"), key="same") for _ in range(2)]
        assert again.headers["Idempotent-Replay"] == "true"
        assert first.content == again.content
        await propose(client, placement("c2", "n1"))
        assert at_once[-2:] == [AtOnce.KEYED, AtOnce.CHAINED]


async def test_where_a_head_was_moved_by_another_node_nothing_is_tried_at_once_for_a_while(
    run_node: RunNode, make_settings: MakeSettings, at_once: list[AtOnce | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.chain.at_once.PAUSE_S", 3600)
    async with run_node(make_settings("one")) as one, run_node(make_settings("two")) as two:
        for service in (one, two):
            await service.key_changes.recorded.wait()
            service.appender._at_once._paused_until_s = 0
        await submitted(one, "acme", range(1))
        await submitted(two, "acme", range(1, 2))
        at_once.clear()
        await submitted(one, "acme", range(2, 3))
        await submitted(one, "acme", range(3, 4))
        assert at_once == [AtOnce.ELSEWHERE]


async def test_two_nodes_that_chain_at_once_to_one_tenant_make_one_chain_and_book_nothing_twice(
    run_server: RunServer, make_settings: MakeSettings, chains: Chains, at_once: list[AtOnce | None]
) -> None:
    async def race(client: httpx.AsyncClient, who: str) -> list[int]:
        answers = []
        for first in range(0, 40, 8):
            bets = (propose(client, placement(f"{who}{n}", f"n{n}"), free(f"n{n}")) for n in range(first, first + 8))
            answers += await asyncio.gather(*bets)
        return [answer.status_code for answer in answers]

    async with run_server(make_settings("one")) as one, run_server(make_settings("two")) as two:
        statuses = await asyncio.gather(race(one, "a"), race(two, "b"))
        assert [sorted(pair) for pair in zip(*statuses, strict=True)] == [[201, 409]] * 40
        actions = [entry["action"] for entry in await chains.sound("acme")]
        assert (actions.count("PROPOSE_ACCEPTED"), actions.count("PROPOSE_REJECTED")) == (40, 40)
        verdict = (await two.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
        assert (verdict["valid"], verdict["verdicts"]["projection"]) == (True, "ok")
    assert {AtOnce.CHAINED, AtOnce.ELSEWHERE} == set(at_once)


async def test_a_record_that_postgres_refuses_is_found_in_a_batch_that_was_tried_at_once(
    run_node: RunNode, chains: Chains, superuser: asyncpg.Connection, at_once: list[AtOnce | None]
) -> None:
    await superuser.execute(
        "ALTER TABLE scheduler.scheduler_log ADD CONSTRAINT no_13"
        " CHECK (action = 'REFUSED' OR payload::text !~ '\"n\":13[,}]')"
    )
    async with run_node() as service:
        await submitted(service, "acme", range(1))
        drafts = [created("acme", n) for n in range(1, 20)]
        submitting = (service.submitter.submit(draft, key=None) for draft in drafts)
        answers = await asyncio.gather(*submitting, return_exceptions=True)
        assert [n for n, answer in enumerate(answers, 1) if isinstance(answer, BaseException)] == [13]
        assert None in at_once
        assert len(await chains.sound("acme")) == 20
