"""Entries about keys as a node writes them: with the word of a key that may change keys, where it has one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import structlog

from app.intake.system_entries import SystemEntries
from app.keys.in_use import KeyInUse
from app.store.reading import reading
from ledger.errors import SigningUnavailableError
from ledger.machines.events import SystemAction
from signing import key_statement
from signing.key_entries import SUBJECT_PREFIX
from signing.key_file import Signer
from signing.key_history import KeyHistory

if TYPE_CHECKING:
    import asyncpg

    from app.keys.key_chain import KeyChain

log = structlog.get_logger()


class KeyStatements:
    """Signs and writes them for one node."""

    def __init__(
        self,
        *,
        pool: asyncpg.Pool[asyncpg.Record],
        keys: KeyInUse,
        key_chain: KeyChain,
        system_entries: SystemEntries,
    ) -> None:
        self._pool = pool
        self._keys = keys
        self._key_chain = key_chain
        self._system_entries = system_entries

    async def history(self) -> KeyHistory:
        """What the chain says of keys now.

        Raises:
            DatabaseUnavailableError: Postgres cannot be reached.
        """
        async with reading(self._pool) as connection:
            return await self._key_chain.history(connection)

    async def stated(
        self, action: SystemAction, facts: dict[str, object], history: KeyHistory, signers: Sequence[Signer]
    ) -> dict[str, object]:
        """``facts`` with a statement by the first of ``signers`` that may change keys and answers; else as they are."""
        root_id, after = history.root_key_id, history.newest
        for signer in signers:
            if root_id is None or after is None or signer.key_id not in history.authorities:
                continue
            try:
                work = partial(key_statement.sign, action, facts, root_id, after, signer)
                return await self._keys.sign_with(signer, work)
            except SigningUnavailableError as error:
                log.warning("signing_delayed", error=str(error))
        return facts

    async def enter(self, action: SystemAction, facts: dict[str, object]) -> None:
        """Write the entry about a key and wait until it is chained.

        Raises: as ``SystemEntries.record``.
        """
        await self._system_entries.record(action, f"{SUBJECT_PREFIX}{facts['key_id']}", facts)
