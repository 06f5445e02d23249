"""What PostgreSQL claims of this node's WAL, held against the WAL and the chain before anything is skipped on its word.

``wal_positions.chained_lsn`` can be edited by whoever administers the database. The control file beside the WAL cannot:
it says up to where this node has seen its records chained, and lags by at most ``hlc.persistence_interval``. So only
the records between the two are looked up, by HLC and digest. One of them is chained when the chain has

- the event itself, or a REFUSED or CONFLICT entry that keeps it;
- for the beginning of a tenant, the entry by which another node recorded it;
- for a keyed line that was not to be acknowledged before it was chained, the line that came first.

Everything from the first record on of which none of that holds is chained again, or found in the chain by the appender.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import structlog

from app.node.start.wal import FoundWal
from app.write.chain import view
from app.write.pending.backlog import Pending
from app.write.pending.linking import tenant_begun_by, tenants_begun_by
from ledger.errors import ChainDamagedError
from ledger.positions import Lsn, after, before

if TYPE_CHECKING:
    from app.store import Connection

RECORDS_A_LOOKUP = 1000

log = structlog.get_logger()


async def check_chained(connection: Connection, wal: FoundWal, *, trusted_lsn: Lsn) -> None:
    """Lower ``wal.chained_lsn`` to the last record below which every one above ``trusted_lsn`` is in the chain."""
    held = {lsn for damage in wal.held.values() for lsn in damage.lsns}
    first_lsn = max(after(trusted_lsn), wal.recovered.first_lsn)
    last_lsn = min(wal.chained_lsn, wal.recovered.last_lsn)
    records = wal.records(first_lsn, last_lsn)
    while batch := list(islice(records, RECORDS_A_LOOKUP)):
        missing = await _first_missing(connection, [pending for pending in batch if pending.lsn not in held])
        if missing is not None:
            log.error(
                "chained_position_not_borne_out",
                claimed_lsn=wal.chained_lsn,
                chained_lsn=missing.lsn - 1,
                tenant_id=missing.tenant_id,
                hlc=missing.hlc.text(),
                done="what the chain lacks is chained from the WAL; somebody edited scheduler.wal_positions, or rows",
            )
            wal.chained_lsn = before(missing.lsn)
            return


async def _first_missing(connection: Connection, batch: Sequence[Pending]) -> Pending | None:
    absent = await view.unchained(connection, batch)
    if not absent:
        return None
    unrecorded = await view.unrecorded(connection, tenants_begun_by(absent))
    decided = await _lost_to_another(connection, [each for each in absent if not each.answered_early])
    for pending in absent:
        begun = tenant_begun_by(pending)
        if pending.lsn not in decided and (begun is None or begun in unrecorded):
            return pending
    return None


async def _lost_to_another(connection: Connection, keyed: Sequence[Pending]) -> set[Lsn]:
    """LSNs of those that the chain has another event for, which came with the same key."""
    try:
        keys = await view.read_keys(connection, keyed)
    except ChainDamagedError:
        # The appender meets the same row, and quarantines the tenant.
        return set()
    lsns = set()
    for pending in keyed:
        assert pending.idempotency is not None
        route, key, line, body_digest = pending.idempotency
        lines = keys.get((pending.tenant_id, route, key), {})
        if line in lines or any(winner.body_digest != body_digest for winner in lines.values()):
            lsns.add(pending.lsn)
    return lsns
