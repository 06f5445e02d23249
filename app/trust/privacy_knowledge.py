"""The node's view of the ledger's private fields, followed from Postgres.

The node reads the revision in one row every ``REFRESH_S``, and reads more only when it has risen. So a change made on
another node takes effect here within ``REFRESH_S`` and one query while Postgres answers. While it does not, the
declarations last known stay in force and keys are dropped after ``app.trust.subject_keys.TRUSTED_S``.

A private field becomes public only by a declaration that is the last one in the tenant's chain::

    a declaration is not the last       fields that were private before stay private, until it is
    one in its chain
    a declaration is gone               the one known before stays in force
    the revision went back              everything is read again; if two declarations differ, both are in force
    rows are damaged, or older than     the tenant is in doubt: values that may be private are rejected
    their chain
    an entry is not as it was chained   the same, and no private value of the tenant is shown
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from time import monotonic

from app.runtime.logs import log
from app.runtime.tasks import repeat
from app.store import Connection
from app.store import privacy as store
from app.store.entry_check import EntryCheck, Report
from app.store.reading import Pool, reading
from app.trust.privacy_agreement import Unchained, agree, is_said_last
from app.trust.retention import FieldsAtFloor, RetentionReader
from app.trust.subject_keys import SubjectKeys
from ledger.errors import (
    ChainDamagedError,
    InvalidInputError,
    PrivacyDamagedError,
    PrivacyUnavailableError,
)
from ledger.private_fields import Declaration, declaration_of, private_in_either

REFRESH_S = 1.0
"""Pause between two reads of the revision."""
DOUBTS_S = 10.0
"""Pause between two tries to reconcile the tables with the chains, while tenants are in doubt."""
AGREEMENT_TIMEOUT_S = 300.0
"""Longest that one such reconciliation may take."""


class PrivacyKnowledge:
    """Declarations by tenant, and the keys. Belongs to one event loop."""

    def __init__(
        self,
        pool: Pool,
        keys: SubjectKeys,
        node_id: str = "",
        check: EntryCheck | None = None,
        report: Report = lambda error, met_by: None,
        retention: RetentionReader | None = None,
    ) -> None:
        """``retention`` tells what entries said that left with prunes. ``report`` is called with damaged entries while
        ``run`` runs."""
        self._pool = pool
        self.check = check or EntryCheck(lambda tenant_id: None)
        self._report = report
        self._retention = retention
        self._met: list[ChainDamagedError] = []
        """Damage that was not passed to ``report`` yet."""
        self._node_id = node_id
        self.keys = keys
        self.declarations: dict[str, Declaration] = {}
        """The declaration in force of every tenant that ever made one."""
        self._learned: dict[str, int] = {}
        """Revision of each declaration, so that a late answer does not restore an older one."""
        self._doubts: dict[str, str] = {}
        self._damaged: dict[str, str] = {}
        """Why a tenant is damaged: an entry about its private fields or erasures is not as it was chained."""
        self._logged: dict[str, str] = {}
        """The last logged doubt of each tenant."""
        self._unsaid: dict[str, store.DeclaredFields] = {}
        """Declarations of other nodes that are not yet the last one in a chain; until then, earlier private fields stay
        private."""
        self._new_doubts: set[str] = set()
        """Tenants that came into doubt since the last read of the chains."""
        self.revision = 0
        """The last change that was applied."""
        self._unchained = Unchained()
        self._agreed_s = 0.0
        self._turn = asyncio.Lock()

    @property
    def doubts(self) -> Mapping[str, str]:
        """Tenants whose declaration is uncertain, and why."""
        return {**self._doubts, **self._damaged}

    def may_show(self, tenant_id: str) -> bool:
        """Whether the keys that the tenant's chain destroyed are all known."""
        return tenant_id not in self._damaged

    def check_certain(self, tenant_id: str) -> None:
        """Return if the tenant's declaration is certain.

        Raises:
            PrivacyUnavailableError: it is not; values that may be private are rejected.
        """
        why = self._damaged.get(tenant_id) or self._doubts.get(tenant_id)
        if why is not None:
            raise PrivacyUnavailableError(
                f"it is not certain what tenant {tenant_id} declared private, so nothing that may be is taken: {why}"
            )

    async def start(self, unchained: Unchained) -> None:
        """Read what is in force before the first event is accepted, and reconcile the tables with the chains.

        Raises:
            DatabaseUnavailableError, or one of ``DATABASE_FAULTS``: Postgres does not say.
        """
        self._unchained = unchained
        await self._agree()
        try:
            await self.refresh()
        except PrivacyDamagedError as error:
            log.error("privacy_damaged", error=str(error))

    async def run(self) -> None:
        """Follow the ledger until cancelled, even if Postgres fails or holds damaged rows."""
        self._tell()
        async with asyncio.TaskGroup() as tasks:
            # Concurrent, because reading the chains may take minutes.
            for work in (self.refresh, self._settle_doubts):
                tasks.create_task(repeat(partial(self._telling, work), REFRESH_S, "privacy_not_refreshed"))

    async def _telling(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work``, and report the damage that it met."""
        try:
            await work()
        finally:
            self._tell()

    async def refresh(self) -> None:
        """Read and apply new changes.

        Raises:
            DatabaseUnavailableError, or one of ``DATABASE_FAULTS``: Postgres does not say. PrivacyDamagedError: the
            ledger's own row is damaged; this node uses no key.
        """
        async with self._turn, reading(self._pool) as connection:
            asked_s = monotonic()
            try:
                state = await store.read_state(connection)
            except PrivacyDamagedError as error:
                self.keys.lose(str(error))
                raise
            if state is None:
                return
            self.keys.use(state)
            if state.revision < self.revision:
                await self._read_again(connection)
            elif state.revision > self.revision:
                await self._read_new(connection)
            for declared in [*self._unsaid.values()]:
                is_newest = self._learned.get(declared.tenant_id) == declared.revision
                if is_newest and not await self._is_said_last(connection, declared):
                    continue
                del self._unsaid[declared.tenant_id]
                if is_newest:
                    self.declarations[declared.tenant_id] = declaration_of(declared.fields, declared.subject)
            self.revision = state.revision
            self.keys.trust(asked_s)

    async def _is_said_last(self, connection: Connection, declared: store.DeclaredFields) -> bool:
        try:
            floor = await self.at_floor(connection, declared.tenant_id)
            return await is_said_last(connection, self.check, declared, floor)
        except ChainDamagedError as error:
            self._take_damage([error])
            return False

    async def at_floor(self, connection: Connection, tenant_id: str) -> FieldsAtFloor:
        """What the entries of a tenant that left said about private fields.

        Raises:
            ChainDamagedError: the entry that carries it is not as it was chained.
        """
        return (
            FieldsAtFloor() if self._retention is None else await self._retention.private_fields(connection, tenant_id)
        )

    async def _declared_since(self, connection: Connection, revision: int) -> list[store.DeclaredFields]:
        """The declarations above ``revision``; a tenant whose row is damaged comes into doubt."""
        declared, faults = await store.declared_since(connection, revision)
        for fault in faults:
            self._doubt(fault.tenant_id, fault.reason)
        return declared

    async def _read_new(self, connection: Connection) -> None:
        for each in await self._declared_since(connection, self.revision):
            try:
                await store.check_noted(connection, each)
                known, learned = self.declarations.get(each.tenant_id), self._learned.get(each.tenant_id, 0)
                self.learn(each)
                if known is not None and learned < self._learned.get(each.tenant_id, 0):
                    self._keep_until_said(each, known)
            except PrivacyDamagedError as error:
                self._doubt(each.tenant_id, str(error))
        if (erased := await store.erased_since(connection, self.revision)) is None:
            self.keys.forget_all()
        for tenant_id, key_id, tag in erased or ():
            self.keys.forget(tenant_id, key_id, tag)

    async def _read_again(self, connection: Connection) -> None:
        """Postgres was replaced or edited: merge its rows with what is known."""
        log.error("privacy_went_back", known_revision=self.revision)
        for each in await self._declared_since(connection, 0):
            known = self.declarations.get(each.tenant_id)
            self._learned.pop(each.tenant_id, None)
            self.learn(each)
            if known is not None:
                self.declarations[each.tenant_id] = private_in_either(self.declarations[each.tenant_id], known)
        self.keys.forget_all()

    async def _settle_doubts(self) -> None:
        if self.doubts and monotonic() > self._agreed_s + DOUBTS_S:
            await self._agree()

    async def _agree(self) -> None:
        self._new_doubts.clear()
        try:
            async with reading(self._pool, timeout_s=AGREEMENT_TIMEOUT_S) as connection:
                agreed = await agree(connection, self.check, self.keys, self._node_id, self._unchained, self._retention)
        finally:
            self._agreed_s = monotonic()
        async with self._turn, reading(self._pool) as connection:
            declared = await self._declared_since(connection, 0)
            self._damaged.clear()
            self._take_damage(agreed.damaged)
            # The chains may have been read before these tenants came into doubt.
            self._doubts = {name: why for name, why in self._doubts.items() if name in self._new_doubts}
            for each in declared:
                self.learn(each)
                said = agreed.said_last.get(each.tenant_id)
                is_newest = self._learned.get(each.tenant_id) == each.revision
                if is_newest and said not in (None, self.declarations[each.tenant_id]):
                    self._keep_until_said(each, said)
            for tenant_id, reason in agreed.doubts.items():
                self._doubt(tenant_id, reason)

    def learn(self, declared: store.DeclaredFields) -> None:
        """Put a declaration into force on this node, unless a newer one is."""
        if (learned := self._learned.get(declared.tenant_id)) is not None and declared.revision <= learned:
            return
        try:
            self.declarations[declared.tenant_id] = declaration_of(declared.fields, declared.subject)
            self._learned[declared.tenant_id] = declared.revision
            self._doubts.pop(declared.tenant_id, None)
        except InvalidInputError as error:
            # The table was edited. The declaration known before stays in force.
            self._doubt(declared.tenant_id, f"its row in private_fields is not one that could be declared: {error}")

    def _keep_until_said(self, declared: store.DeclaredFields, before: Declaration) -> None:
        """Keep the fields of ``before`` private, too, until the chain has the new declaration: an attacker who edits
        only the tables makes no field public."""
        tenant_id = declared.tenant_id
        self.declarations[tenant_id] = private_in_either(self.declarations[tenant_id], before)
        self._unsaid[tenant_id] = declared

    def _take_damage(self, met: Sequence[ChainDamagedError]) -> None:
        for error in met:
            self._damaged[error.tenant_id] = error.reason
            self._log_doubt(error.tenant_id, error.reason)
            self._met.append(error)

    def _tell(self) -> None:
        met, self._met = self._met, []
        for error in met:
            self._report(error, "privacy")

    def _doubt(self, tenant_id: str, reason: str) -> None:
        self._log_doubt(tenant_id, reason)
        self._doubts[tenant_id] = reason
        self._new_doubts.add(tenant_id)

    def _log_doubt(self, tenant_id: str, reason: str) -> None:
        if self._logged.get(tenant_id) != reason:
            log.error("privacy_in_doubt", tenant_id=tenant_id, error=reason)
        self._logged[tenant_id] = reason
