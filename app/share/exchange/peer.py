"""One peer: its newest signed checkpoints, proved to go on from those seen before, and the ranges that are lacking,
imported as bundles. What a bundle brings is what was asked for, and lies under the checkpoint that was proved.

A round looks at each tenant in turn, and then imports; a range at a time, in the order of the peer's chain. So what
comes is causal: an entry comes after those that its node had seen. After a crash the next round goes on behind the last
range that was stored, and a range imported twice adds nothing.

If a peer went back or shows another tree of the same size for one tenant, imports of all its tenants stop until an
operator decides. So a round checks every tenant before it imports anything. The same holds for a peer that no longer
lists a tenant seen before, or shows a log of another origin. Any other fault of a tenant is reported, and stops no
other tenant.

*One node of the ledger asks a peer at a time*: a lock in PostgreSQL for each peer. ``Turns`` holds them all on one
connection of the node, as a round waits for the peer most of its time. A lock ends with its session. So where a lock
may be left behind, the connection is closed: the node stops, or a statement fails. Other turns of this node end with
it, and another node may ask the same peer at the same time; imports of the same entries add nothing.
"""

from __future__ import annotations

import asyncio
import math
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

import asyncpg
import httpx
import structlog
from asyncpg.pool import PoolConnectionProxy

from app.runtime.outgoing import client_of
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.principals import covers
from app.runtime.settings.sections import PeerSettings
from app.share.exchange.peer_client import TENANTS_MAX, PeerClient
from app.store import exchange
from app.store.exchange import Seen
from ledger.errors import LedgerError, ProofError, SignatureError
from ledger.facts.events import SYSTEM_TENANT
from ledger.merkle import verify_consistency
from ledger.text import token_in
from signing import files
from signing.checkpoint import Checkpoint, open_checkpoint, read, signer_of
from signing.keys import Keyring, PublicKey
from signing.manifest import LOG_ORIGIN, RangeManifest
from signing.note import is_signed_by


class Turns:
    """The turns of one node. Belongs to one event loop."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool
        self._statement = asyncio.Lock()
        self._connection: PoolConnectionProxy[asyncpg.Record] | None = None
        self._held = 0
        """Turns that are under way, on the way to one included."""

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[bool]:
        """Whether this node is the one of its ledger that asks ``peer`` now; for as long as it is not left.

        Raises:
            DATABASE_FAULTS: PostgreSQL cannot be asked.
        """
        self._held += 1
        try:
            async with self._session() as connection:
                is_ours = await exchange.take_turn(connection, peer)
            try:
                yield is_ours
            except asyncio.CancelledError:
                self._close()
                raise
            finally:
                if is_ours and self._connection is connection:
                    async with self._session():
                        await exchange.end_turn(connection, peer)
        finally:
            self._held -= 1
            if not self._held and self._connection is not None:
                connection, self._connection = self._connection, None
                await self._pool.release(connection)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[PoolConnectionProxy[asyncpg.Record]]:
        """The connection, for one statement."""
        async with self._statement:
            if self._connection is None:
                self._connection = await self._pool.acquire()
            try:
                yield self._connection
            except BaseException:
                self._close()
                raise

    def _close(self) -> None:
        """Have the session end, and with it what it locks."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


TIMEOUT_S = 30.0
PAUSE_MAX_S = 60.0
"""Longest between attempts to ask a peer that fails, and to import a tenant that fails."""
FAILING_S_MAX = 60.0
"""A round leaves the rest of the tenants to the next one once those that failed took longer: the peer may be away."""
FAULTS_TOLD_MAX = 5
"""Tenants that are named with their faults; others are counted."""
FAULT_CHARACTERS_MAX = 1000
"""What is kept of the fault of a tenant: a peer may have a hundred thousand that fail."""
_is_log_origin = re.compile(LOG_ORIGIN).fullmatch

log = structlog.get_logger()


Admit = Callable[[RangeManifest], Awaitable[None]]
Take = Callable[[str, AsyncGenerator[bytes, None], Admit], Awaitable[None]]
"""Imports a bundle that comes in pieces, under a name, if it holds and is admitted."""


class PeerWentBackError(LedgerError):
    """A peer no longer shows the log of a tenant as it was seen before, or grown from that."""


@dataclass(slots=True)
class _Chain:
    """One tenant's chain at the peer, as far as its newest checkpoint that was proved covers it."""

    tenant_id: str
    origin: str = ""
    size: int = 0
    root: bytes = b""
    imported_seq: int = 0
    fault: str | None = None
    went_back: bool = False
    """No other fault takes the place of this one, before a checkpoint is proved to go on from the one seen before."""
    failed_at_s: float = 0.0
    pause_s: float = 0.0
    paused_until_s: float = 0.0
    """Nothing is fetched before, by the monotonic clock: a range that fails is costly to fetch."""


@dataclass
class Peer:
    """What is asked of one peer, and what came of it."""

    settings: PeerSettings
    own_origin: str
    pool: asyncpg.Pool[asyncpg.Record]
    turns: Turns
    keys: Callable[[], Keyring]
    take: Take
    range_entries: int
    interval_s: float
    imported_entries: int = 0
    held: dict[str, int] = field(default_factory=dict)
    """By tenant, up to which seq of this ledger the peer has imported, as it said last."""
    held_asked_s: float = -math.inf
    """When that was asked, by the monotonic clock."""
    on_held: Callable[[], None] = lambda: None
    _fault: str | None = field(default=None, init=False)
    """Why nothing could be asked of it."""
    _chains: dict[str, _Chain] = field(default_factory=dict, init=False)
    _log_origin: str = field(default="", init=False)
    """Of its ledger; empty until a checkpoint of it was proved."""
    _context: ssl.SSLContext | None = field(default=None, init=False)

    @property
    def lag_entries(self) -> int:
        """How many entries it has chained that are not imported, as this node last saw its checkpoints."""
        return sum(chain.size - chain.imported_seq for chain in self._chains.values())

    @property
    def fault(self) -> str | None:
        """Why it is not imported from, or which tenants of it are not, and why; None when all are."""
        # That it went back comes first: it stops the others.
        failing = [chain for chain in self._chains.values() if chain.fault is not None]
        failing.sort(key=lambda chain: not chain.went_back)
        told = [f"tenant {chain.tenant_id}: {chain.fault}" for chain in failing[:FAULTS_TOLD_MAX]]
        if len(failing) > FAULTS_TOLD_MAX:
            told.append(f"{len(failing) - FAULTS_TOLD_MAX} more tenants")
        return "; ".join(told if self._fault is None else [self._fault, *told]) or None

    async def run(self) -> None:
        """Ask for ever; ever less often while the peer fails."""
        pause_s = self.interval_s
        while True:
            try:
                async with await self._http() as http:
                    await self._turn(PeerClient(self.settings.url, http))
                if self._fault is not None:
                    log.info("exchange_resumed", peer=self.settings.url)
                self._fault, pause_s = None, self.interval_s
            except (LedgerError, TimeoutError, *DATABASE_FAULTS) as error:
                if self._fault is None:
                    log.warning("exchange_interrupted", peer=self.settings.url, error=str(error))
                self._fault = f"{type(error).__name__}: {error}"
                # The file of certificate authorities may have been replaced.
                self._context = None
                pause_s = min(2 * pause_s, max(PAUSE_MAX_S, self.interval_s))
            await asyncio.sleep(pause_s)

    async def _http(self) -> httpx.AsyncClient:
        ca, token_file = self.settings.ca, self.settings.token_file
        if self._context is None:
            # It reads the certificate authorities, which takes longer than a turn of the event loop may.
            self._context = await asyncio.to_thread(_context_of, ca)
        token = None if token_file is None else await asyncio.to_thread(_token_in, token_file)
        return client_of(
            self._context,
            timeout_s=TIMEOUT_S,
            base_url=self.settings.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )

    async def _turn(self, client: PeerClient) -> None:
        async with self.turns.turn(self.settings.url) as is_ours:
            if is_ours:
                await self._round(client)
        await self._learn_held(client)

    async def _learn_held(self, client: PeerClient) -> None:
        asked_s = monotonic()
        self.held = await client.held(self.own_origin)
        self.held_asked_s = asked_s
        self.on_held()

    async def _round(self, client: PeerClient) -> None:
        # 1. Which tenants there are. Those that went back stay, whatever is listed.
        keyring = await asyncio.to_thread(self.keys)
        before = self._chains
        listed = {each: before.get(each) or _Chain(each) for each in await client.tenants() if self._is_wanted(each)}
        self._chains = {each: chain for each, chain in before.items() if chain.went_back} | listed
        # 2. What there is of each, proved.
        seen = await self._each(listed.values(), lambda chain: self._look(client, keyring, chain))
        # 3. Which are no longer listed.
        missing = {each: before.get(each) or _Chain(each) for each in await self._kept() if each not in listed}
        for chain in missing.values():
            self._failed(
                chain,
                PeerWentBackError(
                    f"{self.settings.url} no longer lists the tenant, whose log {self._log_origin}/{chain.tenant_id} "
                    "was seen: the peer was restored from before or hides it, or its token no longer has the right "
                    "audit for it"
                ),
            )
        self._chains = listed | missing
        if any(chain.went_back for chain in self._chains.values()):
            return
        # 4. What is lacking of it.
        await self._each(
            [chain for chain in seen if monotonic() >= chain.paused_until_s], lambda chain: self._import(client, chain)
        )

    async def _kept(self) -> list[str]:
        """The tenants that were seen of its ledger. Once an operator has removed all, the peer may show another one."""
        async with self.pool.acquire() as connection:
            # Of more than can be listed one at least is not.
            kept = await exchange.held_of(connection, self._log_origin, "", TENANTS_MAX + 1, self.settings.tenants)
        if not kept:
            self._log_origin = ""
        return [tenant_id for tenant_id, _ in kept]

    def _is_wanted(self, tenant_id: str) -> bool:
        return tenant_id != SYSTEM_TENANT and any(covers(pattern, tenant_id) for pattern in self.settings.tenants)

    async def _each(self, chains: Iterable[_Chain], work: Callable[[_Chain], Awaitable[None]]) -> list[_Chain]:
        """Do ``work`` for each, also behind those that fail; those that did not fail."""
        done: list[_Chain] = []
        failing_s = 0.0
        # Those that failed before come last: the time that they take is taken from no other. Of them whoever failed
        # longest ago is next, or one that takes all of it would keep the others from ever being tried again.
        for chain in sorted(chains, key=lambda chain: (chain.fault is not None, chain.failed_at_s)):
            began_s = monotonic()
            try:
                await work(chain)
                done.append(chain)
            except LedgerError as error:
                self._failed(chain, error)
                failing_s += chain.failed_at_s - began_s
                if failing_s > FAILING_S_MAX:
                    break
        return done

    def _failed(self, chain: _Chain, error: LedgerError) -> None:
        went_back = isinstance(error, PeerWentBackError)
        if chain.fault is None or (went_back and not chain.went_back):
            log.warning(
                "exchange_tenant_interrupted", peer=self.settings.url, tenant_id=chain.tenant_id, error=str(error)
            )
        chain.failed_at_s = monotonic()
        if went_back or not chain.went_back:
            # Only the words: an error keeps alive what its traceback names.
            chain.fault, chain.went_back = f"{type(error).__name__}: {error}"[:FAULT_CHARACTERS_MAX], went_back

    async def _look(self, client: PeerClient, keyring: Keyring, chain: _Chain) -> None:
        """Learn how much the peer's newest checkpoint covers of a tenant, and how much of that is imported."""
        tenant_id = chain.tenant_id
        note = await client.checkpoint(tenant_id)
        checkpoint = open_checkpoint(note, keyring)
        origin = checkpoint.origin
        log_origin = origin.removesuffix(f"/{tenant_id}")
        if log_origin in (origin, self.own_origin) or not _is_log_origin(log_origin):
            raise SignatureError(f"the peer shows a checkpoint of {origin} for tenant {tenant_id}")
        async with self.pool.acquire() as connection:
            kept = await exchange.positions(connection, tenant_id)
        seen = kept.get(origin)
        if seen is None:
            self._recall(tenant_id, kept, signer_of(note, keyring))
        if self._log_origin not in ("", log_origin):
            raise PeerWentBackError(
                f"tenant {tenant_id} of {self.settings.url} is in the log {origin}, and the peer showed the log "
                f"{self._log_origin} before: it was restored as a fork or made anew"
            )
        await self._prove(client, tenant_id, seen, checkpoint)
        async with self.pool.acquire() as connection:
            await exchange.saw(connection, tenant_id, origin, note.decode(), checkpoint.size)
        self._log_origin = log_origin
        chain.origin, chain.size, chain.root = origin, checkpoint.size, checkpoint.root
        if chain.went_back:
            chain.fault, chain.went_back = None, False
        chain.imported_seq = seen.imported_seq if seen else 0

    def _recall(self, tenant_id: str, kept: Mapping[str, Seen], key: PublicKey) -> None:
        """Learn from what was kept which log the peer showed before: the one that ``key`` signed for."""
        for origin, seen in kept.items():
            if is_signed_by(seen.note, origin, key):
                self._log_origin = origin.removesuffix(f"/{tenant_id}")

    async def _prove(self, client: PeerClient, tenant_id: str, seen: Seen | None, checkpoint: Checkpoint) -> None:
        """Refuse a tree that does not go on from the one that was seen before."""
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
        try:
            verify_consistency(before.size, checkpoint.size, before.root, checkpoint.root, hashes)
        except ProofError as error:
            raise PeerWentBackError(
                f"tenant {tenant_id} of {self.settings.url}: nothing proves that its tree of {checkpoint.size} entries "
                f"goes on from that of {before.size} seen before: {error}"
            ) from error

    async def _import(self, client: PeerClient, chain: _Chain) -> None:
        """Import what is lacking, range by range. Where that fails, the tenant pauses, longer and longer."""
        chain.pause_s = min(max(2 * chain.pause_s, self.interval_s), PAUSE_MAX_S)
        while chain.imported_seq < chain.size:
            from_seq, to_seq = chain.imported_seq + 1, min(chain.imported_seq + self.range_entries, chain.size)
            name = f"{chain.tenant_id} {from_seq}-{to_seq} of {self.settings.url}"
            try:
                is_last = to_seq == chain.size
                proof = [] if is_last else await client.consistency(chain.tenant_id, to_seq, chain.size)
                await self.take(
                    name,
                    client.bundle(chain.tenant_id, from_seq, to_seq),
                    partial(_admit, chain, from_seq, to_seq, proof),
                )
            except LedgerError:
                chain.paused_until_s = monotonic() + chain.pause_s
                raise
            async with self.pool.acquire() as connection:
                await exchange.imported(connection, chain.tenant_id, chain.origin, to_seq)
            self.imported_entries += to_seq - from_seq + 1
            chain.imported_seq = to_seq
            # A first round takes hours, and writes here wait for what is held there.
            await self._learn_held(client)
        if chain.fault is not None:
            log.info("exchange_tenant_resumed", peer=self.settings.url, tenant_id=chain.tenant_id)
        chain.fault, chain.pause_s = None, 0.0


async def _admit(chain: _Chain, from_seq: int, to_seq: int, proof: Sequence[bytes], bundle: RangeManifest) -> None:
    """Refuse a bundle that is not of this range, or of another tree than the newest checkpoint.

    Raises:
        ProofError: it is.
    """
    if (bundle.origin, bundle.from_seq, bundle.to_seq) != (chain.origin, from_seq, to_seq):
        raise ProofError(
            f"entries {from_seq} to {to_seq} of {chain.origin} were asked for, and the bundle is of {bundle.from_seq} "
            f"to {bundle.to_seq} of {bundle.origin}"
        )
    try:
        verify_consistency(to_seq, chain.size, bytes.fromhex(bundle.tree_root), chain.root, proof)
    except ProofError as error:
        raise ProofError(
            f"nothing proves that the entries {from_seq} to {to_seq} in the bundle are those of the checkpoint of "
            f"{chain.size}: {error}"
        ) from error


def _context_of(ca: Path | None) -> ssl.SSLContext:
    """What connections to the peer are made with.

    Raises:
        OSError: the file of certificate authorities cannot be read, or is no regular file.
    """
    if ca is not None:
        files.open_regular(ca).close()
    return ssl.create_default_context(cafile=ca)


def _token_in(file: Path) -> str:
    """The token that is shown to the peer; an empty one is not.

    Raises:
        ConfigurationError: what the file holds is none.
        OSError: it cannot be read, or is no regular file.
    """
    return token_in(files.read_regular(file), str(file))
