"""A batch that is linked in pieces is the batch that is linked whole, and one without decisions is as any other."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from app.store.chaining import _FORMS, _HEADER, _TRAILER, LOG_COLUMNS, ChainHead
from app.write.pending.backlog import Pending
from app.write.pending.linking import (
    _TENANT_CREATED,
    ChainedKeys,
    ChainView,
    FirstUseOfKey,
    LinkedBatch,
    apply,
    decide,
    link,
)
from ledger import native
from ledger.chain.record import IdempotencyKey
from ledger.errors import LedgerError
from ledger.facts.events import JOB_EVENTS
from ledger.hlc import Hlc
from ledger.machines.jobs import ENDING
from ledger.positions import Epoch, Lsn

KNOWN = {"acme": ChainHead(3, "ab" * 32, "1:0:n"), "beta": ChainHead(0, None, None), "gamma": ChainHead(0, None, None)}
TENANTS = tuple(KNOWN)
CREATED = JOB_EVENTS["JobCreated"].record_type
KEY = IdempotencyKey(1, "k", 0, b"a" * 32)
TENANT, JOB, ACTION = (LOG_COLUMNS.index(name) for name in ("tenant_id", "job_id", "action"))
COMPLETED = JOB_EVENTS["JobCompleted"].record_type


def event(number: int, tenant_id: str, key: IdempotencyKey | None = None, kind: int = CREATED) -> Pending:
    payload = b'{"n":%d}' % number
    return Pending(Lsn(number), Epoch(1), Hlc(2, number, "n"), kind, tenant_id, f"j{number}", payload, key, None)


def outcomes(*batches: LinkedBatch) -> list[object]:
    return [str(each) if isinstance(each, LedgerError) else each for batch in batches for each in batch.outcomes]


def heads_after(linked: LinkedBatch) -> dict[str, ChainHead]:
    return {**KNOWN, **{tenant: ChainHead(seq, link, hlc) for tenant, seq, link, hlc in linked.heads()}}


def keys_after(batch: Sequence[Pending], linked: LinkedBatch) -> ChainedKeys:
    """The chained lines that the rows of ``linked`` name."""
    by_lsn, found = {each.lsn: each for each in batch}, ChainedKeys()
    for tenant_id, route, key, line, digest, _, _, lsn, _ in linked.keyed_rows:
        winner = FirstUseOfKey(digest, by_lsn[Lsn(lsn)].hlc.text(), by_lsn[Lsn(lsn)].job_id)
        found.setdefault((tenant_id, route, key), {})[line] = winner
    return found


@pytest.mark.parametrize("are_keys_read", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_a_batch_that_is_linked_in_two_is_the_batch_that_is_linked_whole(seed: int, are_keys_read: bool) -> None:
    numbers = random.Random(seed)

    def key() -> IdempotencyKey | None:
        name, body = numbers.choice("kl"), numbers.choice((b"a" * 32, b"b" * 32))
        return IdempotencyKey(1, name, numbers.randrange(3), body) if numbers.random() < 0.4 else None

    events = [event(number, numbers.choice(TENANTS), key()) for number in range(1, 40)]
    at = numbers.randrange(1, 39)
    whole = link(events, ChainView(heads=KNOWN), {})
    first = link(events[:at], ChainView(heads=KNOWN), {})
    known = {"keys": keys_after(events[:at], first)} if are_keys_read else {"before": first.keyed}
    rest = link(events[at:], ChainView(heads=heads_after(first), **known), {})
    assert sorted([*first.log_rows, *rest.log_rows], key=lambda row: row[:2]) == sorted(
        whole.log_rows, key=lambda row: row[:2]
    )
    assert outcomes(first, rest) == outcomes(whole)
    rows = [row[:-1] for linked in (first, rest) for row in linked.keyed_rows]
    assert sorted(rows) == sorted(row[:-1] for row in whole.keyed_rows)
    before = Counter(row[:3] for row in first.keyed_rows if not are_keys_read)
    assert all(row[-1] == before[row[:3]] for row in rest.keyed_rows)
    assert first.refused_jobs + rest.refused_jobs == whole.refused_jobs
    by_tenant = sorted(whole.log_rows, key=lambda row: list(whole.links).index(row[TENANT]))
    encoded = whole.log_rows.for_copy() or b""
    assert native.rows_in_copy(_FORMS, encoded[len(_HEADER) : -len(_TRAILER)]) == by_tenant


async def test_a_batch_of_which_nothing_is_to_be_decided_is_linked_as_any_other() -> None:
    events = [
        event(number, TENANTS[number % 3], kind=COMPLETED if number % 4 == 0 else CREATED) for number in range(1, 20)
    ]
    waited_for = event(20, "beta")
    waited_for.outcome = asyncio.get_running_loop().create_future()
    begun_before = event(20, "acme", kind=_TENANT_CREATED)
    for batch in (events, [*events, waited_for], [*events, begun_before], [*events, event(20, "acme", KEY)]):
        view = ChainView(heads=KNOWN)
        linked, decided = link(batch, view, {}), apply(batch, decide(batch, view), view, {})
        assert sorted(linked.log_rows, key=lambda row: row[:2]) == sorted(decided.log_rows, key=lambda row: row[:2])
        assert (linked.links, linked.keyed_rows, outcomes(linked)) == (
            decided.links,
            decided.keyed_rows,
            outcomes(decided),
        )
        assert (linked.ended, linked.refused_jobs, linked.has_existing) == (decided.ended, [], False)
        ends = [(row[TENANT], row[JOB]) for row in linked.log_rows if row[ACTION] in ENDING]
        assert sorted(linked.ended) == sorted(ends) != []
    assert len(linked.log_rows) == 20
