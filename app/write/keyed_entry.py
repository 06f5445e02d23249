"""Whether the entry that a row of the idempotency table names is the event of the request that is answered with it.

The table is not part of the chain, so its rows prove nothing: a changed ``seq`` would have a repeated request answered
with somebody else's event. The request itself says what its event is; where its private fields were encrypted, only
type and job can be compared.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

from ledger import canonical
from ledger.conflict import held_event
from ledger.errors import ChainDamagedError, LedgerError
from ledger.events import ACTIONS, SystemAction
from ledger.hlc import Hlc

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
        fits = line.epoch > 0 and line.lsn > 0 and _fits(line, draft, is_same_form=line.body_digest == key.body_digest)
    except (LedgerError, ValueError, TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        raise ChainDamagedError(
            line.tenant_id,
            f"the row of Idempotency-Key {key.key!r} in scheduler.idempotency names seq {line.seq}, whose entry is not "
            "the event of this request",
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


def gone(tenant_id: str, key: RequestKey) -> ChainDamagedError:
    """The error when lines that were chained are not in the table any more."""
    return ChainDamagedError(tenant_id, f"the rows of Idempotency-Key {key.key!r} in scheduler.idempotency are gone")


def _fits(line: ChainedLine, draft: Draft, *, is_same_form: bool) -> bool:
    job_id, action, payload = line.job_id, line.action, line.payload
    if action == SystemAction.REFUSED:
        kept = orjson.loads(payload)
        job_id, action = base64.b64decode(kept["job_id"]).decode(), ACTIONS[kept["record_type"]]
        payload = base64.b64decode(kept["payload"]).decode()
    elif action == SystemAction.CONFLICT:
        held = held_event(orjson.loads(payload), job_id)
        if held is None:
            return False
        action, payload = held.event.action, held.payload
    hlc = Hlc.parse(line.t_hlc)
    if draft.job_id is None:
        is_job = job_id.endswith(f"-{hlc.logical:05d}") and f"-{hlc.physical_ms}-" in job_id
    else:
        is_job = job_id == draft.job_id
    if line.tenant_id != draft.tenant_id or action != draft.event.action or not is_job:
        return False
    facts = orjson.loads(payload)
    if draft.seal is not None or not is_same_form:
        return bool(facts["type"] == draft.event.name)
    asked = {"type": draft.event.name, "fence_token": facts["fence_token"], **draft.fields}
    return canonical.encode(asked).decode() == payload
