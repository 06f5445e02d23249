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
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import asyncpg
import httpx
import structlog

from app.runtime.outgoing import NoAnswerError, client_of
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.principals import covers
from app.runtime.settings.sections import PeerSettings
from app.share.exchange.peer_client import NEWS_WAIT_S_MAX, TENANTS_MAX, PeerClient, TenantNews
from app.share.exchange.turns import Turns
from app.store import exchange
from app.store.chaining import read_heads
from app.store.exchange import Seen
from ledger.errors import LedgerError, ProofError, SignatureError, reported_as
from ledger.facts.events import SYSTEM_TENANT
from ledger.merkle import verify_consistency
from ledger.text import token_in
from signing import files
from signing.checkpoint import Checkpoint, open_checkpoint, read, signer_of
from signing.keys import Keyring, PublicKey
from signing.manifest import LOG_ORIGIN, RangeManifest
from signing.note import is_signed_by

TIMEOUT_S = 30.0
PAUSE_MAX_S = 60.0
"""Longest pause between attempts to ask a failing peer, and to import a failing tenant."""
SIGNS_OF_LIFE_S = 1.0
"""A sign of life ends a pause, but not more often than this."""
LISTED_EVERY_S = 60.0
"""How often a peer lists all its tenants again: it may hide one, or its token may have got another."""
NEWS_EVERY_S = 0.01
"""Shortest time from one request for news to the next."""
TURN_EVERY_S = 0.2
"""How often a node asks whether it may import, while another does."""
FAILING_S_MAX = 60.0
"""A round defers its remaining tenants once failing ones have taken longer: the peer may be away."""
FAULTS_TOLD_MAX = 5
"""Tenants that are named with their faults; the rest are counted."""
FAULT_CHARACTERS_MAX = 1000
"""Characters kept of a tenant's fault: a hundred thousand tenants of a peer may fail."""
_is_log_origin = re.compile(LOG_ORIGIN).fullmatch

log = structlog.get_logger()


Admit = Callable[[RangeManifest], Awaitable[None]]
Take = Callable[[str, AsyncGenerator[bytes, None], Admit], Awaitable[int]]
"""Imports a bundle that comes in pieces, under a name, if it holds and is admitted; returns the entries added."""


class PeerWentBackError(LedgerError):
    """A peer's log of a tenant no longer equals or extends the log seen before."""


@dataclass(slots=True)
class _Chain:
    """One tenant's chain at the peer, up to its newest proved checkpoint."""

    tenant_id: str
    note: str = ""
    """A checkpoint that the peer told and that is to be looked at."""
    looked: int = 0
    """Hash of the note that was looked at last."""
    origin: str = ""
    size: int = 0
    root: bytes = b""
    imported_seq: int = 0
    fault: str | None = None
    went_back: bool = False
    """No other fault replaces this one until a checkpoint is proved to extend the one seen before."""
    failed_at_s: float = 0.0
    pause_s: float = 0.0
    """Time after ``failed_at_s`` in which nothing is fetched, because a failing range is costly to fetch."""
    looks_at_s: float = 0.0
    """When its checkpoint is next looked at after a failure."""

    @property
    def is_lacking(self) -> bool:
        """Whether something of it is to be imported, as far as is known."""
        return self.fault is not None or self.imported_seq < self.size


class Held(NamedTuple):
    """Up to which seq a peer has imported a chain of this ledger, and when it said so, by the monotonic clock."""

    seq: int
    at_s: float


@dataclass
class Peer:
    """The exchange with one peer, and its state."""

    settings: PeerSettings
    own_origin: str
    pool: asyncpg.Pool[asyncpg.Record]
    turns: Turns
    keys: Callable[[], Keyring]
    take: Take
    on_imported: Callable[[str], None]
    """Called with a tenant of which more was imported."""
    range_entries: int
    interval_s: float
    imported_entries: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    """By tenant, how much of this ledger the peer has."""
    heard_s: float = 0.0
    """When it answered last."""
    on_held: Callable[[], None] = lambda: None
    _faults: dict[str, str] = field(default_factory=dict, init=False)
    """Why it is not heard or followed, by loop."""
    _chains: dict[str, _Chain] = field(default_factory=dict, init=False)
    _cursor: str = field(default="", init=False)
    """What it told, in its words."""
    _log_origin: str = field(default="", init=False)
    """Log origin of its ledger; empty until one of its checkpoints is proved."""
    _context: ssl.SSLContext | None = field(default=None, init=False)
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

    @property
    def lag_entries(self) -> int:
        """Entries under its last seen checkpoints that are not imported yet."""
        return sum(chain.size - chain.imported_seq for chain in self._chains.values())

    @property
    def fault(self) -> str | None:
        """Why it, or some of its tenants, are not imported from; None if all are."""
        # Tenants that went back come first: they stop the others.
        failing = [chain for chain in self._chains.values() if chain.fault is not None]
        failing.sort(key=lambda chain: not chain.went_back)
        told = [*dict.fromkeys(self._faults.values())]
        told += [f"tenant {chain.tenant_id}: {chain.fault}" for chain in failing[:FAULTS_TOLD_MAX]]
        if len(failing) > FAULTS_TOLD_MAX:
            told.append(f"{len(failing) - FAULTS_TOLD_MAX} more tenants")
        return "; ".join(told) or None

    async def run(self) -> None:
        """Hear and follow for ever."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._repeated("hear", self._hear))
            both.create_task(self._repeated("follow", self._follow))

    async def _repeated(self, name: str, loop: Callable[[PeerClient], Awaitable[None]]) -> None:
        """Run ``loop`` again each time that it fails, less and less often; a sign of life of the peer ends a pause."""
        pause_s = self.interval_s
        while True:
            try:
                async with await self._http() as http:
                    await loop(PeerClient(self.settings.url, http))
            except (LedgerError, TimeoutError, *DATABASE_FAULTS) as error:
                if name in self._faults:
                    pause_s = min(2 * pause_s, max(PAUSE_MAX_S, self.interval_s))
                else:
                    log.warning("exchange_interrupted", peer=self.settings.url, error=str(error))
                    pause_s = self.interval_s
                self._faults[name] = f"{type(error).__name__}: {error}"
                # The file of certificate authorities may have been replaced.
                self._context = None
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

    async def _http(self) -> httpx.AsyncClient:
        if self._context is None:
            # It reads the certificate authorities, which takes longer than a turn of the event loop may.
            self._context = await asyncio.to_thread(_context_of, self.settings.ca)
        http = client_of(self._context, timeout_s=TIMEOUT_S, base_url=self.settings.url)
        await self._authorize(http)
        return http

    async def _authorize(self, http: httpx.AsyncClient) -> None:
        """Send the token, read from its file each time: it may have been replaced."""
        if (file := self.settings.token_file) is None:
            return
        if token := await asyncio.to_thread(_token_in, file):
            http.headers["Authorization"] = f"Bearer {token}"
        else:
            http.headers.pop("Authorization", None)

    # --- hearing ----------------------------------------------------------------------------------

    async def _hear(self, client: PeerClient) -> None:
        """Ask for the list of tenants, then for news, and for the list again from time to time."""
        wait_s = min(self.interval_s, NEWS_WAIT_S_MAX)
        while True:
            listed_s = monotonic()
            await self._list(client)
            self._went_well("hear")
            is_list = False
            while not is_list and monotonic() < listed_s + LISTED_EVERY_S and not self._misses_a_tenant():
                await self._authorize(client.http)
                asked_s = monotonic()
                news = await client.news(self.own_origin, self._cursor, wait_s)
                # Another node of the peer answers, or it was started again: its list begins.
                is_list, self._cursor = news.is_list, news.cursor
                self._heard(news.items)
                _check_count(self._listed, self.settings.url)
                # It may answer without news, as it stops.
                await asyncio.sleep(asked_s + (NEWS_EVERY_S if news.items else wait_s) - monotonic())
            await asyncio.sleep(listed_s + wait_s - monotonic())

    async def _list(self, client: PeerClient) -> None:
        """Hear of all tenants."""
        self._has_listed.clear()
        listed: set[str] = set()
        self._cursor, after, has_more = "", "", True
        while has_more:
            page = await client.listed(self.own_origin, self._cursor, after)
            listed |= {each.tenant_id for each in page.items}
            _check_count(listed, self.settings.url)
            self._heard(page.items)
            self._cursor, has_more = page.cursor, page.has_more
            after = page.items[-1].tenant_id if page.items else after
        self._listed = listed
        self.held = {each: held for each, held in self.held.items() if each in listed}
        self._is_list_new = True
        self._has_listed.set()
        self._wake.set()

    def _heard(self, items: Iterable[TenantNews]) -> None:
        self.heard_s = monotonic()
        for each in items:
            self._listed.add(each.tenant_id)
            self.held[each.tenant_id] = Held(each.held, self.heard_s)
            if each.checkpoint and self._is_wanted(each.tenant_id):
                chain = self._chains.setdefault(each.tenant_id, _Chain(each.tenant_id))
                if chain.is_lacking or chain.looked != hash(each.checkpoint):
                    chain.note, chain.looks_at_s = each.checkpoint, 0.0
                    self._due[each.tenant_id] = None
        self.on_held()
        self._wake.set()

    def _is_wanted(self, tenant_id: str) -> bool:
        return tenant_id != SYSTEM_TENANT and any(covers(pattern, tenant_id) for pattern in self.settings.tenants)

    def _misses_a_tenant(self) -> bool:
        return any(chain.went_back for chain in self._chains.values())

    async def ask_held(self, tenant_id: str) -> None:
        """Ask, until it answers, how much of a tenant's chain of this ledger it has."""
        while True:
            with suppress(LedgerError, OSError):
                async with await self._http() as http:
                    asked_s = monotonic()
                    seq = await PeerClient(self.settings.url, http).held(self.own_origin, tenant_id)
                    self.held[tenant_id] = Held(seq, asked_s)
                    self.heard_s = monotonic()
                    self.on_held()
                    return
            await asyncio.sleep(self.interval_s)

    # --- following --------------------------------------------------------------------------------

    async def _follow(self, client: PeerClient) -> None:
        """Look at the tenants of which there is news, and import what they have."""
        while True:
            await self._has_listed.wait()
            ready = [chain for chain in self._due_chains() if chain.looks_at_s <= monotonic()]
            if not ready and not self._is_list_new:
                next_s = min((chain.looks_at_s for chain in self._due_chains()), default=monotonic() + PAUSE_MAX_S)
                self._wake.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(next_s - monotonic()):
                        await self._wake.wait()
                continue
            await self._authorize(client.http)
            async with self.turns.turn(self.settings.url) as is_ours:
                if is_ours:
                    await self._take_round(client, ready)
            if not is_ours:
                # Another node imports. It may stop before it comes to these.
                await asyncio.sleep(TURN_EVERY_S)
            self._went_well("follow")

    def _due_chains(self) -> list[_Chain]:
        return [chain for each in self._due if (chain := self._chains.get(each)) is not None]

    async def _take_round(self, client: PeerClient, ready: Sequence[_Chain]) -> None:
        """A round of these chains, which stay due if it fails."""
        for chain in ready:
            self._due.pop(chain.tenant_id, None)
        is_list_new, self._is_list_new = self._is_list_new, False
        try:
            await self._round(client, ready, is_list_new=is_list_new)
        except BaseException:
            self._due |= {chain.tenant_id: None for chain in ready}
            self._is_list_new |= is_list_new
            raise

    async def _round(self, client: PeerClient, chains: Sequence[_Chain], *, is_list_new: bool) -> None:
        # 1. The newest checkpoint of each, proved.
        keyring, known = await asyncio.to_thread(self.keys), self._log_origin
        seen = await self._each(chains, lambda chain: self._look(client, keyring, chain))
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
            each: self._chains.get(each) or _Chain(each) for each in missing
        }
        self._due = {each: None for each in self._due if each in self._listed}
        for each in missing:
            # What it showed before is no news.
            self._chains[each].note = ""
            self._failed(
                self._chains[each],
                PeerWentBackError(
                    f"{self.settings.url} no longer lists the tenant, whose log {self._log_origin}/{each} was seen: "
                    "the peer was restored from before or hides it, or its token no longer has the right audit for it"
                ),
            )

    async def _kept(self) -> list[str]:
        """The tenants of its ledger that were seen. After an operator removed all, the peer may show another ledger."""
        async with self.pool.acquire() as connection:
            # Of more than TENANTS_MAX kept tenants the peer cannot list all.
            kept = await exchange.held_of(connection, self._log_origin, "", TENANTS_MAX + 1, self.settings.tenants)
        if not kept:
            self._log_origin = ""
        return [tenant_id for tenant_id, _ in kept]

    def _look_again(self, chain: _Chain, after_s: float) -> None:
        chain.looks_at_s = monotonic() + after_s
        self._due[chain.tenant_id] = None

    async def _each(self, chains: Iterable[_Chain], work: Callable[[_Chain], Awaitable[None]]) -> list[_Chain]:
        """Do ``work`` for each, failures notwithstanding; returns the chains that did not fail."""
        done: list[_Chain] = []
        failing_s = 0.0
        # Chains that failed before come last, so that they take no time from the others. Among them the one that failed
        # longest ago comes first, so that a slow one cannot starve the rest.
        for chain in sorted(chains, key=lambda chain: (chain.fault is not None, chain.failed_at_s)):
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

    def _failed(self, chain: _Chain, error: LedgerError) -> None:
        went_back = isinstance(error, PeerWentBackError)
        if chain.fault is None or (went_back and not chain.went_back):
            log.warning(
                "exchange_tenant_interrupted", peer=self.settings.url, tenant_id=chain.tenant_id, error=str(error)
            )
        chain.failed_at_s = monotonic()
        if chain.note:
            self._look_again(chain, max(self.interval_s, chain.pause_s))
        if went_back or not chain.went_back:
            # Only the text is kept: an error keeps the frames of its traceback alive.
            chain.fault, chain.went_back = f"{type(error).__name__}: {error}"[:FAULT_CHARACTERS_MAX], went_back

    async def _look(self, client: PeerClient, keyring: Keyring, chain: _Chain) -> None:
        """Prove the newest checkpoint of a tenant that was heard of, and read how much of it is imported."""
        tenant_id, note = chain.tenant_id, chain.note.encode()
        checkpoint = open_checkpoint(note, keyring)
        origin = checkpoint.origin
        log_origin = origin.removesuffix(f"/{tenant_id}")
        if log_origin in (origin, self.own_origin) or not _is_log_origin(log_origin):
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
        await self._prove(client, tenant_id, seen, checkpoint)
        async with self.pool.acquire() as connection:
            await exchange.saw(connection, tenant_id, origin, chain.note, checkpoint.size)
        self._log_origin = log_origin
        chain.origin, chain.size, chain.root = origin, checkpoint.size, checkpoint.root
        if chain.went_back:
            chain.fault, chain.went_back = None, False
        before_seq, chain.imported_seq = chain.imported_seq, seen.imported_seq if seen else 0
        chain.looked = hash(chain.note)
        if chain.imported_seq > before_seq:
            # Another node of this ledger imported them.
            self.on_imported(tenant_id)

    def _recall(self, tenant_id: str, kept: Mapping[str, Seen], key: PublicKey) -> None:
        """Set the log origin that the peer showed before: that of the kept checkpoint which ``key`` signed."""
        for origin, seen in kept.items():
            if is_signed_by(seen.note, origin, key):
                self._log_origin = origin.removesuffix(f"/{tenant_id}")

    async def _prove(self, client: PeerClient, tenant_id: str, seen: Seen | None, checkpoint: Checkpoint) -> None:
        """Reject a tree that does not extend the one seen before."""
        if seen is None:
            return
        before = read(seen.note)
        if checkpoint.size < before.size or (checkpoint.size == before.size and checkpoint.root != before.root):
            raise PeerWentBackError(
                f"tenant {tenant_id} of {self.settings.url} had {before.size} entries under another root, and now has "
                f"{checkpoint.size}: it was restored from before or changed. Compare with tally pipeline diff"
            )
        if checkpoint.size == before.size or not before.size:
            return
        hashes = await client.consistency(tenant_id, before.size, checkpoint.size)
        with reported_as(
            PeerWentBackError,
            f"tenant {tenant_id} of {self.settings.url}: nothing proves that its tree of {checkpoint.size} entries "
            f"goes on from that of {before.size} seen before",
            ProofError,
        ):
            verify_consistency(before.size, checkpoint.size, before.root, checkpoint.root, hashes)

    async def _import(self, client: PeerClient, chain: _Chain) -> None:
        """Import the missing entries, range by range. After a failure the tenant pauses, longer each time."""
        chain.pause_s = min(max(2 * chain.pause_s, self.interval_s), PAUSE_MAX_S)
        while chain.imported_seq < chain.size:
            from_seq, to_seq = chain.imported_seq + 1, min(chain.imported_seq + self.range_entries, chain.size)
            async with self.pool.acquire() as connection:
                kept = await exchange.positions(connection, chain.tenant_id)
                heads = await read_heads(connection, [chain.tenant_id])
            # What came from this ledger, and from others what was fetched there.
            have = {f"{self.own_origin}/{tenant_id}": head.seq for tenant_id, head in heads.items()}
            have |= {origin: seen.imported_seq for origin, seen in kept.items()}
            for first, last in await client.lacking(chain.tenant_id, from_seq, to_seq, have):
                self.imported_entries += await self.take(
                    f"{chain.tenant_id} {first}-{last} of {self.settings.url}",
                    client.bundle(chain.tenant_id, first, last),
                    partial(
                        _admit,
                        chain,
                        first,
                        last,
                        [] if last == chain.size else await client.consistency(chain.tenant_id, last, chain.size),
                    ),
                )
            async with self.pool.acquire() as connection:
                await exchange.imported(connection, chain.tenant_id, chain.origin, to_seq)
            chain.imported_seq = to_seq
            self.on_imported(chain.tenant_id)
        if chain.fault is not None:
            log.info("exchange_tenant_resumed", peer=self.settings.url, tenant_id=chain.tenant_id)
        chain.fault, chain.pause_s = None, 0.0


def _check_count(tenant_ids: Sized, url: str) -> None:
    if len(tenant_ids) > TENANTS_MAX:
        raise NoAnswerError(f"{url} tells of more than {TENANTS_MAX} tenants")


async def _admit(chain: _Chain, from_seq: int, to_seq: int, proof: Sequence[bytes], bundle: RangeManifest) -> None:
    """Reject a bundle that is not of this range, or not of the tree of the newest checkpoint.

    Raises:
        ProofError: it is.
    """
    if (bundle.origin, bundle.from_seq, bundle.to_seq) != (chain.origin, from_seq, to_seq):
        raise ProofError(
            f"entries {from_seq} to {to_seq} of {chain.origin} were asked for, and the bundle is of {bundle.from_seq} "
            f"to {bundle.to_seq} of {bundle.origin}"
        )
    with reported_as(
        ProofError,
        f"nothing proves that the entries {from_seq} to {to_seq} in the bundle are those of the checkpoint of "
        f"{chain.size}",
        ProofError,
    ):
        verify_consistency(to_seq, chain.size, bytes.fromhex(bundle.tree_root), chain.root, proof)


def _context_of(ca: Path | None) -> ssl.SSLContext:
    """The TLS context of connections to the peer.

    Raises:
        OSError: the file of certificate authorities cannot be read, or is no regular file.
    """
    if ca is not None:
        files.open_regular(ca).close()
    return ssl.create_default_context(cafile=ca)


def _token_in(file: Path) -> str:
    """The token to send to the peer; an empty one is not sent.

    Raises:
        ConfigurationError: the file holds no valid token.
        OSError: it cannot be read, or is no regular file.
    """
    return token_in(files.read_regular(file), str(file))
