"""The table of commitments is compared with the log before a list is answered from it.

Each comparison costs time in proportion to the tenant's history of commitments, some microseconds an entry. So one
comparison counts for a time that is ``COST_FACTOR`` times as long as it took: comparing takes a fiftieth of the time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final

from app.store import commitments
from app.store.entry_check import not_as_chained

if TYPE_CHECKING:
    from app.store import Connection

COST_FACTOR: Final = 50
TENANTS_MAX: Final = 10_000
"""Tenants whose last comparison is remembered; the oldest is evicted first."""


class PromiseCheck:
    """Compares the tables of commitments of tenants. ``begin_again`` has a false one written from the first entry."""

    def __init__(self, begin_again: Callable[[str], object]) -> None:
        self._begin_again = begin_again
        self._counts_until_s: OrderedDict[str, float] = OrderedDict()

    async def require(self, connection: Connection, tenant_id: str) -> None:
        """Return when the table says what the entries say that it has followed. In a transaction that shows one state.

        Raises:
            ChainDamagedError: names the first row that does not.
        """
        began_s = monotonic()
        if began_s < self._counts_until_s.get(tenant_id, 0.0):
            return
        to_seq = await commitments.followed_seq(connection, tenant_id)
        found = await commitments.first_false(connection, tenant_id, to_seq)
        if found is not None:
            self._begin_again(tenant_id)
            raise not_as_chained(tenant_id, found)
        ended_s = monotonic()
        self._counts_until_s[tenant_id] = ended_s + COST_FACTOR * (ended_s - began_s)
        self._counts_until_s.move_to_end(tenant_id)
        if len(self._counts_until_s) > TENANTS_MAX:
            self._counts_until_s.popitem(last=False)
