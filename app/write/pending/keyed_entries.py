"""Which keyed events the chains hold, by what each says of its Idempotency-Key (``ledger.keyed``).

The table of keys can be edited. A row that was removed would have its request recorded a second time, so a request
without a row is looked for here before it is taken for a new one::

    newest KEYED_MAX keyed entries that this node followed since its start, of all tenants
    and those among the last ENTRIES_READ of a tenant, or ENTRIES_READ_BYTES, read with its first keyed request

Keys are kept ``RETENTION_DAYS`` by the clock of PostgreSQL, and a restore brings entries back without them. So an entry
says nothing of its row where it is about as old, is of the future, or was followed long after it was written.
"""

from __future__ import annotations

import asyncio
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
KEPT_MS: Final = (RETENTION_DAYS - 1) * 86_400_000
"""How old an entry is at most whose row must be there: clocks of nodes and of PostgreSQL may differ by a day."""
AHEAD_MS: Final = 60_000
"""How far the clock of the node that wrote an entry may be ahead of this one's."""
FOLLOWED_WITHIN_MS: Final = 3_600_000
"""How old an entry is at most when it is followed: older ones may have been restored."""

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
        self._loading = asyncio.Lock()
        """Held by the one request that reads entries: others wait for what it finds."""

    async def seq_of(self, tenant_id: str, digests: Iterable[str]) -> int | None:
        """Seq of the entry of the tenant that says one of these key digests; None where none is known whose row must be
        in the table."""
        if tenant_id not in self._loaded:
            async with self._loading:
                await self._load_once(tenant_id)
        now_ms = self._now_ms()
        oldest_ms, newest_ms = now_ms - KEPT_MS, now_ms + AHEAD_MS
        places = [place for place in map(self._places.get, digests) if place is not None]
        return next((place.seq for place in places if oldest_ms < place.physical_ms < newest_ms), None)

    async def _load_once(self, tenant_id: str) -> None:
        if tenant_id in self._loaded:
            return
        for entry in await self._load(tenant_id):
            self._note(entry.digest, entry.seq, entry.hlc_physical)
        self._loaded[tenant_id] = None
        if len(self._loaded) > TENANTS_MAX:
            self._loaded.popitem(last=False)

    def followed(self, entries: Mapping[str, Sequence[FollowedEntry]]) -> None:
        """Take what was followed of each tenant. An imported entry came with a key of another ledger."""
        oldest_ms = self._now_ms() - FOLLOWED_WITHIN_MS
        for of_tenant in entries.values():
            for entry in of_tenant:
                if entry.origin is None and entry.hlc_physical.__class__ is int and entry.hlc_physical > oldest_ms:
                    self._note(_digest_in(entry.payload), entry.seq, entry.hlc_physical)

    def _note(self, digest: str | None, seq: int, physical_ms: int) -> None:
        if digest is None:
            return
        self._places[digest] = _Place(seq, physical_ms)
        if len(self._places) > KEYED_MAX:
            self._places.popitem(last=False)


def _digest_in(payload: object) -> str | None:
    """What the payload of an entry says of its key; None where it says nothing."""
    if not isinstance(payload, str) or _MARK not in payload:
        return None
    try:
        return keyed.digest_in(orjson.loads(payload))
    except (ValueError, AttributeError):
        return None
