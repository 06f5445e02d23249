"""Records of privileged acts, refusals and reads of payloads.

    ACT_ALLOWED      an entry of ``_system``, durable before an act that needs ``operate`` or ``admin`` begins
    ACCESS_REFUSED   an entry of ``_system`` for the refusals of an interval, equal ones counted together
    PAYLOADS_READ    an entry of the tenant's own chain, durable before the answer is given, if ``privacy.log_reads``
                     names the tenant

All of them are lines of the node's access log as well, and so are the reads of all other tenants. Text that a caller
chose is recorded in part only: a name only if it can be a tenant's, of a path its first characters. Without
authentication (``auth.mode`` is ``none``) there is no actor. Then only refusals, and reads of tenants that
``privacy.log_reads`` names, are recorded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from app.runtime.logs import log
from app.runtime.principals import covers
from app.trust.access_log import AccessLog
from app.write.intake.system_entries import SystemEntries, facts_of
from ledger import names, rfc3339
from ledger.chain.form import SUBJECT_BYTES_MAX
from ledger.errors import LedgerError
from ledger.facts.events import SYSTEM_TENANT, SystemAction

REFUSALS_LISTED_MAX: Final = 100
"""Kinds of refusal that one entry lists; all others are only counted."""
REFUSALS_WAIT_S: Final = 1.0
"""How long the first refusal waits for others to share its entry."""
REFUSALS_INTERVAL_S: Final = 60.0
"""Shortest time between two such entries: a client that is refused all the time must not fill the chain."""
PATH_CHARACTERS_MAX: Final = 512
"""Characters of a request's path that a line of the access log holds."""


class RecordedRequest(NamedTuple):
    """A request as it is recorded. ``actor`` is None without authentication, ``address`` is the client's."""

    actor: str | None
    route: str
    path: str
    address: str | None


class _Refusal(NamedTuple):
    actor: str | None
    route: str
    problem: str
    tenant_id: str | None


class AccessRecords:
    """Writes these records. Belongs to one event loop."""

    def __init__(
        self,
        entries: SystemEntries,
        access_log: AccessLog,
        log_reads: Sequence[str],
        now_ms: Callable[[], int],
    ) -> None:
        """``log_reads`` are patterns of the tenants whose reads are chained."""
        self._entries = entries
        self.log = access_log
        self._log_reads = log_reads
        self._now_ms = now_ms
        self._refusals: Counter[_Refusal] = Counter()
        self._others = 0
        self._from: str | None = None
        self._was_refused = asyncio.Event()

    async def act(self, request: RecordedRequest, right: str, tenant_id: str | None) -> None:
        """Record that the actor may do this now; durable when this returns.

        Raises:
            ChainDamagedError: the chain of ``_system`` takes no entry, so the act MUST NOT begin.
            WalFullError, WalPoisonedError, FencedError, DatabaseWentBackError, DurabilityTimeoutError: as
                ``SystemEntries.note``.
        """
        if request.actor is None:
            return
        facts = facts_of(actor=request.actor, right=right, route=request.route, path=request.path, tenant_id=tenant_id)
        self._add("act", request, tenant_id or SYSTEM_TENANT, {"right": right})
        await self._entries.note(SystemAction.ACT_ALLOWED, _subject("act", request.actor), facts)

    async def read(self, request: RecordedRequest, tenant_id: str, what: dict[str, object]) -> None:
        """Record that payloads of the tenant are read. If ``log_reads`` names it, the entry is durable on return.

        Raises:
            ChainDamagedError: the tenant's chain takes no entry, so the payloads MUST NOT be returned.
            QuotaExceededError: the entry would create the tenant, and the caller may create no more now.
            WalFullError, WalPoisonedError, FencedError, DatabaseWentBackError, DurabilityTimeoutError: as
                ``SystemEntries.note``.
        """
        if request.actor is not None:
            self._add("read", request, tenant_id, what)
        if any(covers(pattern, tenant_id) for pattern in self._log_reads):
            facts = facts_of(route=request.route, **what, actor=request.actor)
            if tenant_id not in self._entries.tenants:
                self._entries.charge_new(request.actor, 1)
            await self._entries.note(
                SystemAction.PAYLOADS_READ, _subject("read", request.actor or "nobody"), facts, tenant_id
            )

    def refused(self, request: RecordedRequest, problem: str, tenant_id: str | None) -> None:
        """Record a refusal, later and together with others; a text that cannot be a tenant's name is left out."""
        # The refused client chose the text. One that no entry can hold would keep out all other refusals.
        if tenant_id is not None and not names.is_readable_tenant(tenant_id):
            tenant_id = None
        self._add("refusal", request, tenant_id or SYSTEM_TENANT, {"problem": problem})
        refusal = _Refusal(request.actor, request.route, problem, tenant_id)
        self._from = self._from or rfc3339.text_of(self._now_ms())
        if refusal in self._refusals or len(self._refusals) < REFUSALS_LISTED_MAX:
            self._refusals[refusal] += 1
        else:
            self._others += 1
        self._was_refused.set()

    async def run(self) -> None:
        """Chain the refusals, until cancelled."""
        while True:
            await self._was_refused.wait()
            await asyncio.sleep(REFUSALS_WAIT_S)
            try:
                await self._note_refusals()
            except LedgerError as error:
                log.warning("refusals_not_recorded", error=str(error))
            await asyncio.sleep(REFUSALS_INTERVAL_S)

    async def _note_refusals(self) -> None:
        refusals, others, first = self._refusals, self._others, self._from
        listed = [facts_of(**refusal._asdict(), count=count) for refusal, count in refusals.items()]
        facts = facts_of(**{"from": first}, to=rfc3339.text_of(self._now_ms()), refusals=listed, others=others or None)
        self._refusals, self._others, self._from = Counter(), 0, None
        self._was_refused.clear()
        try:
            await self._entries.note(SystemAction.ACCESS_REFUSED, "refusals", facts)
        except LedgerError:
            # Nothing is lost: these refusals are counted with the next ones.
            self._refusals.update(refusals)
            self._others, self._from = self._others + others, first
            self._was_refused.set()
            raise

    def _add(self, kind: str, request: RecordedRequest, tenant_id: str, what: dict[str, object]) -> None:
        self.log.add(
            {
                "at": rfc3339.text_of(self._now_ms()),
                "kind": kind,
                "tenant_id": tenant_id,
                **request._asdict(),
                "path": request.path[:PATH_CHARACTERS_MAX],
                "what": what,
            }
        )


def _subject(kind: str, actor: str) -> str:
    """The entry's subject, in place of a job id: names from issuers and certificates that are too long are cut.

    ``actor`` in the payload is whole."""
    return f"{kind}:{actor}".encode()[:SUBJECT_BYTES_MAX].decode(errors="ignore")
