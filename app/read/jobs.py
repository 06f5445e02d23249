"""Reading one job at the level of consistency asked for, from the primary or a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from app.read.consistency import Promise, ReadLevel, UnfitError
from app.read.replicas import Judge, Look, Replicas, Source
from app.store import reads
from app.store.reading import reading
from ledger import jobs
from ledger.errors import (
    ChainDamagedError,
    DatabaseUnavailableError,
    InvalidInputError,
    JobNotFoundError,
    TooStaleError,
)

if TYPE_CHECKING:
    from app.node import Node
    from app.read.consistency import Consistency
    from app.read.revealing import Revealing
    from app.session import Token
    from app.store import Connection
    from app.store.reading import Pool
    from ledger.hlc import Hlc

PRIMARY = Source("primary", 0)
REPLICA_WAIT_PART = 0.1
"""Part of ``read.wait`` that a session waits for a replica before it goes to the primary."""

State = jobs.JobState | None


class JobReader:
    """Reads jobs; nothing else decides where from."""

    def __init__(
        self,
        node: Node,
        primary: Pool,
        consistency: Consistency,
        revealing: Revealing,
        replicas: Replicas | None = None,
    ) -> None:
        self._node = node
        self._revealing = revealing
        self._primary = primary
        self._consistency = consistency
        self._replicas = replicas

    async def read(
        self,
        tenant_id: str,
        job_id: str,
        level: ReadLevel,
        tokens: Sequence[Token],
        as_of: Hlc | None,
        max_staleness_ms: int = 0,
    ) -> dict[str, Any]:
        """The job as ``GET /v1/jobs/{job_id}`` shows it, or as it was at ``as_of``.

        Raises:
            JobNotFoundError: no such job, or not yet at ``as_of``.
            ChainDamagedError: what is stored of the job is damaged, or the tenant is set apart and the level promises
                writes that may be held back.
            SessionNotCaughtUpError, WriteLostError, TooStaleError, FencedError: the level cannot be kept.
        """
        reason = self._node.damaged.get(tenant_id)
        if reason is not None and (level is ReadLevel.STRONG or (tokens and level is ReadLevel.SESSION)):
            # Acknowledged writes of this tenant may be held back: what the chain shows need not have them.
            raise ChainDamagedError(tenant_id, reason)
        pairs = [(token.node_id, token.epoch) for token in tokens]

        async def look(pool: Pool, judge: Judge) -> State:
            async with reading(pool, snapshot=as_of is not None) as connection:
                if as_of is not None:
                    judge(await reads.seen(connection, pairs, self._node.node_id))
                    return await _state_as_of(connection, tenant_id, job_id, as_of)
                stored, seen = await reads.job_state_and_seen(connection, tenant_id, job_id, pairs, self._node.node_id)
                judge(seen)
                return None if stored is None else state_of(tenant_id, stored)

        state, source = await self._read(look, Promise(level, tokens, max_staleness_ms))
        if state is None:
            at = "" if as_of is None else f" at {as_of}"
            behind = "" if source is PRIMARY else f" (says {source.name}, {source.staleness_ms} ms behind)"
            raise JobNotFoundError(f"tenant {tenant_id} has no job {job_id}{at}{behind}")
        (shown,) = await self._revealing.states(tenant_id, [state])
        return {
            "tenant_id": tenant_id,
            **jobs.view(shown),
            "consistency": {"level": level.name, "source": source.name, "staleness_ms": source.staleness_ms},
        }

    async def _read(self, look: Look[State], promise: Promise) -> tuple[State, Source]:
        """What ``look`` reads in a snapshot that keeps ``promise``: a replica's, else the primary's.

        A session first waits for this node's own writes: before they are chained no copy has them.
        """
        level, wait_s = promise.level, 0.0
        if level in (ReadLevel.SESSION, ReadLevel.STRONG):
            await self._consistency.wait_here(promise.tokens)
            wait_s = self._consistency.wait_s * REPLICA_WAIT_PART
        if level is ReadLevel.STRONG:
            await self._consistency.chain_own_writes()
        elif self._replicas is not None:
            answer = await self._replicas.read(look, promise, wait_s)
            if answer is not None:
                return answer
        return await self._read_primary(look, promise), PRIMARY

    async def _read_primary(self, look: Look[State], promise: Promise) -> State:
        def judge(seen: reads.Seen) -> None:
            promise.check(seen, PRIMARY.staleness_ms)
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


async def _state_as_of(connection: Connection, tenant_id: str, job_id: str, as_of: Hlc) -> State:
    """What the events of the job with an HLC up to ``as_of`` say together."""
    state: State = None
    async for event in reads.job_events_up_to(connection, tenant_id, job_id, as_of):
        fact = _fact_of(event, tenant_id, job_id)
        if fact is not None:
            state = fact if state is None else jobs.merge(state, fact)
    return state


def state_of(tenant_id: str, stored: str) -> jobs.JobState:
    """The state that a row of ``jobs`` holds.

    Raises:
        ChainDamagedError: somebody edited it; verification says where.
    """
    try:
        return jobs.from_json(stored)
    except InvalidInputError as error:
        raise ChainDamagedError(tenant_id, f"a stored job state is none: {error}") from error


def _fact_of(event: reads.EventRow, tenant_id: str, job_id: str) -> State:
    hlc = (event.hlc_physical, event.hlc_logical, event.hlc_node)
    payload = orjson.loads(event.payload)
    if not isinstance(payload, dict):
        raise ChainDamagedError(tenant_id, f"the payload of seq {event.seq} is no object")
    return jobs.fact_of(event.action, payload, hlc, event.payload_digest, job_id, event.seq)
