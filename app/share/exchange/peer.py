"""One peer: its newest signed checkpoints, proved to extend those seen before, and the missing ranges, imported as
bundles. A bundle must be the requested range and lie under the proved checkpoint.

Two loops. One hears: it asks the peer for news with a request that the peer answers once there are some, so a new
checkpoint, and what the peer has imported, are known within a round trip. The other follows: it proves the checkpoints
that were heard of and then imports, a range at a time, in the order of the peer's chain. So the order is causal: an
entry comes after those that its node had seen. After a crash it goes on after the last stored range, and a range
imported twice adds nothing. Entries that this ledger has from elsewhere, its own among them, are not fetched: it tells
the peer of which logs it has entries, and up to which seq.

If a peer went back or shows another tree of the same size for one tenant, imports of all its tenants stop until an
operator decides. So a round checks every tenant of which there is news before it imports anything, and none begins
while the peer lists its tenants. The same applies to a peer that no longer lists a tenant seen before, or shows a log
of another origin. Any other fault of a tenant is reported, and stops no other tenant.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import NamedTuple

import asyncpg
import structlog

from app.runtime.outgoing import NoAnswerError
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.principals import covers
from app.runtime.settings.sections import PeerSettings
from app.share.exchange.peer_chain import PeerChain, PeerForkedError, PeerWentBackError, check_held, check_range, prove
from app.share.exchange.peer_client import NEWS_WAIT_S_MAX, TENANTS_MAX, Asker, PeerAddress, PeerClient, TenantNews
from app.share.exchange.turns import Turns
from app.store import exchange
from app.store.chaining import read_heads
from app.store.exchange import Seen
from ledger.errors import LedgerError, SignatureError
from ledger.facts.events import SYSTEM_TENANT
from signing.checkpoint import open_checkpoint, signer_of
from signing.keys import Keyring, PublicKey
from signing.manifest import LOG_ORIGIN, RangeManifest
from signing.note import is_signed_by
from signing.region_statement import RetiredRegion, RevokedKey

PAUSE_MAX_S = 60.0
"""Longest pause between attempts to ask a failing peer, and to import a failing tenant."""
SIGNS_OF_LIFE_S = 1.0
"""A sign of life ends a pause, but not more often than this."""
LISTED_EVERY_S = 60.0
"""How often a peer lists all its tenants again: it may hide one, or its token may have got another."""
BUSY_S = 0.25
"""How long news waits while a round imports. What the peer holds is still heard while a long import runs."""
MORE_NEWS_S = 0.05
"""How long a round that is due waits for news after the one before."""
NEWS_EVERY_S = 0.05
"""Shortest time from one request for news to the next."""
NEWS_TENANT_S = 0.0002
"""How much longer it is for each tenant in the answer: more than ten times what reading it takes the event loop."""
FAILED_TENANT_S = 0.0005
"""Pause of a round for each tenant whose checkpoint is not proved. It bounds what a peer can cost that tells of a
hundred thousand such tenants."""
NOTES_BYTES_MAX = 64 << 20
"""Bytes of the checkpoints of one peer that are kept at once: four witnesses sign those of all tenants."""
TURN_EVERY_S = 0.2
"""How often a node asks whether it may import, while another does."""
FAILING_S_MAX = 60.0
"""A round defers its remaining tenants once failing ones have taken longer: the peer may be away."""
FAULTS_TOLD_MAX = 5
"""Tenants that are named with their faults; the rest are counted."""
KEYS_READ_EVERY_S = 1.0
"""How often the trusted keys are read while a key of the peer is not among them."""
FAULT_CHARACTERS_MAX = 1000
"""Characters kept of a tenant's fault: a hundred thousand tenants of a peer may fail."""
_is_log_origin = re.compile(LOG_ORIGIN).fullmatch

log = structlog.get_logger()


Admit = Callable[[RangeManifest], Awaitable[None]]
Take = Callable[[str, AsyncGenerator[bytes, None], Admit], Awaitable[int]]
"""Imports a bundle that comes in pieces, under a name, if it holds and is admitted; returns the entries added."""


class Held(NamedTuple):
    """Up to which seq a peer has imported a chain of this ledger, and when it said so, by the monotonic clock."""

    seq: int
    at_s: float


@dataclass
class Peer:
    """The exchange with one peer, and its state."""

    settings: PeerSettings
    own: Asker
    """This ledger."""
    pool: asyncpg.Pool[asyncpg.Record]
    turns: Turns
    keys: Callable[[], Keyring]
    """Reads the keys that this ledger trusts; there may be none."""
    take: Take
    head_seq: Callable[[str], int]
    """A seq that the head of a tenant's chain here has reached; other nodes may have chained more."""
    on_imported: Callable[[str, str], None]
    """Called with a tenant of which more was imported, and the log origin of the peer's ledger."""
    range_entries: int
    interval_s: float
    imported_entries: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    """By tenant, how much of this ledger the peer has."""
    heard_s: float = 0.0
    """When it answered last."""
    untrusted: tuple[PublicKey, ...] = ()
    """Keys that it signs with and that this ledger does not trust yet."""
    untrusted_there: tuple[str, ...] = ()
    """Ids of the keys that this ledger signs with and that it does not trust yet."""
    revoked: Mapping[str, RevokedKey] = field(default_factory=dict)
    """Keys that this ledger trusts no longer, by id."""
    retired: RetiredRegion | None = None
    """Why it is neither heard nor followed, once its region is retired."""
    on_held: Callable[[], None] = lambda: None
    _asked_s: dict[str, float] = field(default_factory=dict, init=False)
    """By tenant, when it was last asked how much it holds."""
    _faults: dict[str, str] = field(default_factory=dict, init=False)
    """Why it is not heard or followed, by loop."""
    _chains: dict[str, PeerChain] = field(default_factory=dict, init=False)
    _notes_bytes: int = field(default=0, init=False)
    _overclaims: dict[str, str] = field(default_factory=dict, init=False)
    """By tenant, that it says it has more of this ledger than there is."""
    _cursor: str = field(default="", init=False)
    """What it told, in its words."""
    _log_origin: str = field(default="", init=False)
    """Log origin of its ledger; empty until one of its checkpoints is proved."""
    _listed: set[str] = field(default_factory=set, init=False)
    """The tenants of its last list, and those that it told of since."""
    _has_listed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while no list is under way."""
    _is_list_new: bool = field(default=False, init=False)
    """Whether its last list was not yet compared with the tenants that were seen."""
    _due: dict[str, None] = field(default_factory=dict, init=False)
    """Tenants to look at."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _alive: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _idle: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while no round is under way."""
    _counts: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while its region is not retired."""
    _signing: tuple[PublicKey, ...] = field(default=(), init=False)
    """The keys that it signs with."""
    _is_compared: bool = field(default=False, init=False)
    """Whether these were compared with the trusted ones since either changed."""
    _keys_read_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._address = PeerAddress(self.settings)
        self._counts.set()
        self._idle.set()

    @property
    def log_origin(self) -> str:
        """Log origin of its ledger; empty until one of its checkpoints is proved."""
        return self._log_origin

    @property
    def is_heard(self) -> bool:
        """Whether it answered when it was asked last."""
        return self.heard_s > 0 and "hear" not in self._faults

    @property
    def lag_entries(self) -> int:
        """Entries under its last seen checkpoints that are not imported yet."""
        return sum(chain.size - chain.imported_seq for chain in self._chains.values())

    @property
    def fault(self) -> str | None:
        """Why it, or some of its tenants, are not imported from; None if all are, or if its region is retired."""
        if self.retired is not None:
            return None
        # Tenants that went back come first: they stop the others.
        failing = [chain for chain in self._chains.values() if chain.fault is not None]
        failing.sort(key=lambda chain: not chain.went_back)
        told = [*self.waits_for, *dict.fromkeys(self._faults.values())]
        told += [f"tenant {tenant_id}: {claim}" for tenant_id, claim in [*self._overclaims.items()][:FAULTS_TOLD_MAX]]
        told += [f"tenant {chain.tenant_id}: {chain.fault}" for chain in failing[:FAULTS_TOLD_MAX]]
        if len(failing) > FAULTS_TOLD_MAX:
            told.append(f"{len(failing) - FAULTS_TOLD_MAX} more tenants")
        return "; ".join(told) or None

    @property
    def waits_for(self) -> list[str]:
        """The admissions of keys that the exchange waits for, with the command of each."""
        region = self.settings.region
        here = [
            f"this ledger does not trust key {key.key_id}, which the ledger of region {region} signs with: "
            + (
                f"it was revoked here, because: {self.revoked[key.key_id].reason}"
                if key.key_id in self.revoked
                else f"compare it with tally keys list there, then run tally peer admit {region} {key.key_id} here"
            )
            for key in self.untrusted
        ]
        return here + [self._admission_there(key_id) for key_id in self.untrusted_there]

    def _admission_there(self, key_id: str) -> str:
        return (
            f"the ledger of region {self.settings.region} does not trust key {key_id} of this one: run tally peer "
            f"admit {self.own.region} {key_id} there"
        )

    def why_not_held(self, tenant_id: str, seq: int) -> str:
        """Why it is not known to hold a tenant's chain of this ledger up to ``seq``."""
        told = f"{self.settings.url} "
        if self.untrusted_there:
            return told + "imports nothing yet: " + "; ".join(map(self._admission_there, self.untrusted_there))
        if not self.is_heard:
            return told + f"does not say what it holds: {self._faults.get('hear', 'it was not asked yet')}"
        held = self.held.get(tenant_id)
        return told + f"has imported {held.seq if held else 0} of {seq} entries of tenant {tenant_id}"

    def retire(self, retired: RetiredRegion | None) -> None:
        """Neither hear nor follow it, from now on; None ends that, and whatever answers is a new peer."""
        if retired == self.retired:
            return
        self.retired = retired
        self._faults, self._chains, self._due, self._listed = {}, {}, {}, set()
        self._overclaims, self._asked_s, self._notes_bytes = {}, {}, 0
        self.held, self.untrusted, self.untrusted_there, self.heard_s = {}, (), (), 0.0
        self._signing = ()
        self._cursor = self._log_origin = ""
        if retired is None:
            self._counts.set()
        else:
            self._counts.clear()
        self._wake.set()
        self._alive.set()
        self.on_held()

    async def run(self) -> None:
        """Hear and follow for ever."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._repeated("hear", self._hear))
            both.create_task(self._repeated("follow", self._follow))

    async def _repeated(self, name: str, loop: Callable[[PeerClient], Awaitable[None]]) -> None:
        """Run ``loop`` again each time that it fails, less and less often; a sign of life of the peer ends a pause."""
        pause_s = self.interval_s
        while True:
            await self._counts.wait()
            try:
                async with await self._address.open() as http:
                    await loop(PeerClient(self.settings.url, http))
            except (LedgerError, TimeoutError, *DATABASE_FAULTS) as error:
                if name in self._faults:
                    pause_s = min(2 * pause_s, max(PAUSE_MAX_S, self.interval_s))
                else:
                    log.warning("exchange_interrupted", peer=self.settings.url, error=str(error))
                    pause_s = self.interval_s
                self._faults[name] = f"{type(error).__name__}: {error}"
                self._address.read_again()
            self._alive.clear()
            await asyncio.sleep(min(pause_s, SIGNS_OF_LIFE_S))
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s - SIGNS_OF_LIFE_S):
                    await self._alive.wait()

    def _went_well(self, name: str) -> None:
        if self._faults.pop(name, None) is not None and not self._faults:
            log.info("exchange_resumed", peer=self.settings.url)

    def is_alive(self, log_origin: str) -> None:
        """A ledger of this origin asks for news. If it is this peer, it answers again: it is asked now."""
        if self._faults and self._log_origin in ("", log_origin):
            self._alive.set()

    # --- hearing ----------------------------------------------------------------------------------

    async def _hear(self, client: PeerClient) -> None:
        """Ask for the list of tenants, then for news, and for the list again from time to time."""
        wait_s = min(self.interval_s, NEWS_WAIT_S_MAX)
        while self.retired is None:
            listed_s = monotonic()
            await self._compare_keys(client)
            await self._list(client)
            self._went_well("hear")
            is_list = False
            while not is_list and monotonic() < listed_s + LISTED_EVERY_S and not self._must_list():
                await self._address.authorize(client.http)
                await self._read_keys()
                asked_s = monotonic()
                news = await client.news(self.own, self._cursor, wait_s)
                # Another node of the peer answers, or it was started again: its list begins.
                is_list, self._cursor = news.is_list, news.cursor
                self.untrusted_there = tuple(news.untrusted)
                await self._heard(news.items)
                _check_count(self._listed, self.settings.url)
                # It may answer without news, as it stops. It may also send the same news without end.
                next_s = asked_s + (NEWS_EVERY_S if news.items else wait_s) - monotonic()
                await asyncio.sleep(max(next_s, NEWS_TENANT_S * len(news.items)))
                # A newer checkpoint is of use once the ones before are imported.
                with suppress(TimeoutError):
                    async with asyncio.timeout(BUSY_S):
                        await self._idle.wait()
            await asyncio.sleep(listed_s + wait_s - monotonic())

    async def _compare_keys(self, client: PeerClient) -> None:
        """Learn which keys the peer signs with, and which of them are not trusted."""
        try:
            self._signing = tuple(await client.signing_keys())
        except NoAnswerError as error:
            # What it holds can be heard all the same.
            self._faults["keys"] = str(error)
            return
        self._faults.pop("keys", None)
        self.compare_again()
        await self._read_keys()

    def compare_again(self) -> None:
        """Look again which of its keys are trusted, before the next request for news."""
        self._is_compared = False

    async def _read_keys(self) -> None:
        """Look which of its keys are trusted by now. If that changes, its tenants are looked at again."""
        if self._is_compared and (not self.untrusted or monotonic() < self._keys_read_s + KEYS_READ_EVERY_S):
            return
        self._keys_read_s, self._is_compared = monotonic(), True
        trusted, before = await asyncio.to_thread(self.keys), self.untrusted
        self.untrusted = tuple(key for key in self._signing if trusted.get(key.key_id) is None)
        if self.untrusted != before:
            for chain in self._due_chains():
                chain.looks_at_s = 0.0
            self._wake.set()

    async def _list(self, client: PeerClient) -> None:
        """Hear of all tenants."""
        self._has_listed.clear()
        listed: set[str] = set()
        self._cursor, after, has_more = "", "", True
        while has_more:
            page = await client.listed(self.own, self._cursor, after)
            self.untrusted_there = tuple(page.untrusted)
            listed |= {each.tenant_id for each in page.items}
            _check_count(listed, self.settings.url)
            await self._heard(page.items)
            self._cursor, has_more = page.cursor, page.has_more
            after = page.items[-1].tenant_id if page.items else after
        self._listed = listed
        self.held = {each: held for each, held in self.held.items() if each in listed}
        self._overclaims = {each: claim for each, claim in self._overclaims.items() if each in listed}
        self._asked_s = {each: asked_s for each, asked_s in self._asked_s.items() if each in listed}
        self._is_list_new = True
        self._has_listed.set()
        self._wake.set()

    async def _heard(self, items: Iterable[TenantNews]) -> None:
        self.heard_s = monotonic()
        await self._note_held({each.tenant_id: each.held for each in items}, self.heard_s)
        for each in items:
            self._listed.add(each.tenant_id)
            if each.checkpoint and self._is_wanted(each.tenant_id):
                chain = self._chains.setdefault(each.tenant_id, PeerChain(each.tenant_id))
                note = each.checkpoint.encode()
                if chain.is_lacking or chain.looked != hash(note):
                    self._keep_note(chain, note)
                    # A tenant that fails is not looked at more often because there is news of it again and again.
                    chain.looks_at_s = 0.0 if chain.fault is None else chain.failed_at_s + self.interval_s
                    self._due[each.tenant_id] = None
        self.on_held()
        self._wake.set()

    async def _note_held(self, claims: Mapping[str, int], at_s: float) -> None:
        """Keep how much of this ledger the peer says that it has, by tenant. More than there is does not count."""
        head_seqs = {each: self.head_seq(each) for each in claims}
        if beyond := [each for each, seq in claims.items() if seq > head_seqs[each]]:
            async with self.pool.acquire() as connection:
                head_seqs |= {each: head.seq for each, head in (await read_heads(connection, beyond)).items()}
        for tenant_id, seq in claims.items():
            if seq > (head_seq := head_seqs[tenant_id]):
                self.held.pop(tenant_id, None)
                self._overclaims[tenant_id] = (
                    f"it says that it has {seq} entries of this ledger, which has {head_seq}: it is wrong, or this "
                    "ledger was restored from before"
                )
            else:
                self._overclaims.pop(tenant_id, None)
                self.held[tenant_id] = Held(seq, at_s)

    def _keep_note(self, chain: PeerChain, note: bytes) -> None:
        """Keep a checkpoint until it was looked at; beyond the bound all are forgotten, until it lists its tenants
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

    def _must_list(self) -> bool:
        return self.retired is not None or self._misses_a_tenant()

    def _misses_a_tenant(self) -> bool:
        return any(chain.went_back for chain in self._chains.values())

    def holds(self, tenant_id: str, seq: int, since_s: float) -> bool:
        """Whether it said since then that it has imported the tenant's chain of this ledger up to ``seq``."""
        held = self.held.get(tenant_id)
        return held is not None and held.at_s >= since_s and held.seq >= seq

    async def ask_held(self, tenant_id: str, seq: int) -> None:
        """Ask, until it says so, whether it has imported the tenant's chain up to ``seq``: at once if it said so
        before, else every ``interval_s``, beside its news. Writes that wait at the same time share a request."""
        since_s, known = monotonic(), self.held.get(tenant_id)
        if known is None or known.seq < seq:
            await asyncio.sleep(self.interval_s)
        while not self.holds(tenant_id, seq, since_s):
            asked_s = self._asked_s.get(tenant_id, 0.0)
            if asked_s >= max(since_s, monotonic() - self.interval_s):
                await asyncio.sleep(asked_s + self.interval_s - monotonic())
                continue
            self._asked_s[tenant_id] = asked_s = monotonic()
            with suppress(LedgerError, OSError, *DATABASE_FAULTS):
                async with await self._address.open() as http:
                    said = await PeerClient(self.settings.url, http).held(self.own.origin, tenant_id)
                    self.heard_s = monotonic()
                    if tenant_id not in self.held or self.held[tenant_id].at_s < asked_s:
                        await self._note_held({tenant_id: said}, asked_s)
                    self.on_held()
            await asyncio.sleep(self.interval_s)

    # --- following --------------------------------------------------------------------------------

    async def _follow(self, client: PeerClient) -> None:
        """Look at the tenants of which there is news, and import what they have."""
        while self.retired is None:
            await self._has_listed.wait()
            ready = [chain for chain in self._due_chains() if chain.looks_at_s <= monotonic()]
            if not ready and not self._is_list_new:
                next_s = min((chain.looks_at_s for chain in self._due_chains()), default=monotonic() + PAUSE_MAX_S)
                self._wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(next_s - monotonic()):
                        await self._wake.wait()
                continue
            await self._address.authorize(client.http)
            async with self.turns.turn(self.settings.url) as is_ours:
                if is_ours:
                    await self._take_round(client, ready)
            if not is_ours:
                # Another node imports. It may stop before it comes to these.
                await asyncio.sleep(TURN_EVERY_S)
            self._went_well("follow")
            if self._due:
                # The peer may tell a newer checkpoint now: one round then imports more.
                self._wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(MORE_NEWS_S):
                        await self._wake.wait()

    def _due_chains(self) -> list[PeerChain]:
        return [chain for each in self._due if (chain := self._chains.get(each)) is not None]

    async def _take_round(self, client: PeerClient, ready: Sequence[PeerChain]) -> None:
        """A round of these chains, which stay due if it fails."""
        for chain in ready:
            self._due.pop(chain.tenant_id, None)
        is_list_new, self._is_list_new = self._is_list_new, False
        self._idle.clear()
        try:
            await self._round(client, ready, is_list_new=is_list_new)
        except BaseException:
            self._due |= {chain.tenant_id: None for chain in ready}
            self._is_list_new |= is_list_new
            raise
        finally:
            self._idle.set()

    async def _round(self, client: PeerClient, chains: Sequence[PeerChain], *, is_list_new: bool) -> None:
        # 1. The newest checkpoint of each, proved.
        keyring, known = await asyncio.to_thread(self.keys), self._log_origin
        seen = await self._each(chains, lambda chain: self._look(client, keyring, chain))
        await asyncio.sleep(min(PAUSE_MAX_S, FAILED_TENANT_S * (len(chains) - len(seen))))
        # 2. The tenants that are no longer listed.
        if is_list_new or self._log_origin != known:
            await self._look_for_missing()
        if self._misses_a_tenant():
            for chain in seen:
                self._look_again(chain, self.interval_s)
            return
        # 3. The missing entries of each tenant.
        ready = []
        for chain in seen:
            if (left_s := chain.failed_at_s + chain.pause_s - monotonic()) > 0:
                self._look_again(chain, left_s)
            else:
                ready.append(chain)
        await self._each(ready, lambda chain: self._import(client, chain))

    async def _look_for_missing(self) -> None:
        """Compare the list with the tenants that were seen. A tenant that went back and is in neither is forgotten."""
        kept = await self._kept()
        missing = [each for each in kept if each not in self._listed]
        self._chains = {each: chain for each, chain in self._chains.items() if each in self._listed} | {
            each: self._chains.get(each) or PeerChain(each) for each in missing
        }
        self._due = {each: None for each in self._due if each in self._listed}
        for each in missing:
            # What it showed before is no news.
            self._chains[each].note = b""
            self._failed(
                self._chains[each],
                PeerWentBackError(
                    f"{self.settings.url} no longer lists the tenant, whose log {self._log_origin}/{each} was seen: "
                    "the peer was restored from before or hides it, or its token no longer has the right audit for it"
                ),
            )
        self._notes_bytes = sum(len(chain.note) for chain in self._chains.values())

    async def _kept(self) -> list[str]:
        """The tenants of its ledger that were seen. After an operator removed all, the peer may show another ledger."""
        async with self.pool.acquire() as connection:
            # Of more than TENANTS_MAX kept tenants the peer cannot list all.
            kept = await exchange.held_of(connection, self._log_origin, "", TENANTS_MAX + 1, self.settings.tenants)
        if not kept:
            self._log_origin = ""
        return [tenant_id for tenant_id, _ in kept]

    def _look_again(self, chain: PeerChain, after_s: float) -> None:
        chain.looks_at_s = monotonic() + after_s
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
            self._look_again(chain, max(self.interval_s, chain.pause_s))
        if not chain.is_forked and (went_back or not chain.went_back):
            # Only the text is kept: an error keeps the frames of its traceback alive.
            chain.fault, chain.went_back = f"{type(error).__name__}: {error}"[:FAULT_CHARACTERS_MAX], went_back
        chain.is_forked |= isinstance(error, PeerForkedError)

    async def _look(self, client: PeerClient, keyring: Keyring, chain: PeerChain) -> None:
        """Prove the newest checkpoint of a tenant that was heard of, and read how much of it is imported."""
        tenant_id, note = chain.tenant_id, chain.note
        checkpoint = open_checkpoint(note, keyring)
        origin = checkpoint.origin
        log_origin = origin.removesuffix(f"/{tenant_id}")
        if log_origin in (origin, self.own.origin) or not _is_log_origin(log_origin):
            raise SignatureError(f"the peer shows a checkpoint of {origin} for tenant {tenant_id}")
        async with self.pool.acquire() as connection:
            kept = await exchange.positions(connection, tenant_id)
        if (seen := kept.get(origin)) is None:
            self._recall(tenant_id, kept, signer_of(note, keyring))
        if self._log_origin not in ("", log_origin):
            raise PeerWentBackError(
                f"tenant {tenant_id} of {self.settings.url} is in the log {origin}, and the peer showed the log "
                f"{self._log_origin} before: it was restored as a fork or made anew"
            )
        await prove(client, tenant_id, seen, checkpoint)
        async with self.pool.acquire() as connection:
            await exchange.saw(connection, tenant_id, origin, note.decode(), checkpoint.size)
        self._log_origin = log_origin
        chain.origin, chain.size, chain.root = origin, checkpoint.size, checkpoint.root
        if chain.went_back and (seen is None or not chain.is_forked):
            chain.fault, chain.went_back, chain.is_forked = None, False, False
        before_seq, chain.imported_seq = chain.imported_seq, seen.imported_seq if seen else 0
        chain.looked = hash(note)
        if chain.imported_seq > before_seq:
            # Another node of this ledger imported them.
            self.on_imported(tenant_id, log_origin)

    def _recall(self, tenant_id: str, kept: Mapping[str, Seen], key: PublicKey) -> None:
        """Set the log origin that the peer showed before: that of the kept checkpoint which ``key`` signed."""
        for origin, seen in kept.items():
            if is_signed_by(seen.note, origin, key):
                self._log_origin = origin.removesuffix(f"/{tenant_id}")

    async def _import(self, client: PeerClient, chain: PeerChain) -> None:
        """Import the missing entries, range by range. After a failure the tenant pauses, longer each time."""
        chain.pause_s = min(max(2 * chain.pause_s, self.interval_s), PAUSE_MAX_S)
        # Of a region that is retired meanwhile nothing more is imported.
        while chain.imported_seq < chain.size and self.retired is None:
            from_seq, to_seq = chain.imported_seq + 1, min(chain.imported_seq + self.range_entries, chain.size)
            async with self.pool.acquire() as connection:
                kept = await exchange.positions(connection, chain.tenant_id)
                heads = await read_heads(connection, [chain.tenant_id])
            # What came from this ledger, and from others what was fetched there.
            have = {f"{self.own.origin}/{tenant_id}": head.seq for tenant_id, head in heads.items()}
            have |= {origin: seen.imported_seq for origin, seen in kept.items()}
            head_seq = heads[chain.tenant_id].seq if heads else 0
            for first, last in await client.lacking(chain.tenant_id, from_seq, to_seq, have):
                added = await self.take(
                    f"{chain.tenant_id} {first}-{last} of {self.settings.url}",
                    client.bundle(chain.tenant_id, first, last),
                    partial(
                        check_range,
                        chain,
                        first,
                        last,
                        [] if last == chain.size else await client.consistency(chain.tenant_id, last, chain.size),
                    ),
                )
                self.imported_entries, head_seq = self.imported_entries + added, head_seq + added
            if to_seq > head_seq:
                await check_held(self.pool, self.settings.url, chain, to_seq)
            async with self.pool.acquire() as connection:
                await exchange.imported(connection, chain.tenant_id, chain.origin, to_seq)
            chain.imported_seq = to_seq
            self.on_imported(chain.tenant_id, self._log_origin)
        if chain.fault is not None:
            log.info("exchange_tenant_resumed", peer=self.settings.url, tenant_id=chain.tenant_id)
        chain.fault, chain.pause_s = None, 0.0


def _check_count(tenant_ids: Sized, url: str) -> None:
    if len(tenant_ids) > TENANTS_MAX:
        raise NoAnswerError(f"{url} tells of more than {TENANTS_MAX} tenants")
