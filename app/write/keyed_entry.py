"""Whether the entry that a row of the idempotency table names is the event of the request that is answered with it.

The table is not part of the chain, so its rows prove nothing: a changed or copied row would have a request answered
with an event that was never its own. The entry says which key its event came with (``ledger.keyed``), and the request
itself what its event is; where its private fields were encrypted, only type and job of that can be compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

from ledger import canonical, keyed
from ledger.errors import ChainDamagedError, LedgerError
from ledger.hlc import Hlc
from ledger.record import IdempotencyKey

if TYPE_CHECKING:
    from app.store.idempotency import ChainedLine
    from app.write.requests import Draft, RequestKey

LINES_PER_TURN = 500
"""Lines compared before others get a turn of the event loop."""


def _check_fits(line: ChainedLine, draft: Draft, key: RequestKey) -> None:
    """Return when the entry of ``line`` is the event of ``draft``.

    Raises:
        ChainDamagedError: it is another, or the row says what no row of this service can.
    """
    try:
        fits = line.epoch > 0 and line.lsn > 0 and _fits(line, draft, key)
    except (LedgerError, ValueError, TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        raise ChainDamagedError(
            line.tenant_id,
            f"the row of Idempotency-Key {key.key!r} in scheduler.idempotency names seq {line.seq}, whose entry is not "
            "the event of this request; one that was made before events said their key counts no more: send the "
            "request under a new key if GET /v1/jobs does not have the job",
        )


async def check_lines(chained: Sequence[ChainedLine], drafts: Sequence[Draft], key: RequestKey) -> None:
    """Return when the entry of each line is the event of its draft.

    Raises:
        ChainDamagedError: names the first that is not, or that the request does not have.
    """
    for number, line in enumerate(chained):
        if number % LINES_PER_TURN == LINES_PER_TURN - 1:
            await asyncio.sleep(0)
        if not 0 <= line.line < len(drafts):
            raise ChainDamagedError(
                line.tenant_id,
                f"scheduler.idempotency has a line {line.line} of Idempotency-Key {key.key!r}, whose request has "
                f"{len(drafts)} lines",
            )
        _check_fits(line, drafts[line.line], key)


def is_bound(line: ChainedLine, route: int, key: str) -> bool:
    """Whether the entry that a row names says that it came with this key. One that says nothing of any key may have
    been made before events did."""
    try:
        event = keyed.kept_event(line.job_id, line.action, line.payload)
        digest = None if event is None else keyed.digest_in(orjson.loads(event.payload))
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
    named = IdempotencyKey(route, key, line.line, line.body_digest)
    return event is not None and digest in (None, keyed.key_digest(line.tenant_id, named))


def gone(tenant_id: str, key: RequestKey) -> ChainDamagedError:
    """The error when lines that were chained are not in the table any more."""
    return ChainDamagedError(tenant_id, f"the rows of Idempotency-Key {key.key!r} in scheduler.idempotency are gone")


def _fits(line: ChainedLine, draft: Draft, key: RequestKey) -> bool:
    event = keyed.kept_event(line.job_id, line.action, line.payload)
    if event is None:
        return False
    hlc = Hlc.parse(line.t_hlc)
    if draft.job_id is None:
        is_job = event.job_id.endswith(f"-{hlc.logical:05d}") and f"-{hlc.physical_ms}-" in event.job_id
    else:
        is_job = event.job_id == draft.job_id
    if line.tenant_id != draft.tenant_id or event.action != draft.event.action or not is_job:
        return False
    facts = orjson.loads(event.payload)
    digest = keyed.key_digest(line.tenant_id, IdempotencyKey(key.route, key.key, line.line, line.body_digest))
    if keyed.digest_in(facts) != digest:
        return False
    if draft.seal is not None or line.body_digest != key.body_digest:
        return bool(facts["type"] == draft.event.name)
    asked = {"type": draft.event.name, "fence_token": facts["fence_token"], **draft.fields, keyed.MEMBER: digest}
    return canonical.encode(asked).decode() == event.payload
