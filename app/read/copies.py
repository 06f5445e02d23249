"""The copies of the database that reads use: the primary, and its hot standbys if there are any.

A replica is asked only while it is fit: it answered the last check, and holds this ledger. The snapshot that it reads
must then prove that it keeps the promise of the read. In every other case the primary answers. So a replica can save
the primary work but never cost an answer::

    replica answers, snapshot keeps the promise    its answer, and the snapshot's greatest possible age
    snapshot too old, or writes missing            the next replica, then the primary
    error, or silence of ANSWER_TIMEOUT_S          the same, and unfit until it answers again

An unfit replica is reported in the log, at once and when the reason changes, and in ``/metrics``. ``/readyz`` reports
it after ``REPORTED_AFTER_S``, or at once if it has never been fit.

*The age of a snapshot* follows from the primary's clock alone. Every node that has replicas repeatedly writes the
primary's time into one row, the heartbeat. A snapshot of any copy that shows the beat of time b holds every commit
before b. This node knows when it sent its own newest beat and which time the primary gave it. That bounds the
primary's present time::

    sent <= own beat            primary's time now <= own beat + (now - sent)
    age of a snapshot <= own beat + (now - sent) - b

Both beats are times of the primary, and the rest is this node's monotonic clock, so no two clocks are compared. The
bound also holds while the primary is unreachable, and while other nodes write newer beats.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from app.read.consistency import Consistency, Promise, ReadLevel, UnfitError
from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS, text_of
from app.runtime.state.node import Node
from app.runtime.state.session import Token
from app.runtime.tasks import attempts_within, repeat
from app.store import Connection, reads, sessions
from app.store import node as node_store
from app.store.node import beat
from app.store.reading import READ_TIMEOUT_S, Pool, reading, run_in
from app.store.reads import Seen
from app.store.sessions import PLANNED_ONCE
from ledger.errors import (
    DatabaseUnavailableError,
    QuarantinedError,
    SessionNotCaughtUpError,
    TooStaleError,
    WriteLostError,
)
from ledger.positions import Epoch

BEAT_INTERVAL_S = 0.25
"""Pause between two beats, and the resolution of every age."""
BEAT_TIMEOUT_S = 2.0


class Heartbeat:
    """Writes the heartbeat and judges ages by it."""

    def __init__(self, primary: Pool) -> None:
        self._primary = primary
        self._own_beat_at: datetime | None = None
        self._sent_s = 0.0

    async def run(self) -> None:
        """Beat until cancelled, also while the primary is unreachable."""
        await repeat(self.beat, BEAT_INTERVAL_S, "heartbeat_missed")

    async def beat(self) -> None:
        """Write one beat.

        Raises:
            DatabaseUnavailableError, or one of ``DATABASE_FAULTS``: the primary does not accept it.
        """
        sent_s = time.monotonic()
        beat_at = await run_in(reading(self._primary, timeout_s=BEAT_TIMEOUT_S), beat)
        self._own_beat_at, self._sent_s = beat_at, sent_s

    def age_ms(self, beat_at: datetime | None) -> int | None:
        """The greatest possible age of a snapshot that shows ``beat_at``; None if it is unknown.

        It is unknown before this node's first beat, and for a beat in the future: the primary's clock was set back.
        """
        if beat_at is None or self._own_beat_at is None:
            return None
        now = self._own_beat_at + timedelta(seconds=time.monotonic() - self._sent_s)
        age_s = (now - beat_at).total_seconds()
        return None if age_s < -BEAT_INTERVAL_S else max(0, round(age_s * 1000))


CONNECTIONS_MAX = 16
"""Connections to each replica."""
ANSWER_TIMEOUT_S = 0.3
"""How long a replica may be silent before a read goes elsewhere; an answer that has started may take longer."""
REPORTED_AFTER_S = 10.0
"""A replica that is unfit for less time, as during a restart, does not make the node report a fault."""
UNSEEN = "it was not asked yet"

Value = TypeVar("Value")
Judge = Callable[[Seen], None]
"""Raises ``UnfitError`` if a snapshot cannot keep the promise."""
Look = Callable[[Pool, Judge], Awaitable[Value]]
"""Takes a snapshot of the pool's copy, shows it to the judge, and reads from it."""


class Source(NamedTuple):
    """The copy that answered, and its greatest possible lag behind the primary."""

    name: str
    staleness_ms: int


@dataclass(slots=True)
class _Replica:
    name: str
    at: str
    """Its host, port and database, without the login."""
    pool: Pool
    fault: str | None = UNSEEN
    """Why it is unfit now; None while it is fit."""
    fit_s: float = -math.inf
    """When it was last fit, by the monotonic clock."""
    staleness_ms: int = 0
    """Age of its last judged snapshot."""


@asynccontextmanager
async def replicas_at(urls: Sequence[str], primary_url: str, log_origin: str) -> AsyncIterator[Replicas | None]:
    """The replicas at ``urls``, numbered from 1, whether they answer or not. None if there is no URL."""
    if not urls:
        yield None
        return
    # The beat has a connection of its own, so that it never waits behind reads.
    to_primary = await sessions.pool(primary_url, connections_max=1, timeout_s=READ_TIMEOUT_S)
    pools = [
        await sessions.pool(url, PLANNED_ONCE, connections_max=CONNECTIONS_MAX, timeout_s=READ_TIMEOUT_S)
        for url in urls
    ]
    try:
        yield Replicas(list(zip(map(_place_of, urls), pools, strict=True)), Heartbeat(to_primary), log_origin)
    finally:
        for pool in (to_primary, *pools):
            pool.terminate()


class Replicas:
    """The hot standbys of one ledger, asked in rotation."""

    def __init__(self, copies: Sequence[tuple[str, Pool]], heartbeat: Heartbeat, log_origin: str) -> None:
        """``copies`` are pairs: the address to show to people, and the connection pool."""
        self._replicas = [_Replica(f"replica-{number}", at, pool) for number, (at, pool) in enumerate(copies, 1)]
        self._heartbeat = heartbeat
        self._log_origin = log_origin
        self._turn = 0

    async def run(self) -> None:
        """Beat and check the replicas, until cancelled."""
        await asyncio.gather(self._heartbeat.run(), *map(self._watch, self._replicas))

    async def read(self, look: Look[Value], promise: Promise, wait_s: float) -> tuple[Value, Source] | None:
        """The result of ``look`` at a replica whose snapshot keeps ``promise``; None if the primary must answer.

        Waits up to ``wait_s`` seconds for a replica that has nearly caught up.

        Raises:
            WriteLostError: a replica saw that a write of the session was lost.
        """
        async for _ in attempts_within(wait_s):
            self._turn += 1
            first = self._turn % len(self._replicas)
            for replica in (*self._replicas[first:], *self._replicas[:first]):
                answer = await self._ask(replica, look, promise) if replica.fault is None else None
                if answer is not None:
                    return answer
            if not self._one_is_near(wait_s):
                break
        return None

    def fault(self) -> str | None:
        """The replicas that have been unfit for ``REPORTED_AFTER_S``, and why; None if there are none."""
        since_s = time.monotonic() - REPORTED_AFTER_S
        faults = [
            f"{replica.name} at {replica.at} answers no reads: {replica.fault}"
            for replica in self._replicas
            if replica.fault not in (None, UNSEEN) and replica.fit_s < since_s
        ]
        return "; ".join(faults) or None

    def fitness(self) -> dict[str, bool]:
        """By replica name, whether it answers reads now."""
        return {replica.name: replica.fault is None for replica in self._replicas}

    def _one_is_near(self, wait_s: float) -> bool:
        """Whether a replica may catch up within ``wait_s`` seconds. The resolution of ages is one beat."""
        near_ms = (wait_s + BEAT_INTERVAL_S) * 1000
        return any(replica.fault is None and replica.staleness_ms < near_ms for replica in self._replicas)

    async def _ask(self, replica: _Replica, look: Look[Value], promise: Promise) -> tuple[Value, Source] | None:
        """The answer of ``replica``, None if it has none that keeps the promise."""
        staleness_ms: int | None = None

        def judge(seen: Seen) -> None:
            nonlocal staleness_ms
            silence.reschedule(None)
            if (staleness_ms := self._heartbeat.age_ms(seen.beat_at)) is None:
                raise UnfitError
            replica.staleness_ms = staleness_ms
            promise.check(seen, staleness_ms)

        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S) as silence:
                value = await look(replica.pool, judge)
        except UnfitError:
            return None
        except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
            self._note(replica, _said(error))
            return None
        assert staleness_ms is not None, "nothing is read that was not judged"
        return value, Source(replica.name, staleness_ms)

    async def _watch(self, replica: _Replica) -> None:
        """Check repeatedly whether ``replica`` is fit."""
        while True:
            try:
                origin = await run_in(reading(replica.pool, timeout_s=ANSWER_TIMEOUT_S), node_store.log_origin)
                is_ours = origin == self._log_origin
                self._note(replica, None if is_ours else f"it holds the ledger {origin}, not {self._log_origin}")
            except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
                self._note(replica, _said(error))
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _note(self, replica: _Replica, fault: str | None) -> None:
        if fault != replica.fault and not (fault is None and replica.fault == UNSEEN):
            log.warning(
                "replica_fit" if fault is None else "replica_unfit", replica=replica.name, at=replica.at, fault=fault
            )
        replica.fault = fault
        if fault is None:
            replica.fit_s = time.monotonic()


def _said(error: Exception) -> str:
    """The error text of the replica or the driver."""
    cause = error.__cause__ if isinstance(error, DatabaseUnavailableError) else None
    return text_of(cause or error)


def _place_of(url: str) -> str:
    """Host, port and database of an address, without login and parameters."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] + parts.path


PRIMARY = Source("primary", 0)
REPLICA_WAIT_PART = 0.1
"""Part of ``read.wait`` that a session waits for a replica before it goes to the primary."""


class Copies:
    """Reads from a copy that keeps the promise; the only place that chooses the copy."""

    def __init__(self, node: Node, primary: Pool, consistency: Consistency, replicas: Replicas | None = None) -> None:
        self._node = node
        self._primary = primary
        self._consistency = consistency
        self._replicas = replicas

    def _check_whole(self, tenant_id: str | None, promise: Promise) -> None:
        """Refuse a read if its promise covers writes that the appender may have skipped, because the tenant is damaged
        or its rows are locked. The chain may lack these writes."""
        level = promise.level
        if tenant_id is None or not (level is ReadLevel.STRONG or (promise.tokens and level is ReadLevel.SESSION)):
            return
        if (reason := self._node.damaged.get(tenant_id)) is not None:
            raise QuarantinedError(tenant_id, reason)
        if (reason := self._node.waiting.get(tenant_id)) is not None:
            raise SessionNotCaughtUpError(
                f"tenant {tenant_id} has writes that are not chained yet: {reason}; try again"
            )

    def asked_of(self, promise: Promise) -> tuple[Sequence[tuple[str, Epoch]], str]:
        """Arguments of ``reads.seen``, with which a look queries its snapshot for the judge."""
        return [(token.node_id, token.epoch) for token in promise.tokens], self._node.node_id

    async def judged(self, connection: Connection, promise: Promise, judge: Judge) -> None:
        """Show ``judge`` the snapshot of ``connection``; raises what ``judge`` raises."""
        judge(await reads.seen(connection, *self.asked_of(promise)))

    async def read(self, tenant_id: str | None, look: Look[Value], promise: Promise) -> tuple[Value, Source]:
        """The result of ``look``, for one tenant or all, in a snapshot that keeps ``promise``: a replica's, else the
        primary's.

        A session first waits for this node's own writes: no copy has them before they are chained.

        Raises:
            SessionNotCaughtUpError, WriteLostError, TooStaleError, FencedError: the promise cannot be kept.
            ChainDamagedError: the tenant is quarantined, and the promise covers writes that may be held back.
        """
        self._check_whole(tenant_id, promise)
        try:
            found = await self._read(look, promise)
        except WriteLostError as lost:
            # The row that calls the write lost can be edited, so look the write up in the chains.
            try:
                chained = await self._consistency.chained(promise.tokens)
            except DatabaseUnavailableError:
                raise lost from None
            found = await self._read_primary(look, promise, chained), PRIMARY
        self._check_whole(tenant_id, promise)  # Again: the tenant may have been damaged during the wait.
        return found

    async def _read(self, look: Look[Value], promise: Promise) -> tuple[Value, Source]:
        level, wait_s = promise.level, 0.0
        if level in (ReadLevel.SESSION, ReadLevel.STRONG):
            await self._consistency.wait_here(promise.tokens)
            wait_s = self._consistency.wait_s * REPLICA_WAIT_PART
        if level is ReadLevel.STRONG:
            await self._consistency.chain_own_writes()
        elif self._replicas is not None and (answer := await self._replicas.read(look, promise, wait_s)) is not None:
            return answer
        return await self._read_primary(look, promise), PRIMARY

    async def _read_primary(self, look: Look[Value], promise: Promise, chained: Collection[Token] = ()) -> Value:
        def judge(seen: reads.Seen) -> None:
            promise.check(seen, PRIMARY.staleness_ms, chained)
            if promise.level is ReadLevel.STRONG:
                self._consistency.check_not_fenced(seen.epoch)

        async for _ in self._consistency.attempts():
            try:
                return await look(self._primary, judge)
            except UnfitError:
                continue
            except DatabaseUnavailableError as error:
                if promise.level is ReadLevel.BOUNDED_STALENESS:
                    raise TooStaleError(f"no replica is fresh enough, and {error}") from error
                raise
        raise AssertionError("attempts never end without an error")
