"""Admitting and revoking keys of a ledger: entries of ``_system`` that somebody whose key was admitted vouches for.

That is a key which this node signs with, or one that is kept elsewhere, such as an offline root: its statement is then
made by whoever has it, and brought here to be recorded. It is judged before anything is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from app.keys.in_use import KeyInUse
from app.keys.statements import KeyStatements
from app.node.state import Node
from app.store import keys as store
from app.store.faults import DATABASE_FAULTS
from app.store.reading import reading
from ledger.errors import (
    ClockSkewError,
    DatabaseUnavailableError,
    DurabilityTimeoutError,
    InvalidInputError,
    KeyConflictError,
    NotFoundError,
)
from ledger.hlc import Hlc
from ledger.machines.events import SystemAction
from signing import key_statement
from signing.key_history import KeyHistory, revoked_facts

if TYPE_CHECKING:
    import asyncpg

RETRY_PAUSE_S = 1.0
"""Pause before Postgres is asked again to publish what the chain says already."""

log = structlog.get_logger()


class KeyAuthority:
    """Changes which keys count in the ledger of one node."""

    def __init__(
        self,
        *,
        node: Node,
        pool: asyncpg.Pool[asyncpg.Record],
        keys: KeyInUse,
        statements: KeyStatements,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        write_timeout_s: float,
    ) -> None:
        self._node = node
        self._pool = pool
        self._keys = keys
        self._statements = statements
        self._spawn = spawn
        self._wait_s = write_timeout_s

    async def admit(self, key_id: str, statement: Mapping[str, object] | None) -> None:
        """Let a key count that an entry introduced, with the word of this node's key or with a ``statement``.

        Raises:
            NotFoundError: no entry introduces such a key.
            KeyConflictError: it is admitted already, or no key of this node may admit it.
            InvalidInputError: the statement is not one about this key, in this ledger, by a key that may admit it.
            DatabaseUnavailableError: Postgres cannot be reached; nothing has changed.
            DurabilityTimeoutError: it is in this node's log, and will count once Postgres answers.
        """
        history = await self._statements.history()
        if key_id in history.admitted:
            raise KeyConflictError(f"key {key_id} is admitted already")
        if key_id not in history.waiting:
            raise NotFoundError(f"no entry of _system introduces key {key_id}; start the node that signs with it first")
        facts = await self._vouched(SystemAction.KEY_ADMITTED, history.waiting[key_id].facts, history, statement)
        late = f"key {key_id} will be admitted once Postgres answers"
        await self._within(self._statements.enter(SystemAction.KEY_ADMITTED, facts), late)
        log.info("key_admitted", key_id=key_id)

    async def revoke(
        self, key_id: str, from_hlc: Hlc | None, reason: str | None, statement: Mapping[str, object] | None
    ) -> Hlc:
        """Let nothing count that the key signed for ``from_hlc`` or later, from now on when none is given.

        Returns:
            From which HLC on it is revoked.

        Raises:
            NotFoundError: the ledger has no such key.
            KeyConflictError: this node signs with it and no statement is given, it is revoked from there on, or
                earlier, already, or no key of this node may revoke.
            InvalidInputError: the statement is not one about this revocation by a key that may revoke.
            ClockSkewError: ``from_hlc`` lies ahead.
            DatabaseUnavailableError: Postgres cannot be reached; nothing has changed.
            DurabilityTimeoutError: it is in this node's log, and will count once Postgres answers.
        """
        history = await self._statements.history()
        key = history.keys().get(key_id) or (history.waiting[key_id].key if key_id in history.waiting else None)
        now_ms = self._node.wall.now_ms()
        if key is None:
            raise NotFoundError(f"there is no key {key_id} in this ledger")
        if statement is None and key_id in {own.key_id for own in self._keys.own()}:
            raise KeyConflictError(f"this node signs with key {key_id}; rotate it first, then revoke it")
        if from_hlc is not None and from_hlc.physical_ms > now_ms + self._node.clock.max_clock_skew_ms:
            raise ClockSkewError(f"from_hlc {from_hlc} lies ahead; a key is revoked from now on or from earlier")
        start = from_hlc or self._node.clock.tick(now_ms)
        if key.revoked_from_hlc is not None and key.revoked_from_hlc <= start:
            raise KeyConflictError(f"key {key_id} is revoked from HLC {key.revoked_from_hlc} on already")
        facts = revoked_facts(key_id, self._node.node_id, start, reason)
        facts = await self._vouched(SystemAction.KEY_REVOKED, facts, history, statement)
        late = f"key {key_id} will be revoked from HLC {start} on once Postgres answers"
        await self._within(self._record_revocation(key_id, start, reason, facts), late)
        return start

    async def _vouched(
        self,
        action: SystemAction,
        facts: dict[str, object],
        history: KeyHistory,
        statement: Mapping[str, object] | None,
    ) -> dict[str, object]:
        """``facts`` with the word of a key that may change keys."""
        if statement is None:
            vouched = await self._statements.stated(action, facts, history, self._keys.node_keys.signers())
            if key_statement.FIELD not in vouched:
                why = self._keys.not_admitted or self._keys.fault or "they have ended or were revoked"
                raise KeyConflictError(
                    f"no key that this node signs with may vouch for this: {why}. Ask another node, or use --root-key"
                )
            return vouched
        vouched = {**facts, key_statement.FIELD: statement}
        if not history.would_count(action, vouched):
            raise InvalidInputError(
                "statement: it is not one about this key, in this ledger, by a key that may change keys now",
                ("statement",),
            )
        return vouched

    async def _within(self, work: Coroutine[Any, Any, None], late: str) -> None:
        """Wait for ``work`` as long as a write may; it goes on after that."""
        working = asyncio.ensure_future(work)
        done, _ = await asyncio.wait((working,), timeout=self._wait_s)
        if not done:
            self._spawn(_joined(working))
            raise DurabilityTimeoutError(late)
        working.result()

    async def _record_revocation(self, key_id: str, start: Hlc, reason: str | None, facts: dict[str, object]) -> None:
        await self._statements.enter(SystemAction.KEY_REVOKED, facts)
        log.warning("key_revoked", key_id=key_id, from_hlc=start.text())
        while True:
            try:
                async with reading(self._pool) as connection:
                    return await store.revoke(connection, key_id, start.text(), reason)
            except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
                log.warning("key_change_delayed", error=str(error))
            await asyncio.sleep(RETRY_PAUSE_S)


async def _joined(work: asyncio.Future[None]) -> None:
    await work
