"""From a signed statement of SCITT to its entry in a tenant's chain (docs/scitt.md).

One registration, in order::

    1. the statement is parsed; its key is one that the tenant registered for a caller, for this algorithm
    2. the signature is checked, in a thread
    3. an entry with the statement's id is its registration, whichever node made it, and an imported one if it holds
       the statement; one that left is refused
    4. an entry is queued under the id as its key, so of several at once one is chained
    5. the answer waits until the entry is chained

A caller MUST NOT assume after DurabilityTimeoutError that nothing was registered. The same statement again finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from app.store import chain_reads
from app.store.reading import Pool, reading
from app.trust.retention import RetentionReader
from app.write.intake.caller_signatures import STATEMENT_ROUTE, CallerSignatures
from app.write.intake.system_entries import SystemEntries, facts_of
from app.write.pending.linking import DuplicateLineError
from ledger import canonical, keyed
from ledger.chain.record import IdempotencyKey
from ledger.errors import InvalidInputError, NotFoundError, ProblemError
from ledger.facts.events import ACTOR, SystemAction
from ledger.facts.problems import STATEMENT_REJECTED
from signing import cose
from signing.cose import SUBJECT_PREFIX, SignedStatement, read_statement

_ACTION = SystemAction.STATEMENT_REGISTERED

_ENTRIES_MAX = 8
"""Most entries with the id of one statement that are read. Another ledger may have made what is imported, of any
statement: behind more of those, one that holds this is not found, and the statement is registered again."""


class Registered(NamedTuple):
    """Where a statement is registered."""

    statement_id: str
    seq: int


@dataclass(kw_only=True, eq=False)
class Statements:
    """Registers signed statements, and finds them. Belongs to one event loop."""

    system: SystemEntries
    signatures: CallerSignatures
    pool: Pool
    retention: RetentionReader

    async def register(self, tenant_id: str, data: bytes, actor: str | None) -> Registered:
        """Register the signed statement in ``data``; its entry is chained on return.

        Raises:
            ProblemError: it is none, or no caller of the tenant signed it.
            ArchivedError: it was registered, and its entry has left with a prune.
            LedgerError: as ``SystemEntries.chain_about``.
        """
        try:
            statement = read_statement(data)
            await self._check(tenant_id, statement)
        except InvalidInputError as error:
            raise ProblemError(STATEMENT_REJECTED, str(error)) from None
        try:
            return await self.find(tenant_id, statement.id)
        except NotFoundError:
            pass
        try:
            return Registered(statement.id, await self._enter(tenant_id, statement, actor))
        except DuplicateLineError:
            return await self.find(tenant_id, statement.id)

    async def find(self, tenant_id: str, statement_id: str) -> Registered:
        """Where the statement is registered.

        Raises:
            NotFoundError: it is not.
            ArchivedError: its entry has left with a prune.
        """
        subject = f"{SUBJECT_PREFIX}{statement_id}"
        async with reading(self.pool) as connection:
            entries = await chain_reads.entries_of_action(connection, tenant_id, subject, _ACTION, _ENTRIES_MAX)
            seqs = (seq for seq, payload in entries if payload is None or cose.registers(payload, statement_id))
            if (seq := next(seqs, None)) is None:
                await self.retention.refuse_departed(connection, [(tenant_id, subject)])
                raise NotFoundError(f"tenant {tenant_id} has registered no statement {statement_id}")
        return Registered(statement_id, seq)

    async def _check(self, tenant_id: str, statement: SignedStatement) -> None:
        caller = self.signatures.caller_of(statement.key_id, (tenant_id,))
        if caller.key.algorithm != statement.algorithm:
            raise InvalidInputError(f"key {statement.key_id} is {caller.key.algorithm}, not {statement.algorithm}")
        if not await self.signatures.made(caller.key, statement.signature, statement.message):
            raise InvalidInputError(f"caller {caller.name} did not sign this with key {statement.key_id}")

    async def _enter(self, tenant_id: str, statement: SignedStatement, actor: str | None) -> int:
        """Chain the entry, and return its seq."""
        key = IdempotencyKey(STATEMENT_ROUTE, statement.id, 0, bytes.fromhex(statement.id))
        facts = facts_of(type=_ACTION.value, **cose.facts_of(statement), **{ACTOR: actor})
        payload = canonical.encode({**facts, keyed.MEMBER: keyed.key_digest(tenant_id, key)})
        subject = f"{SUBJECT_PREFIX}{statement.id}"
        _, place = await self.system.chain_about(_ACTION, subject, payload, tenant_id, actor, key)
        return place.seq
