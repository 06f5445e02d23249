"""What a read promises at each level, with a real database and the positions of several nodes in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from hashlib import sha256

import asyncpg
import pytest

from app.read.consistency import Consistency, Promise, ReadLevel, all_seen
from app.read.copies import Copies
from app.read.folded_jobs import FoldedJobs
from app.read.jobs import JobReader, Page
from app.read.revealing import Revealing
from app.runtime.state.node import Node
from app.runtime.state.session import Token
from app.store.entry_check import EntryCheck
from app.store.jobs.order import ListRange
from app.store.jobs.table import JobFolds
from app.store.reads import TokenPosition
from app.trust.privacy_knowledge import PrivacyKnowledge
from app.trust.retention import RetentionReader
from app.trust.subject_keys import SubjectKeys
from ledger import canonical
from ledger.chain import Linker
from ledger.errors import (
    ChainDamagedError,
    ClockSkewError,
    FencedError,
    InvalidInputError,
    JobNotFoundError,
    SessionNotCaughtUpError,
    TooStaleError,
    WriteLostError,
)
from ledger.facts.events import JOB_EVENTS
from ledger.hlc import Clock, Hlc
from ledger.machines.job_search import JobFilter
from signing.keys import Keyring

HERE, THERE = "here", "there"
EPOCH = 5
SHORT_S, LONG_S = 0.05, 60.0
ANSWERS_MEANWHILE = 60


def token(node_id: str, epoch: int, lsn: int) -> Token:
    return Token(node_id, epoch, lsn, f"1:0:{node_id}")


async def no_keys() -> Keyring:
    return Keyring([])


class World:
    """One tenant's job in a database, and this node beside it."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self.pool = pool
        self.node = Node(HERE, "local", "gate", "a" * 32, EPOCH, Clock(HERE, 5000))
        self.hurried: list[str] = []

    def reader(self, wait_s: float) -> JobReader:
        revealing = Revealing(PrivacyKnowledge(self.pool, SubjectKeys(self.pool, "file:/no/master.key")))
        check = EntryCheck(lambda _: None)
        folded = FoldedJobs(JobFolds(check), lambda *_: None, lambda *_: None)
        retention = RetentionReader(pool=self.pool, check=check, keyring=no_keys, origin=str)
        return JobReader(self.copies(wait_s), revealing, folded, self.hurried.append, lambda *_: None, retention)

    def copies(self, wait_s: float) -> Copies:
        return Copies(self.node, self.pool, Consistency(self.node, self.pool, wait_s))

    async def node_stands(self, node_id: str, epoch: int, chained_lsn: int) -> None:
        await self.pool.execute(
            "INSERT INTO scheduler.wal_positions (node_id, wal_id, epoch, chained_lsn, seen_durable_lsn)"
            " VALUES ($1, $2, $3, $4, $4) ON CONFLICT (node_id) DO UPDATE"
            " SET epoch = excluded.epoch, chained_lsn = excluded.chained_lsn",
            node_id,
            "a" * 32,
            epoch,
            chained_lsn,
        )

    async def epoch_ended(self, node_id: str, epoch: int, end_lsn: int) -> None:
        await self.pool.execute(
            "INSERT INTO scheduler.wal_epochs (node_id, epoch, end_lsn) VALUES ($1, $2, $3)", node_id, epoch, end_lsn
        )

    async def tenant_begins(self, tenant_id: str = "acme") -> None:
        await self.pool.execute("INSERT INTO scheduler.chain_heads (tenant_id, head_seq) VALUES ($1, 0)", tenant_id)

    async def store_job(self, job_id: str, tenant_id: str = "acme") -> None:
        await self.pool.execute(
            "INSERT INTO scheduler.jobs (tenant_id, job_id, status, created_physical, created_logical, created_node,"
            " last_seq, seqs, figure) VALUES ($3, $1, 'SUBMITTED', 7, 0, $2, 1, '{1}', '[0,0,[]]')",
            job_id,
            HERE,
            tenant_id,
        )
        await self.pool.execute(
            "INSERT INTO scheduler.chain_heads VALUES ($1, 1, $2, '7:0:here') ON CONFLICT (tenant_id) DO UPDATE"
            " SET head_seq = 1, head_chain_link = excluded.head_chain_link, head_hlc = excluded.head_hlc",
            tenant_id,
            "a" * 64,
        )
        await self.pool.execute(
            "INSERT INTO scheduler.follower_positions VALUES ('jobs', $1, 1) ON CONFLICT DO NOTHING", tenant_id
        )
        await self.chain_event(1, job_id, "JobCreated", Hlc(7, 0, HERE), '{"fence_token":1}', tenant_id)

    async def chain_event(
        self, seq: int, job_id: str, name: str, hlc: Hlc, payload: str, tenant_id: str = "acme"
    ) -> None:
        before = await self.pool.fetchval(
            "SELECT chain_link FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq = $2 - 1", tenant_id, seq
        )
        said = json.loads(payload)
        payload = canonical.encode({"fence_token": 1, **said, "type": name}).decode()
        digest, action = sha256(payload.encode()), JOB_EVENTS[name].action
        linker = Linker(tenant_id)
        link = linker.link(seq, hlc.text(), job_id, action, bytes.fromhex(before or ""), digest.digest(), b"")
        await self.pool.execute(
            "INSERT INTO scheduler.scheduler_log (tenant_id, seq, t_hlc, hlc_physical, hlc_logical, hlc_node, job_id,"
            " action, link_version, prev_chain_link, chain_link, payload_digest, payload)"
            " VALUES ($12, $1, $2, $3, $4, $5, $6, $7, 2, $8, $9, $10, $11)",
            seq,
            hlc.text(),
            *hlc,
            job_id,
            action,
            before,
            link.hex(),
            digest.hexdigest(),
            payload,
            tenant_id,
        )
        await self.pool.execute(
            "UPDATE scheduler.chain_heads SET head_seq = $2, head_chain_link = $3, head_hlc = $4 WHERE tenant_id = $1",
            tenant_id,
            seq,
            link.hex(),
            hlc.text(),
        )


@pytest.fixture
async def world(pool: asyncpg.Pool[asyncpg.Record]) -> World:
    return World(pool)


async def read(world: World, level: ReadLevel, *tokens: Token, wait_s: float = SHORT_S) -> dict[str, object]:
    return await world.reader(wait_s).read("acme", "job", Promise(level, tokens, 0), None)


async def still_waits(world: World, work: Awaitable[object]) -> asyncio.Task[object]:
    """``work`` as a task that has not ended when the database has answered many times more than a read asks it."""
    task = asyncio.ensure_future(work)
    for _ in range(ANSWERS_MEANWHILE):
        await world.pool.fetchval("SELECT 1")
    assert not task.done(), "it did not wait"
    return task


@pytest.mark.parametrize(
    ("given", "position", "seen"),
    [
        (token(THERE, 3, 10), TokenPosition(3, 10, None), True),
        (token(THERE, 3, 11), TokenPosition(3, 10, None), False),
        (token(THERE, 2, 10), TokenPosition(3, 10, 10), True),
        (token(THERE, 2, 10), TokenPosition(3, 9, 12), False),
        (token(THERE, 2, 10), TokenPosition(3, 99, None), False),
        (token(THERE, 4, 10), TokenPosition(3, 99, None), False),
        (token(THERE, 4, 10), TokenPosition(3, 99, 99), False),
        (token(THERE, 3, 10), TokenPosition(None, None, None), False),
    ],
)
def test_a_write_is_seen_only_when_its_epoch_and_position_say_so(
    given: Token, position: TokenPosition, seen: bool
) -> None:
    assert all_seen([given], [position]) is seen


def test_a_write_beyond_the_end_of_its_epoch_is_lost_however_far_the_chain_has_come() -> None:
    with pytest.raises(WriteLostError):
        all_seen([token(THERE, 2, 11)], [TokenPosition(3, 99, 10)])


def test_a_lost_write_is_told_even_when_another_is_only_late() -> None:
    late, lost = token("late", 1, 5), token(THERE, 2, 11)
    with pytest.raises(WriteLostError):
        all_seen([late, lost], [TokenPosition(1, 1, None), TokenPosition(3, 99, 10)])


async def test_a_session_read_waits_for_another_nodes_write(world: World) -> None:
    await world.node_stands(THERE, 2, 9)
    reading = await still_waits(world, read(world, ReadLevel.SESSION, token(THERE, 2, 10), wait_s=LONG_S))
    await world.store_job("job")
    await world.node_stands(THERE, 2, 10)
    assert (await reading)["status"] == "SUBMITTED"


Answer = Awaitable[dict[str, object] | Page]
READS: dict[str, Callable[[JobReader, Promise], Answer]] = {
    "job": lambda reader, promise: reader.read("acme", "job", promise, None),
    "job of any tenant": lambda reader, promise: reader.read(None, "job", promise, None),
    "list": lambda reader, promise: reader.list("acme", promise, JobFilter(), ListRange(), 10),
    "search": lambda reader, promise: reader.list("acme", promise, JobFilter(dc="nowhere"), ListRange(), 10),
    "events": lambda reader, promise: reader.list_events("acme", "job", promise, None, 10),
}
every_read = pytest.mark.parametrize("ask", READS.values(), ids=READS.keys())


@every_read
async def test_every_read_keeps_a_session(world: World, ask: Callable[[JobReader, Promise], Answer]) -> None:
    await world.tenant_begins()
    await world.node_stands(THERE, 2, 9)
    promise = Promise(ReadLevel.SESSION, [token(THERE, 2, 10)], 0)
    reading = await still_waits(world, ask(world.reader(LONG_S), promise))
    await world.store_job("job")
    await world.node_stands(THERE, 2, 10)
    assert "SESSION" in str(await reading)
    await world.node_stands(THERE, 3, 10)
    await world.epoch_ended(THERE, 2, 9)
    with pytest.raises(WriteLostError):
        await ask(world.reader(SHORT_S), promise)
    with pytest.raises(SessionNotCaughtUpError):
        await ask(world.reader(SHORT_S), Promise(ReadLevel.SESSION, [token(HERE, EPOCH, 1)], 0))


@every_read
async def test_every_read_keeps_its_level(world: World, ask: Callable[[JobReader, Promise], Answer]) -> None:
    await world.tenant_begins()
    await world.store_job("job")
    await world.node_stands(HERE, EPOCH + 1, 0)
    assert "EVENTUAL" in str(await ask(world.reader(SHORT_S), Promise(ReadLevel.EVENTUAL, [], 0)))
    with pytest.raises(FencedError):
        await ask(world.reader(SHORT_S), Promise(ReadLevel.STRONG, [], 0))
    await world.node_stands(HERE, EPOCH, 0)
    world.node.damaged["acme"] = "edited"
    with pytest.raises(ChainDamagedError, match="edited"):
        await ask(world.reader(SHORT_S), Promise(ReadLevel.STRONG, [], 0))


async def test_a_job_of_several_tenants_is_of_none_until_one_is_named(world: World) -> None:
    for tenant_id in ("acme", "other"):
        await world.tenant_begins(tenant_id)
    any_tenant, session = READS["job of any tenant"], Promise(ReadLevel.SESSION, [], 0)
    with pytest.raises(JobNotFoundError):
        await any_tenant(world.reader(SHORT_S), session)
    await world.store_job("job", "other")
    answer = await any_tenant(world.reader(SHORT_S), session)
    assert isinstance(answer, dict)
    assert answer["tenant_id"] == "other"
    await world.store_job("job", "acme")
    with pytest.raises(InvalidInputError, match="say whose"):
        await any_tenant(world.reader(SHORT_S), session)


async def test_a_session_read_waits_for_this_nodes_own_write(world: World) -> None:
    reading = await still_waits(world, read(world, ReadLevel.SESSION, token(HERE, EPOCH, 10), wait_s=LONG_S))
    await world.store_job("job")
    await world.node_stands(HERE, EPOCH, 10)
    world.node.committed.advance(10)
    world.node.chained.advance(10)
    assert (await reading)["status"] == "SUBMITTED"


async def test_a_session_read_believes_its_snapshot_more_than_this_nodes_watermark(world: World) -> None:
    await world.store_job("job")
    world.node.committed.advance(10)
    world.node.chained.advance(10)
    await world.node_stands(HERE, EPOCH, 9)
    with pytest.raises(SessionNotCaughtUpError):
        await read(world, ReadLevel.SESSION, token(HERE, EPOCH, 10))


async def test_a_session_read_gives_up_in_time(world: World) -> None:
    await world.store_job("job")
    for missing in (token(THERE, 1, 1), token(HERE, EPOCH, 1), token(HERE, EPOCH + 1, 1)):
        with pytest.raises(SessionNotCaughtUpError):
            await read(world, ReadLevel.SESSION, missing)


async def test_a_token_of_what_was_never_written_hurries_nobody(world: World) -> None:
    wanted_lsn = world.node.chained.wanted_lsn
    with pytest.raises(SessionNotCaughtUpError):
        await read(world, ReadLevel.SESSION, token(HERE, EPOCH, 10**17))
    assert world.node.chained.wanted_lsn == wanted_lsn


async def test_a_session_read_tells_that_a_write_was_lost(world: World) -> None:
    await world.store_job("job")
    await world.node_stands(HERE, EPOCH, 40)
    await world.epoch_ended(HERE, EPOCH - 1, 30)
    assert (await read(world, ReadLevel.SESSION, token(HERE, EPOCH - 1, 30)))["job_id"] == "job"
    with pytest.raises(WriteLostError):
        await read(world, ReadLevel.SESSION, token(HERE, EPOCH - 1, 31))


async def test_a_write_that_a_chain_has_is_not_called_lost_whatever_is_stored_of_its_epoch(world: World) -> None:
    await world.store_job("job")
    await world.node_stands(HERE, EPOCH, 40)
    await world.epoch_ended(HERE, EPOCH - 1, 30)
    chained = Token(HERE, EPOCH - 1, 31, "7:0:here")
    assert (await read(world, ReadLevel.SESSION, chained))["job_id"] == "job"
    consistency = Consistency(world.node, world.pool, SHORT_S)
    await consistency.wait_for_session([chained])
    with pytest.raises(WriteLostError):
        await read(world, ReadLevel.SESSION, chained, token(HERE, EPOCH - 1, 32))
    with pytest.raises(WriteLostError):
        await consistency.wait_for_session([chained, token(HERE, EPOCH - 1, 32)])


async def test_an_eventual_read_never_waits(world: World) -> None:
    await world.store_job("job")
    answer = await read(world, ReadLevel.EVENTUAL, token(THERE, 1, 1), wait_s=LONG_S)
    assert answer["consistency"] == {"level": "EVENTUAL", "source": "primary", "staleness_ms": 0}


async def test_a_strong_read_waits_until_all_that_is_durable_here_is_chained(world: World) -> None:
    await world.node_stands(HERE, EPOCH, 7)
    world.node.durable.advance(7)
    reading = await still_waits(world, read(world, ReadLevel.STRONG, wait_s=LONG_S))
    await world.store_job("job")
    world.node.chained.advance(7)
    assert (await reading)["status"] == "SUBMITTED"


async def test_a_strong_read_that_would_wait_too_long_says_so(world: World) -> None:
    await world.node_stands(HERE, EPOCH, 0)
    world.node.durable.advance(7)
    with pytest.raises(TooStaleError):
        await read(world, ReadLevel.STRONG)


async def test_a_strong_read_of_a_fenced_node_is_refused(world: World) -> None:
    await world.store_job("job")
    await world.node_stands(HERE, EPOCH + 1, 0)
    assert (await read(world, ReadLevel.EVENTUAL))["job_id"] == "job"
    with pytest.raises(FencedError):
        await read(world, ReadLevel.STRONG)
    with pytest.raises(FencedError):
        await world.reader(SHORT_S).read("acme", "job", Promise(ReadLevel.STRONG, [], 0), Hlc(9, 0, HERE))


async def test_a_strong_read_also_sees_the_session_it_is_shown(world: World) -> None:
    await world.node_stands(HERE, EPOCH, 0)
    await world.node_stands(THERE, 1, 4)
    reading = await still_waits(world, read(world, ReadLevel.STRONG, token(THERE, 1, 5), wait_s=LONG_S))
    await world.store_job("job")
    await world.node_stands(THERE, 1, 5)
    assert (await reading)["job_id"] == "job"


async def test_a_reader_that_waits_learns_why_the_node_stopped(world: World) -> None:
    world.node.committed.advance(10)
    reading = await still_waits(world, read(world, ReadLevel.SESSION, token(HERE, EPOCH, 10), wait_s=LONG_S))
    world.node.chained.fail(FencedError("another process took over"))
    with pytest.raises(FencedError):
        await reading


async def test_the_past_is_what_had_an_hlc_by_then_whatever_the_order_of_the_chain(world: World) -> None:
    await world.tenant_begins()
    events = [
        ("JobCompleted", Hlc(30, 0, HERE), '{"type":"JobCompleted","fence_token":1,"final_status":"fine"}'),
        ("JobCreated", Hlc(10, 0, HERE), '{"type":"JobCreated","fence_token":1,"spec":{"x":1}}'),
        ("JobAccepted", Hlc(10, 10, HERE), '{"type":"JobAccepted","fence_token":1,"dc_id":"d"}'),
        ("JobProgressReported", Hlc(20, 0, "a"), '{"type":"JobProgressReported","fence_token":1,"dc_id":"d"}'),
    ]
    for seq, (name, hlc, payload) in enumerate(events, 1):
        await world.chain_event(seq, "job", name, hlc, payload)
    statuses = {}
    for at in (
        Hlc(10, 0, HERE),
        Hlc(10, 9, "z"),
        Hlc(10, 10, HERE),
        Hlc(20, 0, "a"),
        Hlc(29, 9, "z"),
        Hlc(30, 0, HERE),
    ):
        past = await world.reader(SHORT_S).read("acme", "job", Promise(ReadLevel.SESSION, [], 0), at)
        statuses[at.text()] = past["status"]
    assert list(statuses.values()) == ["SUBMITTED", "SUBMITTED", "ACCEPTED", "RUNNING", "RUNNING", "COMPLETED"]
    with pytest.raises(JobNotFoundError):
        await world.reader(SHORT_S).read("acme", "job", Promise(ReadLevel.SESSION, [], 0), Hlc(9, 0, HERE))


async def test_a_damaged_row_is_the_ledgers_fault_not_the_callers(world: World) -> None:
    await world.store_job("job")
    await world.pool.execute("UPDATE scheduler.jobs SET seqs = '{1,2}'")
    with pytest.raises(ChainDamagedError, match="damaged"):
        await read(world, ReadLevel.SESSION)


def test_the_clock_learns_from_sessions_but_not_from_the_far_future(world: World) -> None:
    consistency = Consistency(world.node, world.pool, SHORT_S)
    with pytest.raises(ClockSkewError):
        consistency.receive([Token(THERE, 1, 1, f"{2**60}:0:{THERE}")])
    assert world.node.clock.last.physical_ms == 0
    consistency.receive([token(THERE, 1, 1)])
    assert world.node.clock.last.physical_ms == 1


async def test_a_read_that_promises_what_is_held_back_is_refused_before_it_looks_and_behind(world: World) -> None:
    looks = 0

    async def look(_pool: object, _judge: object) -> str:
        nonlocal looks
        looks += 1
        world.node.damaged["acme"] = "its rows turned out to be damaged while others were waited for"
        return "what the chain shows without them"

    for _ in range(2):
        with pytest.raises(ChainDamagedError):
            await world.copies(SHORT_S).read("acme", look, Promise(ReadLevel.STRONG, (), 0))
    assert looks == 1
    assert (await world.copies(SHORT_S).read("acme", look, Promise(ReadLevel.EVENTUAL, (), 0)))[1].name == "primary"
