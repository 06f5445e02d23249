"""Requests with an ``Idempotency-Key``: seen before, under way on this node, or new.

The appender writes the idempotency table in the chaining transaction. Between WAL and chain only this node knows its
requests, here; after a restart they are rebuilt from the backlog.

A request has one name for each tenant that it has lines of. At most one request of a name is under way on a node.
Another request that shares a name waits until the first has been entered. Then the same body gets the same answer;
another body is refused as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from app.runtime.logs import log
from app.runtime.state.node import Node
from app.store.idempotency import ChainedLine, key_row_error
from app.write.pending.backlog import Pending
from app.write.pending.keyed_entries import KeyedEntries, key_digest_of, proven, row_gone
from app.write.pending.requests import BatchReceipt, RequestKey, RequestName
from ledger.errors import ChainDamagedError, DatabaseUnavailableError, IdempotencyReusedError
from ledger.facts.events import Durability

IN_FLIGHT_MIN = 1000
"""Names in flight below which chained requests are not looked for."""


@dataclass(slots=True, eq=False)
class KeyedRequest:
    """One keyed request: its known lines when it begins, and its progress."""

    names: Sequence[RequestName]
    body_digest: bytes
    chained: list[ChainedLine] = field(default_factory=list)
    """Lines already chained when the request began."""
    recovered: list[Pending] = field(default_factory=list)
    """Lines that the WAL held beyond the chain when this process started; some may be missing, as a crash may have
    torn the request."""
    pending: Pending | None = None
    """Its last record in this node's WAL, None if it has no unchained record."""
    receipt: BatchReceipt | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the request was entered or has failed."""

    def present(self) -> frozenset[int]:
        """Numbers of the lines that must not be added again."""
        return frozenset(line.line for line in self.chained) | frozenset(
            pending.idempotency.line for pending in self.recovered if pending.idempotency is not None
        )

    def entered(self, last: Pending) -> None:
        """Its records are in the WAL; from now on other requests of the same key wait for them."""
        self.pending = last
        self.settled.set()


class KeyedRequests:
    """The keyed requests under way on this node, and the way to look up the chained ones."""

    def __init__(
        self,
        node: Node,
        find_lines: Callable[[Sequence[str], int, str], Awaitable[list[ChainedLine]]],
        entries: KeyedEntries,
        report: Callable[[ChainDamagedError, str], object],
    ) -> None:
        """``report`` gets each row whose body digest differs from its entry's."""
        self._report = report
        self._node = node
        self._find_lines = find_lines
        self._entries = entries
        self._in_flight: dict[RequestName, KeyedRequest] = {}
        self._prune_at = IN_FLIGHT_MIN
        """Number of names in flight at which chained requests are forgotten."""
        self._recovered: dict[RequestName, list[Pending]] = {}
        self._unsettled: list[Pending] = []
        """Recovered records that may still be unchained. Their LSNs do not show it, as tenants may be passed over."""

    def recover(self, pending: Pending) -> None:
        """Take over a record that the WAL holds and the chain lacks, if it is keyed. Called in LSN order."""
        if (key := pending.idempotency) is None:
            return
        self._recovered.setdefault((pending.tenant_id, key.route, key.key), []).append(pending)
        self._unsettled.append(pending)

    @asynccontextmanager
    async def begin(
        self, tenants: tuple[str, ...], key: RequestKey, level: Durability
    ) -> AsyncIterator[tuple[KeyedRequest, bool]]:
        """The request of this key, and whether an earlier call started it.

        The caller that started it enters its records inside the context. If it leaves without ``entered``, the next
        request of the key starts anew.

        Raises:
            IdempotencyReusedError: the key belongs to another body.
        """
        self._prune()
        names = [(tenant_id, key.route, key.key) for tenant_id in tenants]
        # Any request that shares a name will do: the loop checks again.
        while (earlier := next((self._in_flight[name] for name in names if name in self._in_flight), None)) is not None:
            await earlier.settled.wait()
            if earlier.pending is not None and not self._is_chained(earlier):
                # Only now: a request that was not entered leaves the key to the next one.
                self._check_body(key, earlier.body_digest)
                yield earlier, True
                return
            self._forget(earlier)
        request = KeyedRequest(names, key.body_digest)
        self._in_flight.update(dict.fromkeys(names, request))
        try:
            for name in names:
                request.recovered += self._recovered.get(name, ())
            request.chained = await self.find(tenants, key, level)
            for line in (*request.chained, *(pending.idempotency for pending in request.recovered)):
                if line is not None:
                    self._check_body(key, line.body_digest)
                    request.body_digest = line.body_digest
            yield request, False
        finally:
            request.settled.set()
            if request.pending is None:
                self._forget(request)

    async def find(
        self, tenants: Sequence[str], key: RequestKey, level: Durability = Durability.GLOBAL
    ) -> list[ChainedLine]:
        """The chained lines of the request, in line order, with the body digests that their entries record. At LOCAL a
        request is new if the table cannot be read.

        Raises:
            IdempotencyReusedError: they are of another body.
        """
        try:
            found = await self._find_lines(tenants, key.route, key.key)
        except DatabaseUnavailableError:
            if level > Durability.LOCAL:
                raise
            log.warning("idempotency_checked_on_this_node_only", key=key.key)
            return []
        chained = [proven(line, key) for line in found]
        for line, said in zip(chained, found, strict=True):
            if line.body_digest != said.body_digest:
                what = f"says another body than seq {line.seq}, which came with it"
                self._report(key_row_error(line.tenant_id, key.key, line.seq, what), "idempotency")
            self._check_body(key, line.body_digest)
        return chained

    async def look_again(self, request: KeyedRequest, lines: Iterable[tuple[str, int]], key: RequestKey) -> None:
        """Look the request up again if the chain is known to hold one of these lines, (tenant, number) each, for which
        no row was found. It was chained meanwhile, or the rows could not be read.

        Raises:
            KeyRowError: the row of a line is not in the table.
            DatabaseUnavailableError: the table cannot be read.
        """
        digests = [each for each in (key.body_digest, key.other_digest) if each is not None]
        found: set[tuple[str, int]] = set()
        for tenant_id, line in lines:
            said = [key_digest_of(tenant_id, key, line, digest) for digest in digests]
            try:
                seq = await self._entries.seq_of(tenant_id, said)
            except DatabaseUnavailableError as error:
                log.warning("idempotency_rows_not_compared", tenant_id=tenant_id, error=str(error))
                return
            if seq is None or (tenant_id, line) in found:
                continue
            # Another node may have chained this entry and its row since the rows were last read.
            request.chained = await self.find([name[0] for name in request.names], key)
            found = {(each.tenant_id, each.line) for each in request.chained}
            if (tenant_id, line) not in found:
                raise row_gone(tenant_id, key, seq)

    def _check_body(self, key: RequestKey, body_digest: bytes) -> None:
        if body_digest not in (key.body_digest, key.other_digest):
            raise IdempotencyReusedError(
                f"Idempotency-Key {key.key!r} was used before with another body; use a new key"
            )

    def _prune(self) -> None:
        """Forget requests that are in the table by now; those in flight if there may be many."""
        while self._unsettled and ((outcome := self._unsettled[-1].outcome) is None or outcome.done()):
            self._unsettled.pop()
        if not self._unsettled:
            self._recovered.clear()
        if len(self._in_flight) >= self._prune_at:
            self._in_flight = {name: each for name, each in self._in_flight.items() if not self._is_chained(each)}
            self._prune_at = max(IN_FLIGHT_MIN, 2 * len(self._in_flight))

    def _is_chained(self, request: KeyedRequest) -> bool:
        """Whether the request is in the table. Records of waiting tenants were passed over."""
        is_waiting = any(tenant_id in self._node.waiting for tenant_id, *_ in request.names)
        return request.pending is not None and request.pending.lsn <= self._node.chained.lsn and not is_waiting

    def _forget(self, request: KeyedRequest) -> None:
        for name in request.names:
            if self._in_flight.get(name) is request:
                del self._in_flight[name]
