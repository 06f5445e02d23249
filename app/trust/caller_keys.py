"""Registers and revokes keys of callers, and says which events they must sign, by entries of ``_system``.

The chain is the authority (``signing.callers``): each node reads it at its start and once a second. While it is
damaged, what was known last stays. A node demands a signature once it has read that it is required, and verifiers only
``REQUIRED_AFTER_MS`` later: until then a node that has not read it takes events that nobody signed. A node takes them
unsigned again only at HLCs at which no verifier demands a signature.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter

from app.runtime.logs import log
from app.runtime.principals import Principal
from app.runtime.tasks import repeat
from app.trust.key_changes import FOLLOW_INTERVAL_S, KeyChanges
from ledger.errors import InvalidInputError, KeyConflictError, NotFoundError
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc
from signing.callers import CALLER_PREFIX, RegisteredCaller, RequiredSignatures, RevokedCaller
from signing.keys import Caller, KnownCallers, PublicKey, Requirement

REQUIRED_AFTER_MS = 60_000
REVOKED_AFTER_MS = 2_000
"""How long after a revocation that names no time the key counts, so that every node has read it by then."""


@dataclass(kw_only=True, eq=False)
class CallerKeys:
    """The callers of one node's ledger. Belongs to one event loop."""

    keys: KeyChanges
    known: KnownCallers = field(default_factory=KnownCallers)
    required: dict[str, list[Requirement]] = field(default_factory=dict)
    """By tenant, ascending."""

    async def refresh(self) -> None:
        """Take over what the chain now says.

        Raises:
            DatabaseUnavailableError: PostgreSQL cannot be reached.
        """
        history = await self.keys.history()
        if self.keys.chain.fault is None and history.callers != self.known:
            self.known = history.callers
            self.required = {}
            for each in self.known.required:
                self.required.setdefault(each.tenant_id, []).append(each)

    async def run(self) -> None:
        """Follow the chain until cancelled."""
        await repeat(self.refresh, FOLLOW_INTERVAL_S, "callers_not_followed")

    async def register(self, name: str, tenants: Sequence[str], public_key_pem: str, by: Principal) -> Caller:
        """Let a key sign events of these tenants as the caller of this name.

        Raises:
            InvalidInputError: it is no public key, or one of another algorithm.
            KeyConflictError: it is registered already, or signs for this ledger; and as ``_enter``.
            NotReadyError, DatabaseUnavailableError, DurabilityTimeoutError, ChainDamagedError: as ``_enter``.
        """
        try:
            key = PublicKey.of(public_key_pem)
        except InvalidInputError as error:
            raise InvalidInputError(f"public_key_pem: {error}", ("public_key_pem",)) from None
        await self.refresh()
        history = await self.keys.history()
        if key.key_id in self.known.by_key:
            caller = self.known.by_key[key.key_id]
            raise KeyConflictError(f"key {key.key_id} is registered as that of {caller.name}; a caller needs its own")
        if key.key_id in history.admitted or key.key_id in history.waiting:
            raise KeyConflictError(f"key {key.key_id} is one of this ledger's own: a caller needs another")
        caller = Caller(key, name, tuple(tenants))
        change = RegisteredCaller(_new_id(), caller, by.id)
        await self._enter(SystemAction.CALLER_REGISTERED, key.key_id, change.facts())
        log.info("caller_registered", name=name, key_id=key.key_id, by=by.id)
        return self.known.by_key.get(key.key_id, caller)

    async def revoke(self, key_id: str, from_hlc: str | None, reason: str, by: Principal) -> Caller:
        """Let no event count that the key signed from an HLC on, in two seconds if none is given.

        Raises:
            NotFoundError: the key is of no caller.
            KeyConflictError, NotReadyError, DatabaseUnavailableError, DurabilityTimeoutError, ChainDamagedError: as
                ``_enter``.
        """
        await self.refresh()
        if key_id not in self.known.by_key:
            raise NotFoundError(f"key {key_id} is of no caller of this ledger")
        ends = self._from_now(REVOKED_AFTER_MS) if from_hlc is None else Hlc.parse(from_hlc).text()
        change = RevokedCaller(_new_id(), key_id, ends, reason, by.id)
        await self._enter(SystemAction.CALLER_REVOKED, key_id, change.facts())
        log.warning("caller_revoked", key_id=key_id, from_hlc=ends, reason=reason, by=by.id)
        return self.known.by_key[key_id]

    def required_of(self, tenant_id: str) -> dict[str, Hlc | None]:
        """The types of event that callers must sign now, or at any later HLC that is known; each with the HLC from
        which it need not be signed, if there is one."""
        if (listed := self.required.get(tenant_id)) is None:
            return {}
        node, found = self.keys.node, dict[str, Hlc | None]()
        now = max(node.clock.last, Hlc(node.wall.now_ms(), 0, node.node_id))
        applying = max(0, bisect_right(listed, now, key=attrgetter("from_hlc")) - 1)
        for each, ends in zip_longest(listed[applying:], (later.from_hlc for later in listed[applying + 1 :])):
            found |= dict.fromkeys(each.types, ends)
        return found

    async def require(self, tenant_id: str, types: Sequence[str], by: Principal) -> None:
        """Have callers sign events of these types, and no others: in ``REQUIRED_AFTER_MS``, or at once if they had to
        sign all of these before.

        Raises:
            KeyConflictError, NotReadyError, DatabaseUnavailableError, DurabilityTimeoutError, ChainDamagedError: as
                ``_enter``.
        """
        await self.refresh()
        before = self.required[tenant_id][-1].types if tenant_id in self.required else ()
        after_ms = 0 if set(types) <= set(before) else REQUIRED_AFTER_MS
        change = RequiredSignatures(_new_id(), tenant_id, sorted(set(types)), self._from_now(after_ms), by.id)
        await self._enter(SystemAction.SIGNATURES_REQUIRED, tenant_id, change.facts())
        log.info("signatures_required", tenant_id=tenant_id, types=change.types, by=by.id)

    def _from_now(self, after_ms: int) -> str:
        node = self.keys.node
        return Hlc(max(node.wall.now_ms(), node.clock.last.physical_ms) + after_ms, 0, node.node_id).text()

    async def _enter(self, action: SystemAction, subject: str, facts: dict[str, object]) -> None:
        """Write an entry, as ``KeyChanges.enter_vouched``, and follow it."""
        await self.keys.enter_vouched(action, f"{CALLER_PREFIX}{subject}", facts)
        await self.refresh()


def _new_id() -> str:
    return secrets.token_hex(8)
