"""Offers: what a peer lacks of a tenant's chain, sent with the news of a newer checkpoint.

A peer that asks for news names the tenants that it imported last, and how far it is in each chain. If little is
lacking there, the answer has a proof of the checkpoint and a bundle of the lacking entries, and the peer needs no other
request. There is no offer where more is lacking, or where it cannot be made: the peer then asks for both, and is
answered why::

    positions of a request          <= OFFERS_MAX
    entries of one offer            <= OFFERED_ENTRIES_MAX
    bytes of an answer's bundles    <= OFFERED_BYTES_MAX
    time for an answer's offers     <= OFFERS_S_MAX
    answers with offers under way   <= AT_ONCE_MAX
    bundles kept                    <= KEPT_MAX

Peers mostly lack the same, so the newest bundles are kept for the next one that asks.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.tasks import keep_newest
from app.share.exchange.lacking import Lacking
from app.store import Connection, exchange
from app.store.exchange import TenantNews
from app.store.reading import Pool, reading
from app.trust.retention import RetentionReader
from ledger import names
from ledger.errors import InvalidInputError, LedgerError
from signing import checkpoint

OFFERS_MAX: Final = 8
OFFERED_ENTRIES_MAX: Final = 200
OFFERED_BYTES_MAX: Final = 128 << 10
OFFERS_S_MAX: Final = 1.0
"""News must not wait for offers: writes wait for what news says about imports."""
AT_ONCE_MAX: Final = 8
KEPT_MAX: Final = 8
_position = re.compile(f"([0-9]{{1,18}}) ([0-9]{{1,18}}) ({names.READABLE_TENANT_ID})").fullmatch


class Position(NamedTuple):
    """How far a ledger is in a chain of another: it has all up to ``imported_seq``, and has seen a tree of ``size``."""

    imported_seq: int
    size: int


def read_positions(texts: Sequence[str]) -> dict[str, Position]:
    """The positions of a request, by tenant.

    Raises:
        InvalidInputError: a text is not of that form.
    """
    found = {}
    for text in texts:
        if (match := _position(text)) is None:
            raise InvalidInputError("at: takes `seq size tenant`", ("at",))
        found[match[3]] = Position(int(match[1]), int(match[2]))
    return found


class Offer(NamedTuple):
    """What a ledger at ``position`` lacks up to the newest checkpoint of a tenant."""

    position: Position
    consistency: Sequence[str]
    """Proof, in hex, that the checkpoint's tree extends that of the position; empty if the position has none."""
    from_seq: int
    """First entry of the bundle, which ends at ``to_seq``, the size of the checkpoint."""
    to_seq: int
    bundle: bytes
    """Empty if no entry is lacking."""
    holds_payloads: bool
    """Whether the bundle has more than records of reads. A read of these is not recorded itself: each record would be
    new to the peer, whose next request would be recorded again, without end."""


@dataclass(kw_only=True, eq=False)
class Offers:
    """Makes the offers of one node."""

    pool: Pool
    retention: RetentionReader
    prove: Callable[[Connection, str, int, int], Awaitable[Sequence[str]]]
    """The consistency proof, in hex, between two sizes of a tenant's tree."""
    bundle: Callable[[Connection, str, int, int, int], Awaitable[bytes | None]]
    """A bundle of these entries of a tenant; None if it is longer than the last argument."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """One bundle at a time: peers that ask at the same time mostly get the same one."""
    _under_way: int = field(default=0, init=False)
    _kept: OrderedDict[tuple[str, int, int], bytes | None] = field(default_factory=OrderedDict, init=False)

    async def of_news(
        self, news: Sequence[TenantNews], positions: Mapping[str, Position], have: Sequence[str]
    ) -> dict[str, Offer]:
        """The offers for these tenants, by name, to a ledger at ``positions`` that has the entries ``have``, as
        ``Lacking`` takes them."""
        found: dict[str, Offer] = {}
        if self._under_way == AT_ONCE_MAX:
            return found
        left_bytes = OFFERED_BYTES_MAX
        self._under_way += 1
        try:
            async with asyncio.timeout(OFFERS_S_MAX):
                for each in news:
                    if each.checkpoint is None or (position := positions.get(each.tenant_id)) is None:
                        continue
                    size = checkpoint.read(each.checkpoint).size
                    offer = await self._offer(each.tenant_id, position, size, Lacking(have))
                    if offer is not None and len(offer.bundle) <= left_bytes:
                        left_bytes -= len(offer.bundle)
                        found[each.tenant_id] = offer
        except (TimeoutError, LedgerError, *DATABASE_FAULTS) as error:
            log.debug("offer_not_made", error=f"{type(error).__name__}: {error}")
        finally:
            self._under_way -= 1
        return found

    async def _offer(self, tenant_id: str, position: Position, size: int, lacking: Lacking) -> Offer | None:
        first = position.imported_seq + 1
        if not 0 <= size - first < OFFERED_ENTRIES_MAX or position.size > size:
            return None
        async with reading(self.pool, snapshot=True) as connection:
            await self.retention.refuse_left(connection, tenant_id, first)
            lacking.add(await exchange.origins(connection, tenant_id, first, size))
            ranges = lacking.ranges()
            from_seq = ranges[0][0] if ranges else size + 1
            bundle = await self._bundle(connection, tenant_id, from_seq, size) if ranges else b""
            if bundle is None:
                return None
            has_proof = 0 < position.size < size
            proof = await self.prove(connection, tenant_id, position.size, size) if has_proof else ()
            holds_payloads = bool(bundle) and await exchange.holds_payloads(connection, tenant_id, from_seq, size)
        return Offer(position, proof, from_seq, size, bundle, holds_payloads)

    async def _bundle(self, connection: Connection, tenant_id: str, from_seq: int, to_seq: int) -> bytes | None:
        key = (tenant_id, from_seq, to_seq)
        async with self._turn:
            if key not in self._kept:
                made = await self.bundle(connection, tenant_id, from_seq, to_seq, OFFERED_BYTES_MAX)
                keep_newest(self._kept, key, made, KEPT_MAX)
            return self._kept[key]
