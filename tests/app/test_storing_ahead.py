"""Rows stored ahead are in the chain once the batch before them is, where they were linked to, or leave nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from app.node.service import Service
from app.store import chaining
from app.store.chaining import ChainHead, Step
from app.write.chain.linking_ahead import Ahead
from app.write.chain.storing_ahead import Stored, StoringAhead
from app.write.pending.backlog import Pending
from app.write.pending.linking import LinkedBatch
from ledger.chain.record import IdempotencyKey
from ledger.facts.events import JOB_EVENTS
from ledger.hlc import Hlc
from ledger.positions import Epoch, Lsn
from tests.app.chains import Chains, Entry, committed, numbers, until
from tests.app.conftest import MakeSettings, RunNode
from tests.app.drafts import created
from tests.app.postgres_proxy import PostgresProxy, Trap
from tests.conftest import Database, connected_to

EMPTY = ChainHead(0, None, None)
KEY = IdempotencyKey(1, "k", 0, b"a" * 32)
STEP = Step("node-1", Epoch(3), Lsn(10), Lsn(20), Lsn(25))
BATCH = 7
"""Records in a batch of the tests with a node."""


def event(number: int, tenant_id: str, key: IdempotencyKey | None = None) -> Pending:
    kind, payload = JOB_EVENTS["JobCreated"].record_type, b'{"n":%d}' % number
    return Pending(Lsn(number), Epoch(3), Hlc(2, number, "n"), kind, tenant_id, f"j{number}", payload, key, None)


def linked_ahead(*events: Pending, onto: ChainHead = EMPTY) -> Ahead:
    ahead = Ahead(LinkedBatch(), {}, {})
    ahead.link(events, {each.tenant_id: onto for each in events}, {})
    return ahead


def to_store() -> Ahead:
    return linked_ahead(event(11, "acme"), event(12, "beta", KEY), event(13, "acme"))


@pytest.fixture
async def storing(database: Database, superuser: asyncpg.Connection) -> AsyncIterator[StoringAhead]:
    """Of node-1, which stands where ``STEP`` begins; tenants acme and beta have no entry."""
    await superuser.execute("INSERT INTO scheduler.chain_heads (tenant_id, head_seq) VALUES ('acme', 0), ('beta', 0)")
    await superuser.execute("INSERT INTO scheduler.wal_positions VALUES ('node-1', 'w', 3, 10, 10)")
    storing = StoringAhead(lambda: chaining.connect(database.service_url, 10, 10))
    yield storing
    storing.cancel()


async def taken(storing: StoringAhead) -> Stored:
    storing.start(to_store())
    stored = await storing.take(None)
    assert stored is not None
    return stored


NOTHING = {"rows": 0, "keys": 0, "heads": {"acme": 0, "beta": 0}, "position": (10, 10)}
ALL = {"rows": 3, "keys": 1, "heads": {"acme": 2, "beta": 1}, "position": (20, 25)}


async def test_what_was_stored_is_committed_with_heads_keys_and_position(
    storing: StoringAhead, superuser: asyncpg.Connection
) -> None:
    stored = await taken(storing)
    assert await committed(superuser) == NOTHING
    assert await stored.move(STEP)
    assert await committed(superuser) == NOTHING
    await stored.commit()
    assert await committed(superuser) == ALL
    ends = {tenant: links[-1] for tenant, links in to_store().linked.links.items()}
    for tenant, head in (await chaining.read_heads(superuser)).items():
        assert head == (ends[tenant].seq, ends[tenant].chain_link, ends[tenant].t_hlc)


@pytest.mark.parametrize(
    "step",
    [STEP._replace(epoch=Epoch(2)), STEP._replace(old_chained_lsn=Lsn(9)), STEP._replace(node_id="node-2")],
    ids=["epoch", "position", "node"],
)
async def test_nothing_passes_the_fence_of_another(
    storing: StoringAhead, superuser: asyncpg.Connection, step: Step
) -> None:
    stored = await taken(storing)
    assert not await stored.move(step)
    await stored.end()
    assert await committed(superuser) == NOTHING


@pytest.mark.parametrize(
    "change",
    [
        f"head_seq = 1, head_chain_link = '{'ab' * 32}', head_hlc = '1:0:m'",
        "head_seq = 1",
        f"head_chain_link = '{'ab' * 32}'",
        "head_hlc = '1:0:m'",
    ],
)
async def test_what_was_linked_onto_another_head_is_not_committed(
    storing: StoringAhead, superuser: asyncpg.Connection, change: str
) -> None:
    for guard in ("seq", "link", "hlc"):
        await superuser.execute(f"ALTER TABLE scheduler.chain_heads DROP CONSTRAINT IF EXISTS chain_heads_{guard}")
    stored = await taken(storing)
    await superuser.execute(f"UPDATE scheduler.chain_heads SET {change} WHERE tenant_id = 'beta'")
    before = await committed(superuser)
    assert not await stored.move(STEP)
    await stored.end()
    assert await committed(superuser) == before


async def test_who_holds_a_head_and_stores_in_the_same_place_goes_first(
    storing: StoringAhead, database: Database, superuser: asyncpg.Connection
) -> None:
    # Nobody waits for a deadlock to be found.
    await superuser.execute(f"ALTER DATABASE {database.name} SET deadlock_timeout = '1h'")
    stored = await taken(storing)
    rival = to_store().linked
    async with connected_to(database.service_url) as other, other.transaction():
        await chaining.lock_heads(other, ["acme", "beta"])
        copying = asyncio.create_task(chaining.copy_entries(other, rival.log_rows))
        # Each waits for the other now, and only the one that stores ahead gives way.
        with pytest.raises(asyncpg.LockNotAvailableError):
            await stored.move(STEP)
        await stored.end()
        await copying
        await chaining.move_heads(other, rival.heads())
    assert await committed(superuser) == {**ALL, "keys": 0, "position": (10, 10)}


async def test_rows_that_are_there_already_are_not_stored_ahead_and_the_connection_is_used_again(
    storing: StoringAhead, superuser: asyncpg.Connection
) -> None:
    stored = await taken(storing)
    assert await stored.move(STEP)
    await stored.commit()
    connection = stored.connection
    storing.start(to_store())
    assert await storing.take(connection) is None
    storing.start(to_store())
    assert await storing.take(connection) is None
    ends = await chaining.read_heads(superuser)
    storing.start(linked_ahead(event(21, "acme"), onto=ends["acme"]))
    following = await storing.take(None)
    assert following is not None
    assert await following.move(STEP._replace(old_chained_lsn=Lsn(20), new_chained_lsn=Lsn(21)))
    await following.commit()
    assert (await committed(superuser))["rows"] == 4


async def test_what_is_dropped_leaves_nothing(storing: StoringAhead, superuser: asyncpg.Connection) -> None:
    for _ in range(2):
        storing.start(to_store())
        await storing.drop()
        assert (storing.batch, await storing.take(None)) == ((), None)
        held = await superuser.fetchval(
            "SELECT count(*) FROM pg_locks WHERE relation = 'scheduler.scheduler_log'::regclass"
        )
        assert held == 0
    storing.start(to_store())
    storing.cancel()
    assert await committed(superuser) == NOTHING


@pytest.mark.parametrize("how", ["dropped", "not stored", "ended"])
async def test_after_work_in_vain_nothing_is_stored_ahead_for_a_while(
    storing: StoringAhead, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    for pause_s in (60.0, 0.0):
        monkeypatch.setattr("app.write.chain.storing_ahead.PAUSE_S", pause_s)
        assert storing.may_start
        storing.start(
            linked_ahead(event(1, "acme"), onto=ChainHead(-1, None, None)) if how == "not stored" else to_store()
        )
        if how == "dropped":
            await storing.drop()
        elif (stored := await storing.take(None)) is not None:
            await storing.end(stored)
        assert storing.may_start is (pause_s == 0)
        storing._paused_until_s = 0


# --- a node -------------------------------------------------------------------------------------------


@pytest.fixture
def committed_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes batches small and stores all ahead that can be; the records of each batch that was committed so."""
    sizes: list[int] = []
    move = Stored.move

    async def counted(stored: Stored, step: Step) -> bool:
        is_moved = await move(stored, step)
        sizes.extend([len(stored._ahead.batch)] if is_moved else [])
        return is_moved

    monkeypatch.setattr(Stored, "move", counted)
    monkeypatch.setattr("app.write.chain.appender.BATCH_ENTRIES_MAX", BATCH)
    monkeypatch.setattr("app.write.chain.at_once.ENTRIES_MAX", 0)
    monkeypatch.setattr("app.write.chain.appender.ENTRIES_MIN", 1)
    monkeypatch.setattr("app.write.chain.storing_ahead.PAUSE_S", 0)
    return sizes


async def chained(service: Service, tenant_ids: tuple[str, ...], ns: range) -> None:
    drafts = (created(tenant_ids[n % len(tenant_ids)], n) for n in ns)
    await asyncio.gather(*(service.submitter.submit(draft, key=None) for draft in drafts))


async def all_of(chains: Chains, tenant_ids: tuple[str, ...]) -> list[Entry]:
    return [entry for tenant_id in tenant_ids for entry in await chains.sound(tenant_id)]


async def test_batches_that_follow_one_another_are_stored_ahead_and_chained_in_order(
    run_node: RunNode, chains: Chains, committed_ahead: list[int]
) -> None:
    tenants = ("acme", "beta", "gamma")
    async with run_node() as service:
        await chained(service, tenants, range(3))
        await chained(service, tenants, range(3, 300))
        assert sum(committed_ahead) > 100
        assert max(committed_ahead) <= BATCH
        entries = await all_of(chains, tenants)
        assert sorted(numbers(entries)) == list(range(300))
        for tenant in tenants:
            hlcs = [Hlc.parse(entry["t_hlc"]) for entry in entries if entry["tenant_id"] == tenant]
            assert hlcs == sorted(hlcs)


@pytest.mark.parametrize("trap", [Trap.BEFORE_COMMIT, Trap.AFTER_COMMIT, Trap.AT_COMMIT])
async def test_a_connection_lost_around_commit_of_what_was_stored_ahead(
    run_node: RunNode, proxy: PostgresProxy, chains: Chains, committed_ahead: list[int], trap: Trap
) -> None:
    async with run_node(url=proxy.url) as service:
        await chained(service, ("acme",), range(1))
        writing = asyncio.create_task(chained(service, ("acme",), range(1, 400)))
        for sprung in range(1, 4):
            before = len(committed_ahead)
            await until(lambda before=before: writing.done() or len(committed_ahead) > before, "some were stored ahead")
            proxy.set_traps(trap)
            await until(lambda sprung=sprung: writing.done() or proxy.sprung == sprung, "a connection was lost")
        await writing
        assert proxy.sprung
        assert sorted(numbers(await chains.sound("acme"))) == list(range(400))
        assert service.node.failure is None


async def test_two_nodes_that_store_ahead_for_the_same_tenants_make_one_chain_of_each(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, committed_ahead: list[int]
) -> None:
    tenants = ("acme", "beta")
    async with run_node(make_settings("one")) as one, run_node(make_settings("two")) as two:
        await chained(one, tenants, range(2))
        await asyncio.gather(chained(one, tenants, range(2, 150)), chained(two, tenants, range(150, 300)))
        assert sorted(numbers(await all_of(chains, tenants))) == list(range(300))
        assert {one.appender.database_error, two.appender.database_error} == {None}


async def test_a_record_that_postgres_refuses_is_found_among_what_was_stored_ahead(
    run_node: RunNode, chains: Chains, superuser: asyncpg.Connection, committed_ahead: list[int]
) -> None:
    await superuser.execute(
        "ALTER TABLE scheduler.scheduler_log ADD CONSTRAINT no_13"
        " CHECK (action = 'REFUSED' OR payload::text !~ '\"n\":13[,}]')"
    )
    async with run_node() as service:
        await chained(service, ("acme",), range(1))
        answers = await asyncio.gather(
            *(service.submitter.submit(created("acme", n), key=None) for n in range(1, 60)), return_exceptions=True
        )
        assert [n for n, answer in enumerate(answers, 1) if isinstance(answer, BaseException)] == [13]
        assert committed_ahead
        assert len(await chains.sound("acme")) == 60
