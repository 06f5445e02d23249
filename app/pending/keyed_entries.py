"""Which keyed events the chains hold, by what each says of its Idempotency-Key (``ledger.keyed``).

The table of keys can be edited. A row that was removed would have its request recorded a second time, so a request
without a row is looked for here before it is taken for a new one::

    newest KEYED_MAX keyed entries that this node followed since its start, of all tenants
    and those among the last ENTRIES_READ of a tenant, read with its first keyed request

Keys are kept ``RETENTION_DAYS``; an entry that is about as old says nothing of its row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import orjson

from app.store.following import FollowedEntry
from app.store.idempotency import ENTRIES_READ, RETENTION_DAYS, KeyedEntry
from ledger import keyed

KEYED_MAX: Final = 50_000
"""Keyed entries that are remembered, some 200 bytes each; the oldest is evicted first."""
TENANTS_MAX: Final = 10_000
"""Tenants whose last entries need not be read again; the oldest is evicted first."""
KEPT_MS: Final = (RETENTION_DAYS * 24 - 1) * 3_600_000
"""How old an entry is at most whose row must be there."""

_MARK: Final = f'"{keyed.MEMBER}":"'
assert ENTRIES_READ <= KEYED_MAX

Load = Callable[[str], Awaitable[Sequence[KeyedEntry]]]


class _Place(NamedTuple):
    seq: int
    physical_ms: int


class KeyedEntries:
    """The keyed entries that one node knows; belongs to its event loop."""

    def __init__(self, load: Load, now_ms: Callable[[], int]) -> None:
        """``load`` reads the keyed ones among the last entries of a tenant."""
        self._load = load
        self._now_ms = now_ms
        self._places: OrderedDict[str, _Place] = OrderedDict()
        """By key digest, which says the tenant too."""
        self._loaded: OrderedDict[str, None] = OrderedDict()

    async def seq_of(self, tenant_id: str, digests: Iterable[str]) -> int | None:
        """Seq of the entry of the tenant that says one of these key digests; None where none is known whose row must be
        in the table."""
        if tenant_id not in self._loaded:
            self._note((entry.hlc_physical, entry.seq, entry.payload) for entry in await self._load(tenant_id))
            self._loaded[tenant_id] = None
            if len(self._loaded) > TENANTS_MAX:
                self._loaded.popitem(last=False)
        oldest_ms = self._now_ms() - KEPT_MS
        places = (self._places.get(digest) for digest in digests)
        return next((place.seq for place in places if place is not None and place.physical_ms > oldest_ms), None)

    def followed(self, entries: Mapping[str, Sequence[FollowedEntry]]) -> None:
        """Take what was followed of each tenant. An imported entry came with a key of another ledger."""
        for of_tenant in entries.values():
            self._note((entry.hlc_physical, entry.seq, entry.payload) for entry in of_tenant if entry.origin is None)

    def _note(self, entries: Iterable[tuple[int, int, str]]) -> None:
        for physical_ms, seq, payload in entries:
            if payload.__class__ is not str or _MARK not in payload:
                continue
            try:
                digest = keyed.digest_in(orjson.loads(payload))
            except (ValueError, AttributeError):
                continue
            if digest is not None and physical_ms.__class__ is int:
                self._places[digest] = _Place(seq, physical_ms)
        while len(self._places) > KEYED_MAX:
            self._places.popitem(last=False)
