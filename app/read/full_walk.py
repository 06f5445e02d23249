"""Reads verified history again: every chain from its first entry on, one tenant after the other, at a bounded share.

A short chain is verified whole, job states and verdicts on proposals included. A longer one is verified in ranges,
without job states, which the log says for each such tenant (``job_states_not_compared``); its verdicts, each of which
hangs on all entries before it, are judged at its end. Its links are appended to a tree as they are read, and the tree
is compared with the newest checkpoint beside the WAL when it reaches its size; behind a gap, or what is no link, there
is no tree any more, and the walk goes on without. The walk's position is stored beside the WAL, in
``<wal folder>/walk.json``, so that a node that is restarted every day comes to an end all the same::

    {"version": 1, "began_at": 1700000000.0, "is_done": false, "tenant_id": "acme", "seq": 40000,
     "hashes": ["64 hex digits"], "from_seq": 39800, "link": "64 hex digits", "snapshot": "64 hex digits",
     "is_valid": true}

``hashes`` are those of the frontier of the tree over the entries up to ``seq``, null without a tree; the next range
begins behind ``from_seq``, the end of a snapshot, whose link is ``link`` and whose payload digest ``snapshot``. With a
file that cannot be read the walk begins again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import structlog

from app.runtime.state.found_breaks import DAMAGED
from app.runtime.state.kept_files import WALK, KeptFile, Verified
from app.runtime.tasks import paced
from app.store.chain_reads import last_seq, list_tenants, next_seq
from app.store.reading import reading
from ledger import merkle
from ledger.errors import DatabaseUnavailableError, StartRefusedError, TenantNotFoundError
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.verdict import KINDS, Break

if TYPE_CHECKING:
    from app.read.verification import ChainVerifier
    from app.store.chain_reader import Batches, PostgresChainReader
    from app.store.reading import Pool
    from signing.checkpoint import Checkpoint

NAME: Final = "walk.json"
SHARE: Final = 0.1
"""Most of the time that the walk takes, waiting for the database included: a tenth of a core at the most."""
RANGE_ENTRIES: Final = 20_000
"""Entries of one range, and of a chain that is verified whole."""
STORE_INTERVAL_S: Final = 5.0
"""How often the position is stored: what a restart reads again."""
PAUSE_S: Final = 60.0
"""Wait before a walk goes on that Postgres interrupted, and the longest between two looks whether one is due."""

UNSIGNED_ENTRIES_MAX: Final = 100_000
"""Entries without a snapshot that are read twice at the most; behind more, the walk goes on without one."""

_SEQ, _LINK = map(ENTRY_COLUMNS.index, ("seq", "chain_link"))

_COMPARED_IN_RANGES: Final = {*KINDS, DAMAGED} - {"projection"}
"""Kinds of break that a chain verified in ranges does not have: job states are not compared."""

log = structlog.get_logger()


class _Position(msgspec.Struct):
    """How far the walk is: ``tenant_id`` up to ``seq``; all tenants before it are done."""

    version: Literal[1] = 1
    began_at: float = 0.0
    is_done: bool = True
    tenant_id: str = ""
    seq: int = 0
    hashes: list[str] | None = []
    from_seq: int = 0
    link: str | None = None
    snapshot: str | None = None
    is_valid: bool = True
    """Whether nothing was found wrong with this tenant so far."""

    def begin(self, tenant_id: str) -> None:
        """Go on with the chain of this tenant."""
        self.tenant_id, self.seq, self.hashes, self.from_seq, self.link, self.snapshot = tenant_id, 0, [], 0, None, None
        self.is_valid = True


_FILE: Final = KeptFile[_Position](NAME, _Position, b"{}", "the walk begins again")


class FullWalk:
    """The walk of one node; belongs to its event loop."""

    def __init__(
        self,
        *,
        pool: Pool,
        verifier: ChainVerifier,
        kept: Callable[[str], Checkpoint | None],
        wal_folder: Path,
        interval_s: float,
    ) -> None:
        """``kept`` gives the newest checkpoint of a tenant beside the WAL."""
        self._pool = pool
        self._verifier = verifier
        self._kept = kept
        self._folder = wal_folder
        self._interval_s = interval_s
        self._at = _load(wal_folder)
        self._stored_at_s = 0.0
        self.walks_done = 0

    async def run(self) -> None:
        """Walk every ``interval_s`` seconds, for ever; ends by cancellation."""
        while True:
            due_in_s = self._at.began_at + self._interval_s - time.time() if self._at.is_done else 0.0
            if due_in_s > 0:
                await asyncio.sleep(min(due_in_s, PAUSE_S))
                continue
            try:
                await self._walk()
            except DatabaseUnavailableError as error:
                log.warning("full_verification_delayed", error=str(error))
                await asyncio.sleep(PAUSE_S)

    async def _walk(self) -> None:
        """Walk on to the end of the last chain."""
        if self._at.is_done:
            self._at = _Position(began_at=time.time(), is_done=False)
        async with reading(self._pool) as connection:
            tenants = [each for each in await list_tenants(connection) if each >= self._at.tenant_id]
        for tenant_id in tenants:
            if tenant_id != self._at.tenant_id:
                self._at.begin(tenant_id)
            while not await self._next_range(tenant_id):
                await self._store()
            # The next name there can be: this one is done.
            self._at.begin(tenant_id + "\0")
            await self._store()
        self._at.is_done = True
        self.walks_done += 1
        await self._store(is_due=True)
        log.info("full_verification_done", tenants=len(tenants), took_s=round(time.time() - self._at.began_at, 1))

    async def _next_range(self, tenant_id: str) -> bool:
        """Verify the next part of the chain; whether that was the last."""
        async with paced(SHARE):
            try:
                return await self._verify(tenant_id)
            except DatabaseUnavailableError:
                raise
            except TenantNotFoundError:
                return True
            except Exception as error:
                # Rows that someone edited may hold anything; what they break must not be the walk.
                self._verifier.failed(tenant_id, error)
                return True

    async def _verify(self, tenant_id: str) -> bool:
        at = self._at
        async with reading(self._pool) as connection:
            end_seq = await last_seq(connection, tenant_id)
        if at.seq == 0 and end_seq <= RANGE_ENTRIES:
            await self._verifier.again(tenant_id, by=WALK)
            return True
        if at.seq == 0:
            log.info("job_states_not_compared", tenant_id=tenant_id, entries=end_seq, done="tally verify compares them")
        # What is kept is asked for before the entries are read.
        kept = self._kept(tenant_id)
        to_seq = min(at.seq + RANGE_ENTRIES, end_seq)
        if kept is not None and at.seq < kept.size < to_seq:
            to_seq = kept.size
        tree = _TreeOfEntries(at, to_seq)
        begin = (at.from_seq + 1, to_seq, at.link, at.snapshot)
        verdict = (await self._verifier.again(tenant_id, *begin, tree.over)).verdict
        at.is_valid = at.is_valid and verdict.is_valid
        frontier = tree.frontier
        if kept is not None and frontier and frontier.size == kept.size and frontier.root() != kept.root:
            detail = f"the first {kept.size} entries are not those of the checkpoint that this node keeps"
            broken = Break(kept.size, "rollback", detail, kept.root.hex(), frontier.root().hex())
            await self._verifier.report(tenant_id, [broken])
            at.is_valid = False
        if to_seq >= end_seq:
            await self._verifier.judge_commitments(tenant_id)
            verified = Verified(at.began_at, WALK)
            await self._verifier.verified_whole(tenant_id, verified, is_valid=at.is_valid, kinds=_COMPARED_IN_RANGES)
            return True
        if tree.last_seq <= at.seq:
            # Nothing is there. The next range holds what comes before and behind, so that the gap is seen.
            async with reading(self._pool) as connection:
                at.seq, at.hashes = await next_seq(connection, tenant_id, to_seq) - 1, None
            return False
        at.seq, at.hashes = to_seq, None
        if frontier and frontier.size == to_seq:
            at.hashes = [each.hex() for each in frontier.hashes]
        if verdict.signed_to.seq > at.from_seq:
            # From the end of a snapshot on, so that the next range meets whole ones.
            at.from_seq, at.link = verdict.signed_to.seq, verdict.signed_to.chain_link
            at.snapshot = verdict.signed_digest
        elif at.seq - at.from_seq > UNSIGNED_ENTRIES_MAX:
            at.from_seq, at.link, at.snapshot = at.seq, tree.link if tree.last_seq == at.seq else None, None
        return False

    async def _store(self, *, is_due: bool = False) -> None:
        if not is_due and time.monotonic() < self._stored_at_s + STORE_INTERVAL_S:
            return
        self._stored_at_s = time.monotonic()
        try:
            await asyncio.to_thread(_FILE.store, self._folder, self._at)
        except OSError as error:
            log.warning("full_verification_position_not_stored", error=str(error))


class _TreeOfEntries:
    """The tree of the entries that a verification reads, from where the walk is on up to ``to_seq``."""

    def __init__(self, at: _Position, to_seq: int) -> None:
        self._to_seq = to_seq
        self.last_seq = at.seq
        self.frontier = _frontier(at)
        """None from where on entries are missing, or have no links."""
        self.link: str | None = None
        """Of the last entry, where it is one."""

    def over(self, reader: PostgresChainReader) -> PostgresChainReader:
        """``reader``, whose entries are appended to the tree as they pass."""
        entries = reader.entries

        async def passing(from_seq: int | None, to_seq: int | None) -> Batches:
            async for rows in entries(from_seq, to_seq):
                self._take(rows)
                yield rows

        reader.entries = passing  # type: ignore[method-assign]
        return reader

    def _take(self, rows: Sequence[Sequence[Any]]) -> None:
        """Those of ``rows`` that come next."""
        for row in rows:
            if not self.last_seq < row[_SEQ] <= self._to_seq:
                continue
            is_next, self.last_seq = row[_SEQ] == self.last_seq + 1, row[_SEQ]
            try:
                leaf, self.link = bytes.fromhex(row[_LINK]), row[_LINK]
            except (TypeError, ValueError):
                self.frontier = self.link = None
                continue
            if self.frontier is not None and is_next:
                self.frontier.append(merkle.leaf_hash(leaf))
            else:
                self.frontier = None


def _frontier(at: _Position) -> merkle.Frontier | None:
    if at.hashes is None:
        return None
    return merkle.Frontier.restore(at.seq, tuple(map(bytes.fromhex, at.hashes)))


def _load(folder: Path) -> _Position:
    try:
        position = _FILE.load(folder)
        _frontier(position)
    except (StartRefusedError, ValueError, AssertionError) as error:
        log.warning("full_verification_begins_again", error=repr(error))
        return _Position()
    return position
