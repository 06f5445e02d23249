"""Following one peer: its newest signed checkpoints, proved to extend those seen before, and the missing ranges,
imported as bundles. A bundle must be the requested range and lie under the proved checkpoint.

Ranges are imported one at a time, in the order of the peer's chain. So the order is causal: an entry comes after those
that its node had seen. After a crash it continues after the last stored range, and a range imported twice adds nothing.
Entries that this ledger has from elsewhere, its own among them, are not fetched: its request names the logs of which it
has entries, and up to which seq. What is lacking may come with the news of a checkpoint (``news``); it then takes the
place of the answers that would be asked for, once, if it continues what is imported and seen.

If a peer went back or shows another tree of the same size for one tenant, imports of all its tenants stop until an
operator decides. So a round checks every tenant of which there is news before it imports anything, and none begins
while the peer lists its tenants. The same applies to a peer that no longer lists a tenant seen before, or shows a log
of another origin. Any other fault of a tenant is reported, and stops no other tenant.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import asyncpg

from app.runtime.logs import log
from app.runtime.outgoing import NoAnswerError
from app.runtime.principals import covers
from app.runtime.settings.sections import PeerSettings
from app.runtime.tasks import is_set_within, keep_newest
from app.share.exchange.news import OFFERS_MAX, Position
from app.share.exchange.peer_chain import (
    BroughtRange,
    PeerChain,
    PeerForkedError,
    PeerWentBackError,
    check_growth,
    check_held,
    check_range,
    grown_from,
)
from app.share.exchange.peer_client import (
    TENANTS_MAX,
    Asker,
    Lacking,
    Offered,
    PeerAddress,
    PeerClient,
    PeerPrunedError,
    Progress,
    TenantNews,
)
from app.share.exchange.turns import Turns
from app.store import exchange
from app.store.exchange import Seen
from app.store.reading import run_in
from ledger.errors import LedgerError, SignatureError
from ledger.facts.events import SYSTEM_TENANT
from signing.checkpoint import open_checkpoint, signer_of
from signing.keys import Keyring, PublicKey
from signing.manifest import LOG_ORIGIN, RangeManifest
from signing.note import is_signed_by

PAUSE_MAX_S = 60.0
"""Longest pause between attempts to import a failing tenant."""
MORE_NEWS_S = 0.05
"""How long a round that is due waits for news after the one before."""
FAILED_TENANT_S = 0.0005
"""Pause of a round for each tenant whose checkpoint is not proved. It bounds the cost of a peer that reports a
hundred thousand such tenants."""
NOTES_BYTES_MAX = 64 << 20
"""Bytes of the checkpoints of one peer that are kept at once: four witnesses sign those of all tenants."""
TURN_EVERY_S = 0.2
"""How often a node asks whether it may import, while another does."""
FAILING_S_MAX = 60.0
"""A round defers its remaining tenants once failing ones have taken longer: the peer may be away."""
FAULTS_NAMED_MAX = 5
"""Tenants that are named with their faults; the rest are counted."""
FAULT_CHARACTERS_MAX = 1000
"""Characters kept of a tenant's fault: a hundred thousand tenants of a peer may fail."""
_is_log_origin = re.compile(LOG_ORIGIN).fullmatch


Expect = Callable[[RangeManifest], None]
"""Raises if a bundle is not the one that was asked for."""
TakeFetched = Callable[[str, AsyncGenerator[bytes, None], Expect], Awaitable[int]]
"""Imports a bundle that comes in pieces, under a name, if it holds and is expected; returns the entries added."""
TakeOffered = Callable[[str, bytes, Expect], Awaitable[int]]
"""The same of one that came with its news."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Importing:
    """What imports from every peer share at one node."""

    own: Asker
    """This ledger."""
    pool: asyncpg.Pool[asyncpg.Record]
    turns: Turns
    keys: Callable[[], Keyring]
    """Reads the keys that this ledger trusts; there may be none."""
    take_fetched: TakeFetched
    take_offered: TakeOffered
    on_imported: Callable[[str, str], None]
    """Called with a tenant of which more was imported, and the log origin of the peer's ledger."""
    range_entries: int
    interval_s: float


@dataclass
class Following:
    """The chains of one peer, and their imports."""

    settings: PeerSettings
    address: PeerAddress
    here: Importing
    imported_entries: int = 0
    log_origin: str = ""
    """Log origin of the peer's ledger; empty until one of its checkpoints is proved."""
    is_retired: bool = False
    """Whether nothing more is imported."""
    idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while no round is under way or due."""
    listed: set[str] = field(default_factory=set, init=False)
    """The tenants of the peer's last list, and those in its news since."""
    _chains: dict[str, PeerChain] = field(default_factory=dict, init=False)
    _due: dict[str, None] = field(default_factory=dict, init=False)
    """Tenants whose checkpoint is to be proved."""
    _notes_bytes: int = field(default=0, init=False)
    _has_listed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while no list is under way."""
    _is_list_new: bool = field(default=False, init=False)
    """Whether the last list was not yet compared with the tenants that were seen."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _is_importing: bool = field(default=False, init=False)
    """Whether this node took the last turn, and not another."""
    _recent: OrderedDict[str, None] = field(default_factory=OrderedDict, init=False)
    """The tenants that were imported last."""
    _offers: dict[str, tuple[bytes, Offered]] = field(default_factory=dict, init=False)
    """What came with the last news, by tenant, and the checkpoint that it belongs to."""

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def lag_entries(self) -> int:
        """Entries under the last seen checkpoints that are not imported yet."""
        return sum(chain.size - chain.imported_seq for chain in self._chains.values())

    @property
    def has_gone_back(self) -> bool:
        """Whether a tenant's log no longer equals or extends the one seen before, which stops all imports."""
        return any(chain.went_back for chain in self._chains.values())

    @property
    def faults(self) -> list[str]:
        """Why some tenants are not imported."""
        # Tenants that went back come first: they stop the others.
        failing = [chain for chain in self._chains.values() if chain.fault is not None]
        failing.sort(key=lambda chain: not chain.went_back)
        named = [f"tenant {chain.tenant_id}: {chain.fault}" for chain in failing[:FAULTS_NAMED_MAX]]
        if len(failing) > FAULTS_NAMED_MAX:
            named.append(f"{len(failing) - FAULTS_NAMED_MAX} more tenants")
        return named

    # --- what is heard ----------------------------------------------------------------------------

    def list_begins(self) -> None:
        """The peer lists its tenants from now on; no round begins."""
        self._has_listed.clear()

    def list_ends(self, tenant_ids: set[str]) -> None:
        """These are all its tenants."""
        self.listed, self._is_list_new = tenant_ids, True
        self._has_listed.set()
        self._wake.set()

    def heard(self, items: Iterable[TenantNews]) -> None:
        """There may be newer checkpoints of these tenants.

        Raises:
            NoAnswerError: too many bytes of checkpoints would be kept.
        """
        self._offers = {}
        for each in items:
            self.listed.add(each.tenant_id)
            if each.checkpoint and self._is_wanted(each.tenant_id):
                chain = self._chains.setdefault(each.tenant_id, PeerChain(each.tenant_id))
                note = each.checkpoint.encode()
                if chain.is_lacking or chain.proved_note_hash != hash(note):
                    self._keep_note(chain, note)
                    if each.offer is not None:
                        self._offers[each.tenant_id] = note, each.offer
                    # A tenant that fails is not tried more often because there is news of it again and again.
                    chain.due_at_s = 0.0 if chain.fault is None else chain.failed_at_s + self.here.interval_s
                    self._due[each.tenant_id] = None
        if self._ready():
            self.idle.clear()
        self._wake.set()

    async def progress(self) -> Progress:
        """How far this ledger is in the chains that it imported last, if no round is under way or due: what the peer
        offers next then follows."""
        chains = [self._chains[each] for each in self._recent if each in self._chains]
        chains = [chain for chain in chains if not chain.is_lacking]
        if not (self._is_importing and chains and self.idle.is_set()):
            return Progress()
        positions = {chain.tenant_id: Position(chain.imported_seq, chain.size) for chain in chains}
        return Progress(positions, await self._have(positions))

    async def _have(self, tenant_ids: Iterable[str]) -> dict[str, int]:
        return await run_in(self.here.pool.acquire(), exchange.had, self.here.own.origin, [*tenant_ids])

    def _keep_note(self, chain: PeerChain, note: bytes) -> None:
        """Keep a checkpoint until it is proved; beyond the bound all are forgotten, until the peer lists its tenants
        again."""
        self._notes_bytes += len(note) - len(chain.note)
        chain.note = note
        if self._notes_bytes > NOTES_BYTES_MAX:
            for each in self._chains.values():
                each.note = b""
            self._notes_bytes = 0
            self._due.clear()
            raise NoAnswerError(f"{self.settings.url} tells of checkpoints of more than {NOTES_BYTES_MAX >> 20} MiB")

    def _is_wanted(self, tenant_id: str) -> bool:
        return tenant_id != SYSTEM_TENANT and any(covers(pattern, tenant_id) for pattern in self.settings.tenants)

    def try_again(self) -> None:
        """Other keys are trusted now: all tenants that are due are tried at once."""
        for chain in self._due_chains():
            chain.due_at_s = 0.0
        self._wake.set()

    def was_brought(self, bundle: RangeManifest) -> None:
        """An operator imported this bundle. If it has what this peer's chain lacks, the next round goes on after it."""
        chain = self._chains.get(bundle.tenant_id)
        if chain is not None and chain.note and chain.origin == bundle.origin:
            chain.brought = BroughtRange(bundle.origin, bundle.from_seq, bundle.to_seq, bundle.tree_root)
            self._due_again(chain, 0.0)
            self._wake.set()

    def forget(self) -> None:
        """Whatever answers next is another ledger."""
        self._chains, self._due, self.listed, self._notes_bytes, self.log_origin = {}, {}, set(), 0, ""
        self._offers, self._is_importing = {}, False
        self._wake.set()

    # --- rounds -----------------------------------------------------------------------------------

    async def run(self, client: PeerClient, on_round: Callable[[], None]) -> None:
        """Prove the checkpoints of which there is news, and import what they cover, until the region is retired.
        ``on_round`` is called after each round."""
        while not self.is_retired:
            await self._has_listed.wait()
            ready = self._ready()
            if not ready and not self._is_list_new:
                next_s = min((chain.due_at_s for chain in self._due_chains()), default=monotonic() + PAUSE_MAX_S)
                self.idle.set()
                self._wake.clear()
                await is_set_within(self._wake, next_s - monotonic())
                continue
            await self.address.authorize(client.http)
            async with self.here.turns.turn(self.settings.url) as is_ours:
                self._is_importing = is_ours
                if is_ours:
                    await self._take_round(client, ready)
            if not is_ours:
                self.idle.set()
                # Another node imports. It may stop before it comes to these.
                await asyncio.sleep(TURN_EVERY_S)
            on_round()
            if self._due:
                # The peer may report a newer checkpoint now: one round then imports more.
                self._wake.clear()
                await is_set_within(self._wake, MORE_NEWS_S)

    def _ready(self) -> list[PeerChain]:
        now_s = monotonic()
        return [chain for chain in self._due_chains() if chain.due_at_s <= now_s]

    def _due_chains(self) -> list[PeerChain]:
        return [chain for each in self._due if (chain := self._chains.get(each)) is not None]

    async def _take_round(self, client: PeerClient, ready: Sequence[PeerChain]) -> None:
        """A round of these chains, which stay due if it fails."""
        for chain in ready:
            self._due.pop(chain.tenant_id, None)
        is_list_new, self._is_list_new = self._is_list_new, False
        self.idle.clear()
        try:
            await self._round(client, ready, is_list_new=is_list_new)
        except BaseException:
            self._due |= {chain.tenant_id: None for chain in ready}
            self._is_list_new |= is_list_new
            self.idle.set()
            raise
        finally:
            for chain in ready:
                chain.lacking = None
        if not self._ready():
            self.idle.set()

    async def _round(self, client: PeerClient, chains: Sequence[PeerChain], *, is_list_new: bool) -> None:
        # 1. The newest checkpoint of each, proved.
        keyring, known = await asyncio.to_thread(self.here.keys), self.log_origin
        seen = await self._each(chains, lambda chain: self._prove(client, keyring, chain))
        await asyncio.sleep(min(PAUSE_MAX_S, FAILED_TENANT_S * (len(chains) - len(seen))))
        # 2. The tenants that are no longer listed.
        if is_list_new or self.log_origin != known:
            await self._find_missing()
        if self.has_gone_back:
            for chain in seen:
                self._due_again(chain, self.here.interval_s)
            return
        # 3. The missing entries of each tenant.
        ready = []
        for chain in seen:
            if (left_s := chain.failed_at_s + chain.pause_s - monotonic()) > 0:
                self._due_again(chain, left_s)
            else:
                ready.append(chain)
        await self._each(ready, lambda chain: self._import(client, chain))

    async def _find_missing(self) -> None:
        """Compare the list with the tenants that were seen. A tenant that went back and is in neither is forgotten."""
        kept = await self._kept()
        missing = [each for each in kept if each not in self.listed]
        self._chains = {each: chain for each, chain in self._chains.items() if each in self.listed} | {
            each: self._chains.get(each) or PeerChain(each) for each in missing
        }
        self._due = {each: None for each in self._due if each in self.listed}
        for each in missing:
            # What it showed before is no news.
            self._chains[each].note = b""
            self._failed(
                self._chains[each],
                PeerWentBackError(
                    f"{self.settings.url} no longer lists the tenant, whose log {self.log_origin}/{each} was seen: "
                    "the peer was restored from before or hides it, or its token no longer has the right audit for it"
                ),
            )
        self._notes_bytes = sum(len(chain.note) for chain in self._chains.values())

    async def _kept(self) -> list[str]:
        """The tenants of its ledger that were seen. After an operator removed all, the peer may show another ledger."""
        # Of more than TENANTS_MAX kept tenants the peer cannot list all.
        kept = await run_in(
            self.here.pool.acquire(), exchange.held_of, self.log_origin, "", TENANTS_MAX + 1, self.settings.tenants
        )
        if not kept:
            self.log_origin = ""
        return [tenant_id for tenant_id, _ in kept]

    def _due_again(self, chain: PeerChain, after_s: float) -> None:
        chain.due_at_s = monotonic() + after_s
        self._due[chain.tenant_id] = None

    async def _each(self, chains: Iterable[PeerChain], work: Callable[[PeerChain], Awaitable[None]]) -> list[PeerChain]:
        """Do ``work`` for each, failures notwithstanding; returns the chains that did not fail."""
        done: list[PeerChain] = []
        failing_s = 0.0
        # Chains that failed before come last, so that they take no time from the others. Among them the one that failed
        # longest ago comes first, so that a slow one cannot starve the rest.
        for chain in sorted(chains, key=lambda chain: (chain.fault is not None, chain.failed_at_s)):
            await asyncio.sleep(0)  # a checkpoint that is no note at all is rejected without any wait
            began_s = monotonic()
            if failing_s > FAILING_S_MAX:
                self._due[chain.tenant_id] = None
                continue
            try:
                await work(chain)
                done.append(chain)
            except LedgerError as error:
                self._failed(chain, error)
                failing_s += chain.failed_at_s - began_s
        return done

    def _failed(self, chain: PeerChain, error: LedgerError) -> None:
        went_back = isinstance(error, PeerWentBackError)
        if chain.fault is None or (went_back and not chain.went_back):
            log.warning(
                "exchange_tenant_interrupted", peer=self.settings.url, tenant_id=chain.tenant_id, error=str(error)
            )
        chain.failed_at_s = monotonic()
        if chain.note:
            self._due_again(chain, max(self.here.interval_s, chain.pause_s))
        if not chain.is_forked and (went_back or not chain.went_back):
            # Only the text is kept: an error keeps the frames of its traceback alive.
            chain.fault, chain.went_back = f"{type(error).__name__}: {error}"[:FAULT_CHARACTERS_MAX], went_back
        chain.is_forked |= isinstance(error, PeerForkedError)

    async def _prove(self, client: PeerClient, keyring: Keyring, chain: PeerChain) -> None:
        """Prove the newest checkpoint of a tenant that was heard of, and learn which entries under it are lacking."""
        tenant_id, note = chain.tenant_id, chain.note
        checkpoint = open_checkpoint(note, keyring)
        origin = checkpoint.origin
        log_origin = origin.removesuffix(f"/{tenant_id}")
        if log_origin in (origin, self.here.own.origin) or not _is_log_origin(log_origin):
            raise SignatureError(f"the peer shows a checkpoint of {origin} for tenant {tenant_id}")
        kept = await run_in(self.here.pool.acquire(), exchange.positions, tenant_id)
        if (seen := kept.get(origin)) is None:
            self._recall(tenant_id, kept, signer_of(note, keyring))
        if self.log_origin not in ("", log_origin):
            raise PeerWentBackError(
                f"tenant {tenant_id} of {self.settings.url} is in the log {origin}, and the peer showed the log "
                f"{self.log_origin} before: it was restored as a fork or made anew"
            )
        try:
            before = grown_from(client.url, tenant_id, seen, checkpoint)
        except PeerForkedError:
            await run_in(self.here.pool.acquire(), exchange.saw_fork, tenant_id, origin, note.decode())
            raise
        before_seq, imported_seq = chain.imported_seq, seen.imported_seq if seen else 0
        sizes = None
        if before is not None:
            sizes = before.size, checkpoint.size
            # More than was seen cannot be imported; the row was edited.
            imported_seq = min(imported_seq, before.size)
        pruned: PeerPrunedError | None = None
        if imported_seq < checkpoint.size:
            try:
                chain.lacking = self._offered(chain, note, imported_seq, checkpoint.size, sizes) or await self._lacking(
                    client, tenant_id, imported_seq, checkpoint.size, sizes
                )
                proof = chain.lacking.consistency
            except PeerPrunedError as error:
                # The checkpoint is proved all the same: a fork is found also where nothing is imported.
                pruned, proof = error, [] if sizes is None else await client.consistency(tenant_id, *sizes)
            if before is not None:
                check_growth(client.url, tenant_id, before, checkpoint, proof)
        await run_in(self.here.pool.acquire(), exchange.saw, tenant_id, origin, note.decode(), checkpoint.size)
        self.log_origin = log_origin
        chain.origin, chain.size, chain.root = origin, checkpoint.size, checkpoint.root
        if chain.went_back and (seen is None or not chain.is_forked):
            chain.fault, chain.went_back, chain.is_forked = None, False, False
        chain.imported_seq, chain.proved_note_hash = imported_seq, hash(note)
        if imported_seq > before_seq:
            # Another node of this ledger imported them.
            self.here.on_imported(tenant_id, log_origin)
        if pruned is not None and not await self._goes_on(client, chain):
            raise pruned

    async def _goes_on(self, client: PeerClient, chain: PeerChain) -> bool:
        """Whether an operator imported what follows the entries imported before. It then counts as imported, as if it
        was fetched.

        Raises:
            ProofError: it does not lie under the peer's checkpoint.
        """
        brought = chain.brought
        if brought is None or not brought.from_seq - 1 <= chain.imported_seq < brought.to_seq <= chain.size:
            return False
        first, last = brought.from_seq, brought.to_seq
        check_range(chain, first, last, await self._consistency(client, chain, last), brought)
        await run_in(self.here.pool.acquire(), exchange.imported, chain.tenant_id, chain.origin, last)
        chain.imported_seq, chain.brought = last, None
        self.here.on_imported(chain.tenant_id, self.log_origin)
        return True

    @staticmethod
    async def _consistency(client: PeerClient, chain: PeerChain, seq: int) -> Sequence[bytes]:
        """The proof that the tree of ``seq`` entries is the beginning of that of the newest checkpoint."""
        return [] if seq == chain.size else await client.consistency(chain.tenant_id, seq, chain.size)

    def _offered(
        self, chain: PeerChain, note: bytes, imported_seq: int, size: int, sizes: tuple[int, int] | None
    ) -> Lacking | None:
        """What the peer sent with the checkpoint ``note`` of this size, once; None if that was nothing, or not what
        comes next."""
        offered_with, offer = self._offers.pop(chain.tenant_id, (b"", None))
        if offer is None or offered_with != note or size - imported_seq > self.here.range_entries:
            return None
        is_next = offer.imported_seq == imported_seq and (sizes is None or offer.size == sizes[0])
        is_whole = imported_seq < offer.from_seq <= size + 1 and bool(offer.bundle) == (offer.from_seq <= size)
        if not (is_next and is_whole):
            return None
        ranges = [(offer.from_seq, size)] if offer.bundle else []
        return Lacking(imported_seq + 1, size, ranges, [*map(bytes.fromhex, offer.consistency)], offer.bundle)

    async def _lacking(
        self,
        client: PeerClient,
        tenant_id: str,
        imported_seq: int,
        size: int,
        sizes: tuple[int, int] | None = None,
    ) -> Lacking:
        """What is lacking in the range after ``imported_seq``, which ends at ``size`` or before."""
        to_seq = min(imported_seq + self.here.range_entries, size)
        return await client.lacking(tenant_id, imported_seq + 1, to_seq, await self._have([tenant_id]), sizes)

    def _recall(self, tenant_id: str, kept: Mapping[str, Seen], key: PublicKey) -> None:
        """Set the log origin that the peer showed before: that of the kept checkpoint which ``key`` signed."""
        for origin, seen in kept.items():
            if is_signed_by(seen.note, origin, key):
                self.log_origin = origin.removesuffix(f"/{tenant_id}")

    async def _import(self, client: PeerClient, chain: PeerChain) -> None:
        """Import the missing entries, range by range. After a failure the tenant pauses, longer each time."""
        chain.pause_s = min(max(2 * chain.pause_s, self.here.interval_s), PAUSE_MAX_S)
        # Of a region that is retired meanwhile nothing more is imported.
        while chain.imported_seq < chain.size and not self.is_retired:
            lacking, chain.lacking = chain.lacking, None
            if lacking is None or lacking.from_seq != chain.imported_seq + 1:
                lacking = await self._lacking(client, chain.tenant_id, chain.imported_seq, chain.size)
            for first, last in lacking.ranges:
                self.imported_entries += await self._import_range(client, chain, first, last, lacking.bundle)
            async with self.here.pool.acquire() as connection:
                await check_held(connection, self.settings.url, chain, lacking.to_seq)
                await exchange.imported(connection, chain.tenant_id, chain.origin, lacking.to_seq)
            chain.imported_seq = lacking.to_seq
            self.here.on_imported(chain.tenant_id, self.log_origin)
        if chain.fault is not None:
            log.info("exchange_tenant_resumed", peer=self.settings.url, tenant_id=chain.tenant_id)
        chain.fault, chain.pause_s = None, 0.0
        keep_newest(self._recent, chain.tenant_id, None, OFFERS_MAX)

    async def _import_range(self, client: PeerClient, chain: PeerChain, first: int, last: int, offered: bytes) -> int:
        """Import a range; returns how many entries it added."""
        proof = await self._consistency(client, chain, last)
        name = f"{chain.tenant_id} {first}-{last} of {self.settings.url}"
        expect = partial(check_range, chain, first, last, proof)
        if offered:
            return await self.here.take_offered(name, offered, expect)
        return await self.here.take_fetched(name, client.bundle(chain.tenant_id, first, last), expect)
