"""What this node knows of the ledger's private fields, followed from Postgres.

One row is asked for its revision every ``REFRESH_S``; only when that has risen is anything else read. So a change made
on another node is honoured here within ``REFRESH_S`` and one query while Postgres answers. While it does not, the
declarations last known stay in force and keys are let go after ``app.privacy.keys.TRUSTED_S``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from app.privacy.keys import SubjectKeys
from app.store import privacy as store
from app.store.faults import DATABASE_FAULTS
from app.store.reading import reading
from ledger.errors import DatabaseUnavailableError, InvalidInputError
from ledger.private_fields import Declaration, declaration_of

if TYPE_CHECKING:
    from app.store.reading import Pool

REFRESH_S = 1.0
"""Pause between two looks at the revision."""

log = structlog.get_logger()


class PrivacyKnowledge:
    """Declarations by tenant, and the keys. Belongs to one event loop."""

    def __init__(self, pool: Pool, keys: SubjectKeys) -> None:
        self._pool = pool
        self.keys = keys
        self._declarations: dict[str, Declaration] = {}
        self._learned: dict[str, int] = {}
        """Revision of each declaration: an answer that was overtaken must not bring an older one back."""
        self._revision = 0

    @property
    def declarations(self) -> Mapping[str, Declaration]:
        """Every tenant that ever declared something, with what counts now."""
        return self._declarations

    async def run(self) -> None:
        """Follow the ledger until cancelled, whatever becomes of Postgres."""
        missed = False
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
                missed = False
            except (DatabaseUnavailableError, *DATABASE_FAULTS) as error:
                if not missed:
                    log.warning("privacy_not_refreshed", error=str(error))
                missed = True

    async def refresh(self) -> None:
        """Take in what is new.

        Raises:
            DatabaseUnavailableError, or one of ``DATABASE_FAULTS``: Postgres does not say.
        """
        asked_s = monotonic()
        async with reading(self._pool) as connection:
            state = await store.read_state(connection)
            if state is None:
                return
            self.keys.use(state)
            if state.revision > self._revision:
                for declared in await store.declared_since(connection, self._revision):
                    self.learn(declared)
                erased = await store.erased_since(connection, self._revision)
                if erased is None:
                    self.keys.forget_all()
                for tenant_id, key_id, tag in erased or ():
                    self.keys.forget(tenant_id, key_id, tag)
                self._revision = state.revision
        self.keys.trust(asked_s)

    def learn(self, declared: store.DeclaredFields) -> None:
        """From now on this counts on this node, unless something newer does."""
        if declared.revision <= self._learned.get(declared.tenant_id, 0):
            return
        try:
            self._declarations[declared.tenant_id] = declaration_of(declared.fields, declared.subject)
            self._learned[declared.tenant_id] = declared.revision
        except InvalidInputError as error:
            # Somebody edited the table. What was known before stays in force.
            log.error("declaration_malformed", tenant_id=declared.tenant_id, error=str(error))
