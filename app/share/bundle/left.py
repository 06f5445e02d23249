"""Entries of bundles that were in a chain here, and left it with a prune: they do not come back.

Rows that left are not found by their HLC. What tells an entry that left from a new one is listed in
``ledger.bundle.merge.Left``. The order of reads matters, since rows leave meanwhile: the rows were looked up before the
floor and the jobs that departed are read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from app.store import exchange
from app.store.departed import departed
from app.trust.retention import RetentionReader
from ledger.bundle.merge import Incoming, Left, event_of
from ledger.chain.conflict import Event
from ledger.hlc import Hlc
from ledger.machines.retention import Floor, archived

if TYPE_CHECKING:
    from app.store import Connection


class Departures(NamedTuple):
    """Finds the entries of one import that left."""

    retention: RetentionReader
    was_taken: bool = False
    """Whether these bundles were imported before."""
    followed_log: str | None = None
    """The log whose next range this is, if a peer sent it."""

    async def add_left(
        self, connection: Connection, batch: Sequence[Incoming], existing: Mapping[str, dict[str, Event]]
    ) -> None:
        """Add to ``existing``, the chained events by tenant and HLC, the events of ``batch`` that left.

        Raises:
            ArchivedError: whether an entry left cannot be told.
        """
        for tenant_id, here in existing.items():
            known = await self.retention.read(connection, tenant_id)
            if known.floor is None:
                continue
            left = await self._left(connection, tenant_id, known.floor)
            doubtful = left.doubtful((entry for entry in batch if entry.tenant_id == tenant_id), here)
            jobs = {*await departed(connection, sorted({(tenant_id, entry.job_id) for entry in doubtful}))}
            for entry in doubtful:
                has_left = left.has_left(entry, is_of_departed_job=(tenant_id, entry.job_id) in jobs)
                if has_left is None:
                    raise archived(
                        f"no more of these bundles is imported: job {entry.job_id} of tenant {tenant_id}, of which "
                        f"they have an entry that may have left as well (HLC {entry.t_hlc}, seq {entry.key.seq} of "
                        f"{entry.key.log}),",
                        known.floor,
                    )
                if has_left:
                    here[entry.t_hlc] = event_of(entry)

    async def _left(self, connection: Connection, tenant_id: str, floor: Floor) -> Left:
        seen = await exchange.positions(connection, tenant_id)
        imported = {log: each.imported_seq for log, each in seen.items()}
        return Left(
            floor.to_seq,
            Hlc.parse(floor.highest_hlc),
            self.retention.origin(tenant_id),
            imported,
            was_taken=self.was_taken,
            # What was imported of a peer's chain has no gaps.
            is_next=self.followed_log is not None and imported.get(self.followed_log, 0) > 0,
        )
