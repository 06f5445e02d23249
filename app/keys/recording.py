"""What the chain of ``_system`` must say of a node's keys, written until it says it; and the rows that follow it.

At start, and for as long as the node runs::

    1. the keys that the node signs with are published, before anything is signed with them
    2. once all that an earlier process left is chained: the chain names them, and what took whose place
    3. once a second: whether they are admitted, and whether the rows say what the chain says

Every entry carries a statement by a key that was admitted before (signing.key_statement): a rotation by the key that
gives way, the rest by one that this node signs with. A key that nothing vouches for is recorded all the same; the node
signs nothing then, until somebody has admitted it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog
from msgspec import structs

from app.config import Settings
from app.keys.in_use import KeyInUse
from app.keys.node_keys import Retired, last_signed_ms, offline_root, retired_signer
from app.keys.trust import KeyChain
from app.node.state import Node
from app.store import Connection
from app.store import keys as store
from app.store.faults import DATABASE_FAULTS
from app.store.reading import Pool, reading
from ledger.errors import DatabaseUnavailableError, SigningUnavailableError, WalFullError
from ledger.hlc import Hlc
from ledger.machines.events import SystemAction
from signing import key_statement
from signing.key_history import SUBJECT_PREFIX, KeyHistory, added_facts, root_facts, rotated_facts
from signing.keys import PublicKey, Signer

FOLLOW_INTERVAL_S = 1.0
"""How often a node looks whether its keys count, and whether the rows say what the chain says."""
RETRY_PAUSE_S = 1.0
"""Pause before Postgres is asked again for what a change still needs."""

TRY_AGAIN = (DatabaseUnavailableError, WalFullError, *DATABASE_FAULTS)

Facts = dict[str, object]
WriteEntry = Callable[[SystemAction, str, Facts], Awaitable[object]]
"""Writes an entry of ``_system`` about a subject, and waits until it is chained."""

log = structlog.get_logger()


async def publish_at_start(connection: Connection, node: Node, chain: KeyChain, oldest_ms: int | None) -> None:
    """Publish the node's keys, valid for whatever they may have to sign: what it will write, what the WAL holds beyond
    the chain, from the HLC time ``oldest_ms`` on, and what no snapshot covers yet. Keys whose place they took end here,
    however far an earlier process came with that.

    A row that is gone, or holds another key, is put back, for all that the key may have signed.
    """
    keys = chain.keys
    now_ms = time.time_ns() // 1_000_000
    # A wall clock that is set back after this must not lead to HLCs from before the keys count.
    node.clock.observe(Hlc(now_ms, 0, node.node_id))
    oldest_ms = now_ms if oldest_ms is None else min(now_ms, oldest_ms)
    history = await chain.history(connection)
    for signer in keys.signers():
        is_known = signer.key_id in history.admitted or signer.key_id in history.waiting
        key = signer.public_key
        if not await store.publish(connection, key, node.node_id, oldest_ms, is_known=is_known) and is_known:
            log.error("own_key_was_removed", key_id=key.key_id, done="published again")
    signed_ms = await store.highest_signed_ms(connection) if keys.retired else 0
    end_ms = last_signed_ms(node.clock, now_ms, signed_ms)
    keys.retired = [
        item if item.not_after_ms is not None else structs.replace(item, not_after_ms=end_ms) for item in keys.retired
    ]
    await asyncio.to_thread(keys.store)
    for item in keys.retired:
        node.clock.observe(Hlc((item.not_after_ms or 0) + 1, 0, node.node_id))
    await store.name_in_use(connection, node.node_id, keys.signer.key_id, keys.log_signer.key_id)


@dataclass(kw_only=True, eq=False)
class KeyRecords:
    """Keeps chain, rows and admission of one node's keys together."""

    settings: Settings
    node: Node
    pool: Pool
    keys: KeyInUse
    chain: KeyChain
    write_entry: WriteEntry
    sign_checkpoints_again: Callable[[], Awaitable[None]]

    def __post_init__(self) -> None:
        self._read_pin = self.settings.signing.read_pin
        self._offline_root = offline_root(self.settings)
        self._held = self.chain.keys
        self.recorded = asyncio.Event()
        """Set once the chain names the keys that the node started with."""
        self._rows_say: KeyHistory | None = None
        """What the rows say since they were written last."""

    async def record_start(self) -> None:
        """Bring chain and rows up to the keys that the node signs with, trying until Postgres answers.

        It MUST be called once all that an earlier process left in the WAL is chained.
        """
        await self.until_stored(self.record)
        await self.follow_up()
        self.recorded.set()

    async def follow_admission(self) -> None:
        """Let the node sign as long as its keys count, and ask for their admission while they do not; let the rows say
        what the chain says; for ever, once the start is recorded."""
        await self.recorded.wait()
        while True:
            with suppress(DatabaseUnavailableError):
                history = await self.history()
                if self.chain.fault is None or self.chain.is_of_another_root:
                    await self._follow(history)
            await asyncio.sleep(FOLLOW_INTERVAL_S)

    def judge(self, history: KeyHistory) -> None:
        """Let the node sign, or not, as ``history`` says."""
        self.keys.not_admitted = self.chain.admission_fault(history)

    async def _follow(self, history: KeyHistory) -> None:
        before = self.keys.not_admitted
        self.judge(history)
        if self.keys.not_admitted is None and before is not None:
            log.info("keys_admitted", key_ids=[key.key_id for key in self.keys.own()])
            await self.until_stored(self.sign_checkpoints_again)
        elif self.keys.not_admitted != before:
            log.warning("keys_not_admitted", error=self.keys.not_admitted)
        if history is not self._rows_say:
            await self._write_rows()

    async def _write_rows(self) -> None:
        async with reading(self.pool) as connection, connection.transaction():
            history = await self.chain.history(connection)
            if self.chain.fault is None:
                published = await self.chain.published(connection)
                await store.write_rows(connection, [(each.key, each.revocation_reason) for each in published.admitted])
            keys = self._held
            await store.name_in_use(connection, self.node.node_id, keys.signer.key_id, keys.log_signer.key_id)
        self._rows_say = history

    async def record(self) -> None:
        """Chain what ``_system`` does not say yet of the node's keys."""
        keys, history = self._held, await self.history()
        # 1. The key that the ledger begins with.
        if history.root_key_id is None and keys.root_key_id in (None, keys.signer.key_id):
            await self.enter(SystemAction.KEY_ADDED, root_facts(keys.signer.public_key, self.node.node_id))
        elif history.root_key_id is None and self._offline_root is not None:
            await self.enter(SystemAction.KEY_ADDED, root_facts(self._offline_root, None))
        history = await self.history()
        # 2. Keys that took the place of others.
        for number, item in enumerate(keys.retired):
            if (item.successor_id, item.key_id) not in history.replaced:
                if item.statement is None:
                    old = await asyncio.to_thread(retired_signer, item, keys, self._read_pin)
                    item = await self.vouched(item, history, [*([old] if old else []), *keys.signers()])
                    keys.retired[number] = item
                    await asyncio.to_thread(keys.store)
                await self.enter(SystemAction.KEY_ROTATED, self._facts_of(item))
        # 3. Keys that are new. Where the key that the ledger began with is gone, there is nothing to add one to.
        history = await self.history()
        if history.root_key_id is None:
            log.error("keys_not_recorded", root_key_id=keys.root_key_id, fault=self.chain.fault)
            return
        introduced = history.admitted.keys() | history.waiting.keys() | {item.successor_id for item in keys.retired}
        for signer in keys.signers():
            if signer.key_id not in introduced:
                facts = added_facts(signer.public_key, self.node.node_id)
                facts = await self.stated(SystemAction.KEY_ADDED, facts, history, keys.signers())
                await self.enter(SystemAction.KEY_ADDED, facts)
        # 4. A chain without statements takes no change without one any more.
        root = next((signer for signer in keys.signers() if signer.key_id == history.root_key_id), None)
        if history.is_old_form and root is not None:
            facts = added_facts(root.public_key, self.node.node_id)
            facts = await self.stated(SystemAction.KEY_ADMITTED, facts, history, (root,))
            if key_statement.FIELD in facts:
                await self.enter(SystemAction.KEY_ADMITTED, facts)

    async def follow_up(self) -> None:
        """Once the chain says it: rows, the node's file, checkpoints by the new key."""
        keys, retired = self._held, self._held.retired
        await self.until_stored(self._write_rows)
        if retired:
            keys.retired = [item for item in keys.retired if item not in retired]
            await asyncio.to_thread(keys.store)
            await self.until_stored(self.sign_checkpoints_again)

    async def until_stored(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work``, trying until Postgres takes it."""
        while True:
            try:
                return await work()
            except TRY_AGAIN as error:
                log.warning("key_change_delayed", error=str(error))
            await asyncio.sleep(RETRY_PAUSE_S)

    # --- entries and who vouches for them ---------------------------------------------------------

    async def history(self) -> KeyHistory:
        """What the chain says of keys now.

        Raises:
            DatabaseUnavailableError: Postgres cannot be reached.
        """
        async with reading(self.pool) as connection:
            return await self.chain.history(connection)

    def _facts_of(self, item: Retired) -> Facts:
        """What the chain is to say of a rotation."""
        facts = rotated_facts(PublicKey.of(item.successor_pem), self.node.node_id, item.key_id, item.not_after_ms or 0)
        return facts if item.statement is None else {**facts, key_statement.FIELD: item.statement}

    async def vouched(self, item: Retired, history: KeyHistory, signers: Sequence[Signer]) -> Retired:
        """``item`` with the word of a key that may give it, if there is one."""
        stated = await self.stated(SystemAction.KEY_ROTATED, self._facts_of(item), history, signers)
        statement = stated.get(key_statement.FIELD)
        return structs.replace(item, statement=statement if isinstance(statement, dict) else None)

    async def stated(self, action: SystemAction, facts: Facts, history: KeyHistory, signers: Sequence[Signer]) -> Facts:
        """``facts`` with a statement by the first of ``signers`` that may change keys and answers; else as they are."""
        root_id, after = history.root_key_id, history.newest
        for signer in signers:
            if root_id is None or after is None or signer.key_id not in history.authorities:
                continue
            try:
                work = partial(key_statement.sign, action, facts, root_id, after, signer)
                return await self.keys.sign_with(signer, work)
            except SigningUnavailableError as error:
                log.warning("signing_delayed", error=str(error))
        return facts

    async def enter(self, action: SystemAction, facts: Facts) -> None:
        """Write the entry about a key and wait until it is chained.

        Raises: as ``SystemEntries.record``.
        """
        await self.write_entry(action, f"{SUBJECT_PREFIX}{facts['key_id']}", facts)
        log.info("key_entry_chained", action=action.value, key_id=facts["key_id"])
