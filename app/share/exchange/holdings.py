"""How much of this ledger's chains a peer says that it has imported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

import asyncpg

from app.runtime.postgres import DATABASE_FAULTS
from app.share.exchange.peer_client import PeerAddress, PeerClient
from app.store.chaining import read_heads
from ledger.errors import LedgerError


class Held(NamedTuple):
    """Up to which seq a peer has imported a chain, and when it said so, by the monotonic clock."""

    seq: int
    at_s: float


@dataclass
class Holdings:
    """The holdings of one peer, by tenant."""

    url: str
    """The peer's."""
    origin: str
    """Log origin of this ledger."""
    address: PeerAddress
    pool: asyncpg.Pool[asyncpg.Record]
    head_seq: Callable[[str], int]
    """A seq that the head of a tenant's chain here has reached; other nodes may have chained more."""
    on_heard: Callable[[], None]
    """Called when the peer has said what it holds."""
    interval_s: float
    heard_s: float = 0.0
    """When the peer answered last."""
    _held: dict[str, Held] = field(default_factory=dict, init=False)
    _most: dict[str, int] = field(default_factory=dict, init=False)
    """By tenant, the highest seq up to which it ever said so."""
    _overclaims: dict[str, str] = field(default_factory=dict, init=False)
    """By tenant, that the peer says it has more of this ledger than there is."""
    _asked_s: dict[str, float] = field(default_factory=dict, init=False)
    """By tenant, when the peer was last asked how much it holds."""

    def seq(self, tenant_id: str) -> int:
        """Up to which seq it has said that it holds a chain."""
        held = self._held.get(tenant_id)
        return held.seq if held else 0

    def holds(self, tenant_id: str, seq: int, since_s: float) -> bool:
        """Whether it said since then that it has imported the tenant's chain up to ``seq``."""
        held = self._held.get(tenant_id)
        return held is not None and held.at_s >= since_s and held.seq >= seq

    @property
    def faults(self) -> list[str]:
        """Claims that cannot be true."""
        return [f"tenant {tenant_id}: {claim}" for tenant_id, claim in self._overclaims.items()]

    async def hear(self, claims: Mapping[str, int]) -> bool:
        """Keep what the peer says now. Returns whether it holds more of a chain than it ever said."""
        self.heard_s = monotonic()
        is_more = await self._keep(claims, self.heard_s)
        self.on_heard()
        return is_more

    async def _keep(self, claims: Mapping[str, int], at_s: float) -> bool:
        is_more = False
        # A claim of more than there is does not count.
        head_seqs = {each: self.head_seq(each) for each in claims}
        if beyond := [each for each, seq in claims.items() if seq > head_seqs[each]]:
            async with self.pool.acquire() as connection:
                head_seqs |= {each: head.seq for each, head in (await read_heads(connection, beyond)).items()}
        for tenant_id, seq in claims.items():
            if seq > (head_seq := head_seqs[tenant_id]):
                self._held.pop(tenant_id, None)
                self._overclaims[tenant_id] = (
                    f"it says that it has {seq} entries of this ledger, which has {head_seq}: it is wrong, or this "
                    "ledger was restored from before"
                )
            else:
                self._overclaims.pop(tenant_id, None)
                self._held[tenant_id] = Held(seq, at_s)
                is_more |= seq > self._most.get(tenant_id, 0)
                self._most[tenant_id] = max(seq, self._most.get(tenant_id, 0))
        return is_more

    async def ask(self, tenant_id: str, seq: int) -> None:
        """Ask, until it says so, whether it has imported the tenant's chain up to ``seq``: at once if it said so
        before, else every ``interval_s``, beside its news. Writes that wait at the same time share a request."""
        since_s = monotonic()
        if self.seq(tenant_id) < seq:
            await asyncio.sleep(self.interval_s)
        while not self.holds(tenant_id, seq, since_s):
            asked_s = self._asked_s.get(tenant_id, 0.0)
            if asked_s >= max(since_s, monotonic() - self.interval_s):
                await asyncio.sleep(asked_s + self.interval_s - monotonic())
                continue
            self._asked_s[tenant_id] = asked_s = monotonic()
            with suppress(LedgerError, OSError, *DATABASE_FAULTS):
                async with await self.address.open() as http:
                    said = await PeerClient(self.url, http).held(self.origin, tenant_id)
                    self.heard_s = monotonic()
                    if tenant_id not in self._held or self._held[tenant_id].at_s < asked_s:
                        await self._keep({tenant_id: said}, asked_s)
                    self.on_heard()
            await asyncio.sleep(self.interval_s)

    def keep_only(self, tenant_ids: Collection[str]) -> None:
        """The peer lists these tenants alone."""
        self._held = {each: held for each, held in self._held.items() if each in tenant_ids}
        self._most = {each: seq for each, seq in self._most.items() if each in tenant_ids}
        self._overclaims = {each: claim for each, claim in self._overclaims.items() if each in tenant_ids}
        self._asked_s = {each: asked_s for each, asked_s in self._asked_s.items() if each in tenant_ids}

    def forget(self) -> None:
        """Whatever answers next is another ledger."""
        self.keep_only(())
        self.heard_s = 0.0
