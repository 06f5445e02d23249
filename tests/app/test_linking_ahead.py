"""A batch that was linked ahead, piece by piece, is the batch that is linked whole, or it is not taken."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import asyncpg
import pytest

from app.store.chaining import ChainHead
from app.store.log_rows import _FORMS, _HEADER, _TRAILER, LOG_COLUMNS
from app.write.chain.linking_ahead import Ahead, LinkingAhead
from app.write.pending.backlog import Pending
from app.write.pending.linking import _TENANT_CREATED, LinkedBatch, link_batch
from ledger import native
from ledger.chain.record import IdempotencyKey
from ledger.errors import LedgerError
from ledger.facts.events import JOB_EVENTS
from ledger.hlc import Hlc
from ledger.machines.jobs import ENDING
from ledger.positions import Epoch, Lsn
from tests.app.chains import until
from tests.conftest import Database

KNOWN = {"acme": ChainHead(3, "ab" * 32, "1:0:n"), "beta": ChainHead(0, None, None), "gamma": ChainHead(0, None, None)}
TENANTS = tuple(KNOWN)
CREATED = JOB_EVENTS["JobCreated"].record_type
KEY = IdempotencyKey(1, "k", 0, b"a" * 32)
TENANT, JOB, ACTION = (LOG_COLUMNS.index(name) for name in ("tenant_id", "job_id", "action"))
COMPLETED = JOB_EVENTS["JobCompleted"].record_type


def event(number: int, tenant_id: str, key: IdempotencyKey | None = None, kind: int = CREATED) -> Pending:
    payload = b'{"n":%d}' % number
    return Pending(Lsn(number), Epoch(1), Hlc(2, number, "n"), kind, tenant_id, f"j{number}", payload, key, None)


def facts(linked: LinkedBatch) -> dict[str, object]:
    outcomes = [str(each) if isinstance(each, LedgerError) else each for each in linked.outcomes]
    return {
        "rows": sorted(linked.log_rows, key=lambda row: row[:2]),
        "links": linked.links,
        "outcomes": outcomes,
        "keys": (linked.idempotency_rows, linked.winners),
        "rest": (linked.ended, linked.refused_jobs, linked.conflicts, linked.is_returning, linked.last_lsn),
    }


def heads_of(batch: Sequence[Pending], before: LinkedBatch) -> dict[str, ChainHead]:
    ends = {tenant: ChainHead(seq, link, hlc) for tenant, seq, link, hlc in before.heads()}
    return {each.tenant_id: {**KNOWN, **ends}[each.tenant_id] for each in batch}


def whole(batch: Sequence[Pending], before: LinkedBatch) -> LinkedBatch:
    keys = {name: dict(lines) for name, lines in before.winners.items()}
    return link_batch(batch, heads=heads_of(batch, before), new_tenants=set(), chained_keys=keys, linkers={})


class Backlog:
    """What is committed of the batch to come."""

    def __init__(self) -> None:
        self.committed: list[Pending] = []
        self.asked: list[tuple[int, int]] = []

    def peek(self, linked: int, linked_bytes: int) -> list[Pending]:
        self.asked.append((linked, linked_bytes))
        return self.committed[linked:]


@pytest.fixture
async def linking(database: Database) -> AsyncIterator[LinkingAhead]:
    async with asyncpg.create_pool(database.service_url, min_size=0) as pool:
        yield LinkingAhead(pool, {})


@pytest.mark.parametrize("seed", range(12))
async def test_pieces_linked_ahead_make_the_batch_that_is_linked_whole(
    linking: LinkingAhead, superuser: asyncpg.Connection, seed: int
) -> None:
    numbers = random.Random(seed)

    def key() -> IdempotencyKey | None:
        name, body = numbers.choice("kl"), numbers.choice((b"a" * 32, b"b" * 32))
        return IdempotencyKey(1, name, numbers.randrange(3), body) if numbers.random() < 0.4 else None

    events = [event(number, numbers.choice(TENANTS), key()) for number in range(1, 40)]
    before, batch = whole(events[:10], LinkedBatch()), events[10:]
    backlog = Backlog()
    linking.start(backlog.peek, before, KNOWN)
    linked = 0
    while (linked := min(len(batch), linked + numbers.randrange(1, 12))) < len(batch):
        backlog.committed = batch[:linked]
        linking.more()
        await until(lambda: linking._ahead and len(linking._ahead.batch) == linked, "it is linked")
    linking.more()
    await until(lambda: backlog.asked[-1][0] == len(backlog.committed), "it was looked for more")
    assert backlog.asked[-1][1] == sum(len(each.payload) for each in backlog.committed)
    found = await linking.take(superuser, batch, heads_of(batch, before))
    assert found is not None
    assert facts(found) == facts(whole(batch, before))
    by_tenant = sorted(found.log_rows, key=lambda row: list(found.links).index(row[TENANT]))
    encoded = found.log_rows.for_copy() or b""
    assert native.rows_in_copy(_FORMS, encoded[len(_HEADER) : -len(_TRAILER)]) == by_tenant
    assert await linking.take(superuser, batch, heads_of(batch, before)) is None, "it is good once"


async def begun(linking: LinkingAhead, events: list[Pending]) -> Backlog:
    """These are committed while a batch is stored that has nothing of their tenants."""
    backlog = Backlog()
    backlog.committed = events
    linking.start(backlog.peek, LinkedBatch(), {tenant: KNOWN[tenant] for tenant in ("acme", "beta")})
    await until(lambda: backlog.asked, "it was looked for them")
    return backlog


async def test_what_was_linked_onto_other_heads_is_not_taken(
    linking: LinkingAhead, superuser: asyncpg.Connection
) -> None:
    events = [event(1, "acme"), event(2, "beta")]
    for heads in (
        KNOWN | {"beta": ChainHead(1, "cd" * 32, "1:1:m")},
        KNOWN | {"acme": KNOWN["acme"]._replace(chain_link="cd" * 32)},
        {"acme": KNOWN["acme"]},
    ):
        await begun(linking, events)
        assert await linking.take(superuser, events, heads) is None
    await begun(linking, events)
    assert await linking.take(superuser, events, KNOWN) is not None


async def test_what_was_linked_of_another_batch_is_not_taken(
    linking: LinkingAhead, superuser: asyncpg.Connection
) -> None:
    events = [event(1, "acme"), event(2, "beta"), event(3, "acme")]
    for batch in (events[1:], events[:2], [events[0], event(2, "beta"), events[2]], (events[0],)):
        await begun(linking, events)
        assert await linking.take(superuser, batch, KNOWN) is None
    await begun(linking, [])
    assert await linking.take(superuser, events, KNOWN) is None


async def test_it_ends_before_a_tenant_whose_head_only_its_lock_can_tell(
    linking: LinkingAhead, superuser: asyncpg.Connection
) -> None:
    for first in (event(2, "gamma"), event(2, "acme", kind=_TENANT_CREATED)):
        backlog = await begun(linking, [event(1, "acme")])
        backlog.committed = [*backlog.committed, first, event(3, "acme")]
        linking.more()
        await until(lambda backlog=backlog: len(backlog.asked) == 2, "it was looked for more")
        assert linking._ahead is not None
        assert [each.lsn for each in linking._ahead.batch] == [1]


async def test_nothing_more_is_linked_once_the_backlog_moves(
    linking: LinkingAhead, superuser: asyncpg.Connection
) -> None:
    backlog = await begun(linking, [event(1, "acme")])
    linking.pause()
    backlog.committed = [event(1, "acme"), event(2, "acme")]
    linking.more()
    await asyncio.sleep(0)
    assert len(backlog.asked) == 1
    assert linking._ahead is not None
    found = await linking.take(superuser, [*linking._ahead.batch, event(2, "acme")], KNOWN)
    assert found is not None
    assert len(found.outcomes) == 2


async def test_it_is_handed_over_once_enough_is_linked_and_nothing_is_added_then(linking: LinkingAhead) -> None:
    handed_over: list[Ahead] = []
    backlog = await begun(linking, [event(1, "acme")])
    linking.hand_over(3, handed_over.append)
    assert not handed_over
    backlog.committed = [event(number, "acme") for number in range(1, 5)]
    linking.more()
    await until(lambda: handed_over, "it is handed over")
    assert [each.lsn for each in handed_over[0].batch] == [1, 2, 3, 4]
    assert not linking.batch

    await begun(linking, [event(1, "acme"), event(2, "acme")])
    linking.hand_over(2, handed_over.append)
    assert len(handed_over) == 2, "it was linked already"
    linking.hand_over(1, handed_over.append)
    backlog = await begun(linking, [])
    linking.hand_over(1, handed_over.append)
    linking.pause()
    backlog = await begun(linking, [event(1, "acme")])
    assert linking.batch
    assert len(handed_over) == 2, "the backlog has moved since it was asked for"


async def test_a_batch_of_which_nothing_is_to_be_decided_is_linked_as_any_other() -> None:
    events = [
        event(number, TENANTS[number % 3], kind=COMPLETED if number % 4 == 0 else CREATED) for number in range(1, 20)
    ]
    waited_for = event(20, "beta")
    waited_for.outcome = asyncio.get_running_loop().create_future()
    begun_before = event(20, "acme", kind=_TENANT_CREATED)
    for batch in (events, [*events, waited_for], [*events, begun_before], [*events, event(20, "acme", KEY)]):
        linked = [
            link_batch(batch, heads=KNOWN, new_tenants=set(), chained_keys={}, linkers={}, held_back=held_back)
            for held_back in (None, lambda _: None)
        ]
        assert facts(linked[0]) == facts(linked[1])
        ends = [(row[TENANT], row[JOB]) for row in linked[0].log_rows if row[ACTION] in ENDING]
        assert sorted(linked[0].ended) == sorted(ends) != []
    assert len(linked[0].log_rows) == 20
