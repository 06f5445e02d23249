"""News for peers: the newest checkpoint of each tenant, and how much of a peer's ledger is imported here.

A peer asks with the cursor of the last answer, and is answered as soon as there are changes after it::

    run:number          every change of this run up to ``number`` was reported
    run:number:tenant   the tenants up to this one were listed, of all that there are
    empty, another run  the list begins

A run is that of a node. Its changes are numbered in memory and forgotten with it; then the peer lists all again. A list
that another node began is continued, and then every change of this run is reported.

*Offers* are what a peer lacks of a tenant's chain, sent with the news of a newer checkpoint. A peer that asks for news
names the tenants that it imported last, and how far it is in each chain. If little is lacking there, the answer has a
proof of the checkpoint and a bundle of the lacking entries, and the peer needs no other request. There is no offer
where more is lacking, or where it cannot be made: the peer then asks for both, and is answered why::

    positions of a request          <= OFFERS_MAX
    entries of one offer            <= OFFERED_ENTRIES_MAX
    bytes of an answer's bundles    <= OFFERED_BYTES_MAX
    time for an answer's offers     <= OFFERS_S_MAX
    answers with offers under way   <= AT_ONCE_MAX
    bundles kept                    <= KEPT_MAX

Peers mostly lack the same, so the newest bundles are kept for the next one that asks. Which entries another ledger
lacks is known by the logs from which it has entries already (``Lacking``).
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Final, NamedTuple

from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.tasks import Broadcast, keep_newest
from app.store import Connection, exchange
from app.store.exchange import TenantNews
from app.store.reading import Pool, reading
from app.trust.retention import RetentionReader
from ledger import names
from ledger.chain.form import read_origin
from ledger.errors import InvalidInputError, LedgerError
from signing import checkpoint

TOLD_MAX = 200
"""Tenants in one answer."""
ECHO_S = 1.0
"""How long a checkpoint over imported entries alone may wait for other news. Otherwise each import would have every
peer prove it and search what it has."""


class Cursor(NamedTuple):
    """What was reported: changes of this run up to ``number``, and while tenants are listed, those up to ``after``."""

    number: int
    after: str | None = None


class News:
    """The changes of one node's run. Belongs to one event loop."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(8)
        self.waiting = 0
        """Requests that wait."""
        self._number = 0
        self._numbers: dict[tuple[str, str | None], int] = {}
        """The number of the last change of each tenant, ascending; by the log of the ledger that it concerns, None for
        all."""
        self._sizes: dict[str, int] = {}
        """The size of the newest checkpoint of each tenant that was seen."""
        self._imported: dict[str, int] = {}
        """By tenant, up to which seq its chain has nothing but imported entries since the size that was seen."""
        self._echoes: set[str] = set()
        """Tenants whose newest checkpoint is reported within ``ECHO_S``."""
        self._changed = Broadcast()
        self._ends = False

    def signed(self, sizes: Mapping[str, int]) -> None:
        """There are checkpoints of these sizes; one that is known changes nothing. One that covers nothing new but
        imported entries, which peers mostly have, is reported within ``ECHO_S``."""
        newer = {name: size for name, size in sizes.items() if size > self._sizes.get(name, -1)}
        self._sizes |= newer
        echoes = [name for name, size in newer.items() if 0 < size <= self._imported.get(name, 0)]
        if echoes and not self._echoes:
            asyncio.get_running_loop().call_later(ECHO_S, self._tell_echoes)
        self._echoes.update(echoes)
        if others := [name for name in newer if name not in echoes]:
            self.changed(others)

    def unsigned(self, seqs: Mapping[str, int]) -> dict[str, int]:
        """Those of these tenants that have no checkpoint up to their seq yet."""
        return {name: seq for name, seq in seqs.items() if self._sizes.get(name, 0) < seq}

    async def wait_signed(self, seqs: Mapping[str, int], wait_s: float) -> None:
        """Return once there are checkpoints of these tenants up to these seqs, or ``wait_s`` later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.unsigned(seqs):
                    await self._changed.wait()

    def _tell_echoes(self) -> None:
        echoes, self._echoes = self._echoes, set()
        self.changed(sorted(echoes))

    def imported(self, tenant_id: str, from_seq: int, to_seq: int) -> None:
        """These entries of a tenant's chain came from another ledger."""
        if from_seq <= max(self._sizes.get(tenant_id, 0), self._imported.get(tenant_id, 0)) + 1:
            self._imported[tenant_id] = to_seq

    def changed(self, tenant_ids: Iterable[str], log_origin: str | None = None) -> None:
        """There are newer checkpoints of these tenants; or more of the ledger of this log is imported."""
        for name in tenant_ids:
            self._number += 1
            self._numbers.pop((name, log_origin), None)
            self._numbers[name, log_origin] = self._number
        self._changed.send()

    def _newer(self, number: int, log_origin: str) -> list[tuple[str, str | None, int]]:
        """Tenant, log and number of the changes after ``number`` that concern the ledger of this log, ascending."""
        newer = [*takewhile(lambda each: each[1] > number, reversed(self._numbers.items()))]
        return [(name, log, at) for (name, log), at in reversed(newer) if log in (None, log_origin)]

    def end(self) -> None:
        """The node stops: end all waits."""
        self._ends = True
        self._changed.send()

    def read(self, cursor: str) -> Cursor:
        """What was reported to a peer, by the cursor of its request."""
        run, _, rest = cursor.partition(":")
        number, _, after = rest.partition(":")
        if run == self.run and int(number) <= self._number:
            return Cursor(int(number), after or None)
        return Cursor(0, after) if after else Cursor(self._number, "")

    def cursor(self, number: int, after: str | None = None) -> str:
        """The cursor of an answer."""
        return f"{self.run}:{number}" if after is None else f"{self.run}:{number}:{after}"

    async def after(self, number: int, wait_s: float, log_origin: str) -> tuple[dict[str, bool], int]:
        """The tenants that changed after ``number`` for the ledger of this log, those that changed first and at most
        ``TOLD_MAX``, each with whether it has a newer checkpoint; and the number up to which they are reported. Waits
        up to ``wait_s`` for one; then there is none."""
        ends_s = asyncio.get_running_loop().time() + wait_s
        try:
            async with asyncio.timeout_at(ends_s):
                while True:
                    if told := self._newer(number, log_origin)[:TOLD_MAX]:
                        signed = {name for name, log, _ in told if log is None}
                        return {name: name in signed for name, _, _ in told}, told[-1][2]
                    number = self._number
                    if self._ends:
                        return {}, number
                    self.waiting += 1
                    try:
                        await self._changed.wait()
                    finally:
                        self.waiting -= 1
        except TimeoutError:
            return {}, number


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


HAVE_MAX = 64
"""Most logs that a request names as had; the entries of further logs are fetched a second time."""
RANGES_MAX = 16
"""Ranges fetched as bundles of their own. A bundle costs more than a few entries that come along for nothing."""

_had = re.compile("([0-9]{1,18}) ([^ ]+)").fullmatch


class Lacking:
    """Collects ranges of lacking entries."""

    def __init__(self, have: Iterable[str]) -> None:
        """``have``: texts ``seq log``; the other ledger has the entries that were first chained in this log up to seq.

        Raises:
            InvalidInputError: a text is not of that form.
        """
        self._have: dict[str, int] = {}
        for text in have:
            if (match := _had(text)) is None:
                raise InvalidInputError("have: takes `seq log`", ("have",))
            self._have[match[2]] = int(match[1])
        self._ranges: list[tuple[int, int]] = []

    def add(self, entries: Iterable[tuple[int, str | None]]) -> None:
        """The next entries in order: seq, and the stored origin."""
        for seq, origin in entries:
            if origin is not None and self._has(origin):
                continue
            if self._ranges and self._ranges[-1][1] == seq - 1:
                self._ranges[-1] = self._ranges[-1][0], seq
            else:
                self._ranges.append((seq, seq))

    def ranges(self) -> Sequence[tuple[int, int]]:
        """The lacking entries, and the shortest gaps between them if there were more than ``RANGES_MAX`` ranges."""
        found = self._ranges
        if len(found) <= RANGES_MAX:
            return found
        gaps = [after[0] - before[1] for before, after in pairwise(found)]
        widest = sorted(sorted(range(len(gaps)), key=gaps.__getitem__)[-RANGES_MAX + 1 :])
        firsts, lasts = [0, *(at + 1 for at in widest)], [*widest, len(found) - 1]
        return [(found[first][0], found[last][1]) for first, last in zip(firsts, lasts, strict=True)]

    def _has(self, origin: str) -> bool:
        try:
            log, seq, _ = read_origin(origin)
        except InvalidInputError:
            return False
        return seq <= self._have.get(log, 0)
