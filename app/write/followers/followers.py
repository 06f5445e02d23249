"""The follower of the job table: derives rows from chained entries, after the chaining commit.

The chaining transaction decides only what needs chain order; a follower derives what depends on the entries alone::

    chained(appended)     called after each commit of the appender or an import: there are new entries
    run()                 follows until cancelled; after a crash it goes on from the stored position
    last_error            why following failed last, None after a success

The notary follows the Merkle trees; its position is the size of the stored tree. ``job_table`` maps entries to rows of
the table. Its position::

    position <= head                    per tenant, in scheduler.follower_positions
    rows and position are written in one transaction, which locks the row of the position
    rows are written from the first entry on once a statement about excluded logs is met, which changes earlier ones
    a tenant without a position was not followed: its rows are removed, and it is followed from seq 1 on

An attacker can edit a position, so a position that this node did not write is checked: rows of the table MUST cover the
entries before it, and no row may cover an entry after it. If the check fails, the table is rebuilt from the first
entry, and the false position is reported.

So nodes that follow one ledger together neither lose nor repeat an entry if one of them dies, and an emptied table is
filled again. A follower that lags must never cause a wrong answer: readers merge the entries after its position.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from operator import itemgetter

import asyncpg
import structlog

from app.runtime.postgres import DATABASE_FAULTS, text_of
from app.store import following as store
from app.store.appended import AppendedEntries
from app.store.chaining import LOG_COLUMNS, RecentRows
from app.store.entry_check import Report
from app.store.following import FollowedEntry
from app.store.jobs.search import unbuilt
from app.store.jobs.table import FOLLOWER, first_unfollowed, is_beyond
from app.store.sessions import NodeConnection
from app.write.followers.job_table import JobTable, Turn
from ledger.errors import ChainDamagedError, LedgerError
from ledger.positions import Lsn
from ledger.verification.verdict import Break, damaged

ENTRIES_A_TURN = 4000
"""Most entries that are followed in one transaction. After a turn that failed, or took longer than ``TURN_LONG_S``, it
is half as many, down to a part of ``PARTS_MAX``; after one that took a quarter of that, twice as many again."""
TURN_LONG_S = 0.5
PARTS_MAX = 256
TENANTS_A_TURN = 64
"""Most tenants that are followed in one transaction."""
COLLECT_S = 0.1
"""How long committed entries are collected before they are followed, unless a reader waits for them."""
RUSH_ENTRIES = 2000
"""Entries collected, or waiting to be chained, above which following waits: chaining gets the whole processor, and a
job with several of these entries is written once."""
RUSH_S = 2.0
"""Longest that a rush delays following."""
RECENT_BYTES_MAX = 48 << 20
"""Bytes of the newest rows that are kept in memory to be followed; others are read back."""
RUSH_BYTES_MAX = RECENT_BYTES_MAX * 3 // 4
"""Bytes in memory at which a rush is followed immediately, so that no row must be read back."""
LOCK_REPORTED_AFTER_S = 5.0
"""How long rows are locked before that is reported."""
MET_BY = "follower"
"""The part of the node named in reports of breaks found here."""
PLACE_ENTRIES_MAX = 1000
"""Entries before a position that are compared with the table if this node does not know how far it had followed."""
SEARCH_INTERVAL_S = 2.0
"""Interval of searches for tenants that lag: chained by another node, or not followed in their last turn."""

_FOLLOWED = itemgetter(*(LOG_COLUMNS.index(name) for name in FollowedEntry._fields))

log = structlog.get_logger()


class LongLocks:
    """Tenants whose rows another session of PostgreSQL keeps locked for long; another node locks them only briefly.

    ``event`` is the log event that reports it.
    """

    def __init__(self, event: str) -> None:
        self._event = event
        self._since_s: dict[str, float] = {}
        self.tenants: set[str] = set()
        """Tenants whose rows have been locked for ``LOCK_REPORTED_AFTER_S``."""

    def met(self, tenant_id: str) -> None:
        """The tenant's rows were found locked."""
        since_s = self._since_s.setdefault(tenant_id, time.monotonic())
        if tenant_id not in self.tenants and time.monotonic() - since_s >= LOCK_REPORTED_AFTER_S:
            self.tenants.add(tenant_id)
            log.warning(self._event, tenant_id=tenant_id, error="another session keeps its rows locked (see pg_locks)")

    def ended(self, tenant_id: str) -> None:
        """The tenant's rows could be locked, or another fault occurred."""
        self._since_s.pop(tenant_id, None)
        self.tenants.discard(tenant_id)

    def ended_but_of(self, tenant_ids: set[str]) -> None:
        """The rows of all other tenants are no longer locked."""
        for tenant_id in self._since_s.keys() - tenant_ids:
            self.ended(tenant_id)


class TableFollower:
    """Updates ``table`` from all chains. ``chained_lsn`` returns the LSN up to which all records of this node for a
    tenant are in its chain, ``waiting`` the number of committed records that are not chained."""

    def __init__(
        self,
        table: JobTable,
        connect: Callable[[], Awaitable[NodeConnection]],
        chained_lsn: Callable[[str], Lsn],
        waiting: Callable[[], int] = lambda: 0,
        report: Report = lambda error, met_by: None,
        observe: Callable[[Mapping[str, Sequence[FollowedEntry]]], object] = lambda entries: None,
    ) -> None:
        """``report`` gets each error that kept tenants from being followed, and each false position, with the part that
        found it. ``observe`` gets the followed entries, by tenant."""
        self._observe = observe
        self._table = table
        self._parts = 1
        """A turn takes a part of ``ENTRIES_A_TURN``."""
        self._positions_left: dict[str, int] = {}
        """The last position that this node wrote, by tenant."""
        self._uncompared: set[str] = set()
        """Tenants whose position was locked at their turn: another node may have moved it."""
        self._to_rewrite: set[str] = set()
        """Tenants with false rows in the table: they are rewritten from the first entry."""
        self._is_first_search = True
        self._connect = connect
        self._chained_lsn = chained_lsn
        self._waiting = waiting
        self._report = report
        self._connection: NodeConnection | None = None
        self._behind: dict[str, None] = {}
        """Tenants that may lag, in the order in which they were found."""
        self._collected_tenants: dict[str, None] = {}
        """Tenants whose new entries are being collected."""
        self._arrived = 0
        """Entries that arrived since ``_collected`` last decided whether to follow."""
        self._rush_ends_s = 0.0
        self._is_lull = False
        """Whether entries are followed now because few arrived, and not because a rush reached a limit."""
        self._failed: set[str] = set()
        """Tenants that could not be followed; they are retried with the next search."""
        self._recent: defaultdict[str, RecentRows] = defaultdict(RecentRows)
        """Newest rows that this node chained, by tenant."""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self.last_error: str | None = None
        self._locks = LongLocks("following_delayed")
        self.locked = self._locks.tenants
        """Tenants whose positions another session has kept locked for long."""
        self._positions_before: dict[str, int | None] = {}
        """Positions of the tenants that lagged at the last search."""

    def chained(self, appended: AppendedEntries) -> None:
        """Collect the entries of a commit, to follow them later."""
        for piece in appended.log_rows.pieces:
            self._recent[piece.tenant_id].add(piece)
        if self._recent_bytes() > RECENT_BYTES_MAX:
            self._recent.clear()
        if not self._collected_tenants:
            self._rush_ends_s = time.monotonic() + RUSH_S
            asyncio.get_running_loop().call_later(COLLECT_S, self._collected)
        self._arrived += len(appended.log_rows)
        self._collected_tenants.update(dict.fromkeys(appended.links))
        self._idle.clear()

    def _collected(self) -> None:
        """Follow the collected entries, or collect more."""
        self._is_lull = not self._is_rush()
        self._arrived = 0
        if self._is_lull or self._recent_bytes() >= RUSH_BYTES_MAX or time.monotonic() >= self._rush_ends_s:
            self._follow_collected()
        else:
            asyncio.get_running_loop().call_later(COLLECT_S, self._collected)

    def _is_rush(self) -> bool:
        return max(self._arrived, self._waiting()) >= RUSH_ENTRIES

    def _recent_bytes(self) -> int:
        return sum(recent.size_bytes for recent in self._recent.values())

    def _follow_collected(self) -> None:
        self._behind.update(self._collected_tenants)
        self._collected_tenants.clear()
        self._wake.set()

    def doubt(self, tenant_id: str, job_id: str) -> None:
        """The row of this job is false: rewrite it."""
        self._table.doubt(tenant_id, job_id)
        self.follow_now(tenant_id)

    def rewrite(self, tenant_id: str) -> None:
        """The rows of this tenant are false: rewrite them from the first entry."""
        self._to_rewrite.add(tenant_id)
        self.follow_now(tenant_id)

    def follow_now(self, tenant_id: str) -> None:
        """A reader waits for this tenant: follow it now."""
        self._is_lull = False
        self._behind[tenant_id] = None
        self._wake.set()

    async def run(self) -> None:
        """Follow until cancelled."""
        is_found, search_at_s = False, 0.0
        try:
            while True:
                self._wake.clear()
                if time.monotonic() >= search_at_s:
                    is_found = await self._find_behind()
                    search_at_s = time.monotonic() + SEARCH_INTERVAL_S
                await self._follow_all()
                if is_found and not self._failed:
                    self.last_error = None
                if not self._behind and not self._collected_tenants and not self._failed:
                    self._idle.set()
                with contextlib.suppress(TimeoutError):
                    # Not ``wait_for``, which before Python 3.12 loses a cancellation that comes right after the wake.
                    async with asyncio.timeout(max(0.0, search_at_s - time.monotonic())):
                        await self._wake.wait()
        finally:
            self._lose_connection()

    async def drain(self, timeout_s: float) -> None:
        """Let ``run`` follow the chained entries, for at most ``timeout_s`` seconds."""
        self._follow_collected()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def _find_behind(self) -> bool:
        """Note which tenants lag; returns whether PostgreSQL answers."""
        self._failed.clear()
        try:
            connection = await self._connected()
            stands = await store.behind(connection, FOLLOWER)
            behind = [*stands, *self._uncompared, *await unbuilt(connection)]
            if self._is_first_search:
                behind += await store.followed(connection, FOLLOWER)
        except DATABASE_FAULTS as error:
            self._note((), error)
            return False
        self._is_first_search = False
        self._behind.update(dict.fromkeys(name for name in behind if name not in self._collected_tenants))
        # If a position moves, another node follows the tenant.
        self._locks.ended_but_of({name for name, seq in stands.items() if self._positions_before.get(name, -1) == seq})
        self._positions_before = stands
        return True

    async def _follow_all(self) -> None:
        """Take turns for all lagging tenants, as far as they can be followed."""
        while names := list(islice((name for name in self._behind if name not in self._failed), TENANTS_A_TURN)):
            for name in names:
                del self._behind[name]
            if not await self._follow(names) and len(names) > 1 and self._connection is not None:
                # One of them may block the others: each gets its own turn. Without a connection all have failed.
                self._failed.difference_update(names)
                while names and self._connection is not None:
                    await self._follow((names.pop(0),))
                self._failed.update(names)
            await asyncio.sleep(0)
        self._behind.clear()

    async def _follow(self, names: Sequence[str]) -> bool:
        """Take one turn for these tenants in one transaction; returns whether it was committed."""
        turn, began_s = Turn(), time.monotonic()
        try:
            connection = await self._connected()
            async with connection.transaction():
                await self._fill(turn, connection, names)
                # Also without entries: the table learns that another node followed these chains.
                await self._table.take(connection, turn)
                if unmoved := await store.move(connection, FOLLOWER, turn.after, turn.places):
                    raise ChainDamagedError(
                        min(unmoved), f"PostgreSQL did not move the place of follower {FOLLOWER} and said no error"
                    )
        except Exception as error:
            # Edited rows may hold any value. An unforeseen error, such as a TypeError, is logged with its trace.
            # Nothing of the turn is stored, these tenants are retried one by one, and /readyz reports why.
            if not isinstance(error, (LedgerError, *DATABASE_FAULTS)):
                log.error("following_failed", follower=FOLLOWER, tenants=names[:3], exc_info=error)
            self._table.failed()
            self._note(names, error)
            self._parts = min(2 * self._parts, PARTS_MAX)
            return False
        except BaseException:
            self._table.failed()
            raise
        self._table.taken(turn)
        took_s = time.monotonic() - began_s
        if took_s > TURN_LONG_S:
            self._parts = min(2 * self._parts, PARTS_MAX)
        elif took_s < TURN_LONG_S / 4:
            self._parts = max(self._parts // 2, 1)
        self._positions_left.update(turn.places)
        self._to_rewrite.difference_update(turn.after)
        self._observe(turn.entries)
        for name in names:
            (self._locks.ended if name in turn.after else self._locks.met)(name)
            (self._uncompared.discard if name in turn.after else self._uncompared.add)(name)
        self._behind.update(dict.fromkeys(turn.unfinished))
        # The rush that seemed over goes on: entries chained meanwhile are followed with its later ones.
        is_lull_over = self._is_lull and self._is_rush() and self._recent_bytes() < RUSH_BYTES_MAX
        for name, seq in turn.places.items():
            self._forget(name, seq)
            if name not in turn.covered_lsn and not (name in self._collected_tenants and is_lull_over):
                self._behind[name] = None
        return True

    async def _fill(self, turn: Turn, connection: asyncpg.Connection[asyncpg.Record], names: Sequence[str]) -> None:
        """Put the next entries of these tenants into ``turn``; this transaction locks their positions.

        Raises:
            ChainDamagedError: a chain has no entry at its head. If it were followed to there, entries chained after
                the head is repaired would be skipped.
        """
        # Read before the heads, so that the chains include all records up to these LSNs.
        chained_lsn, room = {name: self._chained_lsn(name) for name in names}, max(ENTRIES_A_TURN // self._parts, 1)
        places = await store.lock_places(connection, FOLLOWER, names)
        # Read after the heads, so that every statement below them is known.
        rewritten = {*self._to_rewrite, *await self._table.read_exclusions(connection, turn, list(places))}
        for name, place in places.items():
            found = None if place.is_begun else await self._false_place(connection, name, place.seq)
            if found is not None:
                self._report(ChainDamagedError(name, found.detail, found), MET_BY)
            if found is not None or (name in rewritten and not place.is_begun):
                await store.move(connection, FOLLOWER, {name: place.seq}, {name: 0})
                places[name] = store.Place(0, place.head_seq, is_begun=True)
        if begun := [name for name, place in places.items() if place.is_begun]:
            await self._table.empty(connection, begun)
        # A tenant of few new entries waits for none of many.
        for name, (after, head_seq, _) in sorted(places.items(), key=lambda item: item[1].head_seq - item[1].seq):
            if not (entries := self._remembered(name, after, head_seq, room)) and room and after < head_seq:
                entries = await store.entries_behind(connection, name, after, head_seq, room)
                if len(entries) < room and (not entries or entries[-1].seq != head_seq):
                    raise damaged(
                        name, "head", head_seq, f"its head stands at seq {head_seq}, where the log has no entry"
                    )
            turn.after[name] = after
            if self._positions_left.get(name) != after:
                turn.moved.add(name)
            turn.places[name] = entries[-1].seq if entries else after
            if turn.places[name] == head_seq:
                turn.covered_lsn[name] = chained_lsn[name]
            if entries:
                turn.entries[name] = entries
            room -= len(entries)

    async def _false_place(
        self, connection: asyncpg.Connection[asyncpg.Record], tenant_id: str, seq: int
    ) -> Break | None:
        """The fault of a position that this node did not write; None if the table matches: another node moved it."""
        left = self._positions_left.get(tenant_id)
        if left == seq:
            return None
        after_seq = left if left is not None and left < seq else max(0, seq - PLACE_ENTRIES_MAX)
        if await is_beyond(connection, tenant_id, seq):
            why = "rows cover entries behind it"
        elif (unfollowed := await first_unfollowed(connection, tenant_id, after_seq, seq)) is not None:
            why = "no row covers seq {} of job {}".format(*unfollowed)
        else:
            return None
        return Break(seq, "projection", f"the position of scheduler.{FOLLOWER} is seq {seq}, but {why}", None, why)

    def _remembered(self, tenant_id: str, after: int, head_seq: int, limit: int) -> Sequence[FollowedEntry]:
        """The entries after ``after`` that are in memory, up to the head that was read."""
        recent = self._recent.get(tenant_id)
        rows = () if recent is None else recent.after(after, min(limit, head_seq - after))
        return list(map(FollowedEntry._make, map(_FOLLOWED, rows)))

    def _forget(self, tenant_id: str, upto_seq: int) -> None:
        """Drop the followed rows from memory."""
        if (recent := self._recent.get(tenant_id)) is not None:
            recent.forget(upto_seq)
            if not recent.size_bytes:
                del self._recent[tenant_id]

    # --- the way to Postgres ----------------------------------------------------------------------

    async def _connected(self) -> NodeConnection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connect()
        return self._connection

    def _note(self, names: Sequence[str], error: Exception) -> None:
        """These tenants could not be followed. Without a connection none can be: the next search finds all again."""
        if self.last_error is None:
            log.warning("following_delayed", follower=FOLLOWER, tenants=names[:3], error=str(error))
        self.last_error = text_of(error)
        self._report(error, MET_BY)
        self._failed.update(names)
        if (lost := self._connection) is None or lost.is_closed() or lost.is_spent or isinstance(error, TimeoutError):
            self._lose_connection()
            self._failed.update(self._behind)

    def _lose_connection(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None
