"""One peer: its newest signed checkpoints, proved to extend those seen before, and the missing ranges, imported as
bundles. A bundle must be the requested range and lie under the proved checkpoint.

A round checks each tenant in turn and then imports, a range at a time, in the order of the peer's chain. So the order
is causal: an entry comes after those that its node had seen. After a crash the next round continues after the last
stored range, and a range imported twice adds nothing.

If a peer went back or shows another tree of the same size for one tenant, imports of all its tenants stop until an
operator decides. So a round checks every tenant before it imports anything. The same applies to a peer that no longer
lists a tenant seen before, or shows a log of another origin. Any other fault of a tenant is reported, and stops no
other tenant.

*One node of the ledger asks a peer at a time*: a lock in PostgreSQL for each peer. ``Turns`` holds all locks on one
connection of the node, because a round mostly waits for the peer. A lock ends with its session. So if a lock may be
left over, because the node stops or a statement fails, the connection is closed. The other turns of this node then lose
their locks too, and another node may ask the same peer at the same time; imports of the same entries add nothing.
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
from ledger.errors import LedgerError, ProofError, SignatureError, reported_as
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
        """Turns that are taken or being requested."""

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[bool]:
        """Whether this node alone of its ledger asks ``peer``, until the context is left.

        Raises:
            DATABASE_FAULTS: PostgreSQL cannot be reached.
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
        """End the session, and with it its locks."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


TIMEOUT_S = 30.0
PAUSE_MAX_S = 60.0
"""Longest pause between attempts to ask a failing peer, and to import a failing tenant."""
FAILING_S_MAX = 60.0
"""A round defers its remaining tenants once failing ones have taken longer: the peer may be away."""
FAULTS_TOLD_MAX = 5
"""Tenants that are named with their faults; the rest are counted."""
FAULT_CHARACTERS_MAX = 1000
"""Characters kept of a tenant's fault: a hundred thousand tenants of a peer may fail."""
_is_log_origin = re.compile(LOG_ORIGIN).fullmatch

log = structlog.get_logger()


Admit = Callable[[RangeManifest], Awaitable[None]]
Take = Callable[[str, AsyncGenerator[bytes, None], Admit], Awaitable[None]]
"""Imports a bundle that comes in pieces, under a name, if it holds and is admitted."""


class PeerWentBackError(LedgerError):
    """A peer's log of a tenant no longer equals or extends the log seen before."""


@dataclass(slots=True)
class _Chain:
    """One tenant's chain at the peer, up to its newest proved checkpoint."""

    tenant_id: str
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


@dataclass
class Peer:
    """The exchange with one peer, and its state."""

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
    """By tenant, the seq up to which the peer has imported this ledger, by its last report."""
    held_asked_s: float = -math.inf
    """Time of the request for that report, by the monotonic clock."""
    on_held: Callable[[], None] = lambda: None
    _fault: str | None = field(default=None, init=False)
    """Why the peer could not be asked."""
    _chains: dict[str, _Chain] = field(default_factory=dict, init=False)
    _log_origin: str = field(default="", init=False)
    """Log origin of its ledger; empty until one of its checkpoints is proved."""
    _context: ssl.SSLContext | None = field(default=None, init=False)

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
        told = [f"tenant {chain.tenant_id}: {chain.fault}" for chain in failing[:FAULTS_TOLD_MAX]]
        if len(failing) > FAULTS_TOLD_MAX:
            told.append(f"{len(failing) - FAULTS_TOLD_MAX} more tenants")
        return "; ".join(told if self._fault is None else [self._fault, *told]) or None

    async def run(self) -> None:
        """Ask for ever, less and less often while the peer fails."""
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
        # 1. The listed tenants. Tenants that went back are kept even if they are not listed.
        keyring = await asyncio.to_thread(self.keys)
        before = self._chains
        listed = {
            each: before.get(each) or _Chain(each)
            for each in await client.tenants()
            if each != SYSTEM_TENANT and any(covers(pattern, each) for pattern in self.settings.tenants)
        }
        self._chains = {each: chain for each, chain in before.items() if chain.went_back} | listed
        # 2. The newest checkpoint of each, proved.
        seen = await self._each(listed.values(), lambda chain: self._look(client, keyring, chain))
        # 3. The tenants that are no longer listed.
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
        # 4. The missing entries of each tenant.
        await self._each(
            [chain for chain in seen if monotonic() >= chain.failed_at_s + chain.pause_s],
            lambda chain: self._import(client, chain),
        )

    async def _kept(self) -> list[str]:
        """The tenants of its ledger that were seen. After an operator removed all, the peer may show another ledger."""
        async with self.pool.acquire() as connection:
            # Of more than TENANTS_MAX kept tenants the peer cannot list all.
            kept = await exchange.held_of(connection, self._log_origin, "", TENANTS_MAX + 1, self.settings.tenants)
        if not kept:
            self._log_origin = ""
        return [tenant_id for tenant_id, _ in kept]

    async def _each(self, chains: Iterable[_Chain], work: Callable[[_Chain], Awaitable[None]]) -> list[_Chain]:
        """Do ``work`` for each, failures notwithstanding; returns the chains that did not fail."""
        done: list[_Chain] = []
        failing_s = 0.0
        # Chains that failed before come last, so that they take no time from the others. Among them the one that failed
        # longest ago comes first, so that a slow one cannot starve the rest.
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
            # Only the text is kept: an error keeps the frames of its traceback alive.
            chain.fault, chain.went_back = f"{type(error).__name__}: {error}"[:FAULT_CHARACTERS_MAX], went_back

    async def _look(self, client: PeerClient, keyring: Keyring, chain: _Chain) -> None:
        """Read the peer's newest checkpoint of a tenant, prove it, and read how much of it is imported."""
        tenant_id = chain.tenant_id
        note = await client.checkpoint(tenant_id)
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
            await exchange.saw(connection, tenant_id, origin, note.decode(), checkpoint.size)
        self._log_origin = log_origin
        chain.origin, chain.size, chain.root = origin, checkpoint.size, checkpoint.root
        if chain.went_back:
            chain.fault, chain.went_back = None, False
        chain.imported_seq = seen.imported_seq if seen else 0

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
            name = f"{chain.tenant_id} {from_seq}-{to_seq} of {self.settings.url}"
            proof = [] if to_seq == chain.size else await client.consistency(chain.tenant_id, to_seq, chain.size)
            await self.take(
                name,
                client.bundle(chain.tenant_id, from_seq, to_seq),
                partial(_admit, chain, from_seq, to_seq, proof),
            )
            async with self.pool.acquire() as connection:
                await exchange.imported(connection, chain.tenant_id, chain.origin, to_seq)
            self.imported_entries += to_seq - from_seq + 1
            chain.imported_seq = to_seq
            # A first round takes hours, and writes here wait for the peer's report of what it holds.
            await self._learn_held(client)
        if chain.fault is not None:
            log.info("exchange_tenant_resumed", peer=self.settings.url, tenant_id=chain.tenant_id)
        chain.fault, chain.pause_s = None, 0.0


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
