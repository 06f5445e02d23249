"""Rotating keys, and recording those that a node starts with.

What the chain of ``_system`` says of a key is what counts; its row follows.

A rotation, each step durable before the next::

    1. the new key exists, in its file or where its URI says
    2. its row is published
    3. nobody signs: the end of the old key is chosen, at or after all it signed, and the clock goes past it;
       the node's file of keys names the new key, and the old one as retired
    4. KEY_ROTATED is queued in the WAL, and chained
    5. the new key signs; the row of the old one ends, and the file forgets it

A process that dies before the third step is done has changed nothing. One that dies later signs with the new key when
it starts, and does what is missing. While Postgres is away a rotation waits before the fourth step for as long as a
write may, then the new key signs, and the rest follows by itself.

Rows that an earlier process left behind are mended at start.

Every change carries a statement by a key that was admitted before (signing.key_statement): a rotation by the key that
gives way, the rest by one that this node signs with. A key that nothing vouches for is recorded all the same; the node
signs nothing then, and looks once a second whether somebody has admitted it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog

from app.chain.notary import Notary
from app.config import Settings
from app.keys.admission import admission_fault
from app.keys.in_use import KeyInUse
from app.keys.named_keys import open_named
from app.keys.node_keys import (
    LocalOrRemote,
    NodeKeys,
    Retired,
    last_signed_ms,
    log_key_beside,
    new_key_path,
    retired_signer,
)
from app.keys.published_keys import PublishedKeys, published_keys
from app.keys.root_key import offline_root
from app.keys.statements import KeyStatements
from app.node.state import Node
from app.store import keys as store
from app.store.faults import DATABASE_FAULTS
from app.store.reading import reading
from ledger.errors import (
    ChainDamagedError,
    DatabaseUnavailableError,
    DurabilityTimeoutError,
    EventRefusedError,
    InvalidInputError,
    KeyConflictError,
    NotReadyError,
    WalFullError,
)
from ledger.hlc import Hlc
from ledger.machines.events import SystemAction
from signing import key_file, key_statement, remote_signer
from signing.key_file import FileSigner, Signer
from signing.key_history import KeyHistory, added_facts, root_facts, rotated_facts, time_of
from signing.public_key import ED25519, PublicKey

if TYPE_CHECKING:
    import asyncpg

    from app.keys.key_chain import KeyChain

ADMISSION_INTERVAL_S = 1.0
"""How often a node looks whether its keys count."""
RETRY_PAUSE_S = 1.0
"""Pause before Postgres is asked again to publish what the chain says already."""

_TRY_AGAIN = (DatabaseUnavailableError, WalFullError, *DATABASE_FAULTS)

log = structlog.get_logger()


class KeyChanges:
    """Changes the keys of one node. One change at a time."""

    def __init__(
        self,
        *,
        settings: Settings,
        node: Node,
        pool: asyncpg.Pool[asyncpg.Record],
        keys: KeyInUse,
        key_chain: KeyChain,
        statements: KeyStatements,
        notary: Notary,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._settings = settings
        self._node = node
        self._pool = pool
        self._keys = keys
        self._key_chain = key_chain
        self._statements = statements
        self._notary = notary
        self._spawn = spawn
        self._wait_s = settings.write.timeout.total_seconds()
        self._changing = False
        self._offline_root = offline_root(settings)
        self.recorded = asyncio.Event()
        """Set once the chain names the keys that the node started with."""

    async def published(self) -> PublishedKeys:
        """Every key that counts, or counted, in this ledger, oldest first, and those that nobody has admitted.

        Raises:
            DatabaseUnavailableError: Postgres cannot be reached.
        """
        async with reading(self._pool) as connection:
            return await published_keys(connection, self._key_chain, self._keys.node_keys)

    # --- rotation ---------------------------------------------------------------------------------

    async def rotate(self, new_key_uri: str | None, *, log_key: bool) -> tuple[str, str]:
        """Let another key sign from now on: the one at ``new_key_uri``, or a new file beside the configured one.

        With ``log_key`` the separate key of checkpoints is changed, else the key of snapshots, and of checkpoints
        when the same one signs them.

        Returns:
            Ids of the new key and of the one whose place it took.

        Raises:
            KeyConflictError: another change is under way, or the key was used before.
            InvalidInputError: there can be no such key.
            SigningUnavailableError: the new signer does not answer.
            DatabaseUnavailableError: Postgres cannot be reached; nothing has changed.
            NotReadyError: the start of the node is not recorded yet.
            DurabilityTimeoutError: the new key signs, but the chain does not say so yet.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                await self.recorded.wait()
        except TimeoutError:
            raise NotReadyError("the chain does not name the keys of this node yet; try again") from None
        if self._changing:
            raise KeyConflictError("another change of keys is under way; try again when it is done")
        self._changing = True
        changing = asyncio.ensure_future(self._rotate(new_key_uri, log_key))
        changing.add_done_callback(self._rotated)
        new_id, old_id, done = await asyncio.shield(changing)
        if not done:
            raise DurabilityTimeoutError(
                f"key {new_id} signs now in the place of {old_id}; the chain will say so once Postgres answers"
            )
        return new_id, old_id

    def _rotated(self, changing: asyncio.Future[tuple[str, str, bool]]) -> None:
        self._changing = False
        if not changing.cancelled():
            changing.exception()

    async def _rotate(self, new_key_uri: str | None, log_key: bool) -> tuple[str, str, bool]:
        # 1. The new key.
        keys = self._keys.node_keys
        is_one_key = keys.signer.key_id == keys.log_signer.key_id
        if log_key and is_one_key:
            raise InvalidInputError("one key signs snapshots and checkpoints here; rotate it without log_key")
        old, own = keys.log_signer if log_key else keys.signer, keys.signers()
        old_uri = keys.log_signer_uri if log_key else keys.signer_uri
        signer, uri = await asyncio.to_thread(self._new_signer, new_key_uri, log_key)
        history = await self._statements.history()
        if signer.key_id in history.admitted.keys() | history.waiting.keys():
            raise KeyConflictError(f"key {signer.key_id} was used in this ledger before; give another one")
        log_signer, log_uri = keys.log_signer, keys.log_signer_uri
        if log_key or is_one_key:
            log_signer, log_uri = await asyncio.to_thread(self._new_log_signer, signer, uri)
        # 2. Its row.
        signed_ms = await self._publish(list({each.key_id: each for each in (signer, log_signer)}.values()))
        # 3. Nobody signs.
        async with self._keys.changing():
            now_ms = self._node.wall.now_ms()
            end_ms = last_signed_ms(self._node.clock, now_ms, max(signed_ms, self._keys.highest_signed_ms))
            self._node.clock.observe(Hlc(end_ms + 1, 0, self._node.node_id))
            if not log_key:
                keys.signer, keys.signer_uri = signer, uri
            keys.log_signer, keys.log_signer_uri = log_signer, log_uri
            retired = Retired.by(signer, old.key_id, end_ms, old_uri)
            keys.retired = [*keys.retired, await self._vouched(retired, history, (old, *own))]
            await asyncio.to_thread(keys.store)
            self._keys.not_admitted = admission_fault(history, self._key_chain.root, keys)
            log.info("key_rotated", key_id=signer.key_id, previous_key_id=old.key_id)
            # 4. The entry.
            recording = asyncio.ensure_future(self._record(keys))
            done, _ = await asyncio.wait((recording,), timeout=self._wait_s)
        # 5. The new key signs.
        is_recorded = bool(done) and recording.exception() is None
        if is_recorded:
            await self._follow_up(keys)
        else:
            self._spawn(self._record_late(recording, keys))
        return signer.key_id, old.key_id, is_recorded

    def _new_signer(self, new_key_uri: str | None, log_key: bool) -> tuple[LocalOrRemote, str]:
        """The new key and the URI that names it in the node's file of keys. Blocks."""
        configured = self._keys.node_keys.configured_uri
        if new_key_uri is None and log_key:
            path = log_key_beside(configured, self._settings)
            return key_file.generate(path), str(path.absolute())
        if new_key_uri is None:
            if isinstance(self._keys.signer, remote_signer.RemoteSigner) or remote_signer.is_remote(configured):
                raise InvalidInputError("new_key_uri: name the new key; this node signs outside of files")
            path = new_key_path(configured)
            return key_file.generate(path, self._keys.signer.public_key.algorithm), path.name
        signing = self._settings.signing
        signer = open_named(new_key_uri, signing.uris_allowed, signing.read_pin)
        if isinstance(signer, remote_signer.RemoteSigner):
            if log_key:
                raise InvalidInputError("new_key_uri: checkpoints are signed with a key in a file", ("new_key_uri",))
            return signer, signer.key_uri
        if log_key and signer.algorithm != ED25519:
            raise InvalidInputError(f"new_key_uri: checkpoints are signed with {ED25519}", ("new_key_uri",))
        return signer, str(signer.path.absolute())

    def _new_log_signer(self, signer: LocalOrRemote, uri: str) -> tuple[FileSigner, str]:
        """The key of checkpoints that goes with a new ``signer``. Blocks."""
        if isinstance(signer, FileSigner) and signer.algorithm == ED25519:
            return signer, uri
        path = log_key_beside(self._keys.node_keys.configured_uri, self._settings)
        return key_file.generate(path), str(path.absolute())

    async def _publish(self, signers: list[LocalOrRemote]) -> int:
        """Publish the new keys; returns the highest HLC time that any snapshot names."""
        now_ms = self._node.wall.now_ms()
        async with reading(self._pool) as connection, connection.transaction():
            for signer in signers:
                key = signer.public_key
                await store.publish(
                    connection, key.key_id, key.algorithm, key.public_key_pem, self._node.node_id, now_ms
                )
            return await store.highest_signed_ms(connection)

    # --- what the chain must say ------------------------------------------------------------------

    async def record_start(self) -> None:
        """Bring chain and rows up to the keys that the node signs with, trying until Postgres answers.

        It MUST be called once all that an earlier process left in the WAL is chained.
        """
        await self._until_stored(lambda: self._record(self._keys.node_keys))
        await self._follow_up(self._keys.node_keys)
        self.recorded.set()
        await self._until_stored(self._mend_rows)

    async def follow_admission(self) -> None:
        """Let the node sign as long as its keys count, and ask for their admission while they do not; for ever, once
        the start is recorded."""
        await self.recorded.wait()
        while True:
            try:
                history = await self._statements.history()
            except DatabaseUnavailableError:
                history = None
            fault = self._keys.not_admitted
            if history is not None and (self._key_chain.fault is None or self._key_chain.is_of_another_root):
                fault = admission_fault(history, self._key_chain.root, self._keys.node_keys)
            if fault != self._keys.not_admitted:
                self._keys.not_admitted = fault
                if fault is None:
                    log.info("keys_admitted", key_ids=[key.key_id for key in self._keys.own()])
                    await self._until_stored(self._notary.log_key_changed)
                else:
                    log.warning("keys_not_admitted", error=fault)
            await asyncio.sleep(ADMISSION_INTERVAL_S)

    async def _record(self, keys: NodeKeys) -> None:
        """Chain what ``_system`` does not say yet of the node's keys."""
        history = await self._statements.history()
        # 1. The key that the ledger begins with.
        if history.root_key_id is None and self._key_chain.root.key_id in (None, keys.signer.key_id):
            await self._statements.enter(SystemAction.KEY_ADDED, root_facts(keys.signer.public_key, self._node.node_id))
            history = await self._statements.history()
        elif history.root_key_id is None and self._offline_root is not None:
            await self._statements.enter(SystemAction.KEY_ADDED, root_facts(self._offline_root, None))
            history = await self._statements.history()
        # 2. Keys that took the place of others.
        for number, item in enumerate(keys.retired):
            if (item.successor_id, item.key_id) not in history.replaced:
                if item.statement is None:
                    old = await asyncio.to_thread(retired_signer, item, keys, self._settings.signing.read_pin)
                    item = await self._vouched(item, history, [*([old] if old else []), *keys.signers()])
                    keys.retired[number] = item
                    await asyncio.to_thread(keys.store)
                await self._statements.enter(SystemAction.KEY_ROTATED, self._facts_of(item))
        # 3. Keys that are new. Where the key that the ledger began with is gone, there is nothing to add one to.
        history = await self._statements.history()
        if history.root_key_id is None:
            log.error("keys_not_recorded", root_key_id=self._key_chain.root.key_id, fault=self._key_chain.fault)
            return
        introduced = history.admitted.keys() | history.waiting.keys() | {item.successor_id for item in keys.retired}
        for signer in keys.signers():
            if signer.key_id not in introduced:
                facts = added_facts(signer.public_key, self._node.node_id)
                facts = await self._statements.stated(SystemAction.KEY_ADDED, facts, history, keys.signers())
                await self._statements.enter(SystemAction.KEY_ADDED, facts)
        # 4. A chain without statements takes no change without one any more.
        root = next((signer for signer in keys.signers() if signer.key_id == history.root_key_id), None)
        if history.is_old_form and root is not None:
            facts = added_facts(root.public_key, self._node.node_id)
            facts = await self._statements.stated(SystemAction.KEY_ADMITTED, facts, history, (root,))
            if key_statement.FIELD in facts:
                await self._statements.enter(SystemAction.KEY_ADMITTED, facts)

    def _facts_of(self, item: Retired) -> dict[str, object]:
        """What the chain is to say of a rotation."""
        facts = rotated_facts(PublicKey.of(item.successor_pem), self._node.node_id, item.key_id, item.not_after_ms or 0)
        return facts if item.statement is None else {**facts, key_statement.FIELD: item.statement}

    async def _vouched(self, item: Retired, history: KeyHistory, signers: Sequence[Signer]) -> Retired:
        """``item`` with the word of a key that may give it, if there is one."""
        stated = await self._statements.stated(SystemAction.KEY_ROTATED, self._facts_of(item), history, signers)
        statement = stated.get(key_statement.FIELD)
        return replace(item, statement=statement if isinstance(statement, dict) else None)

    async def _record_late(self, recording: asyncio.Future[None], keys: NodeKeys) -> None:
        try:
            await recording
        except _TRY_AGAIN:
            await self._until_stored(lambda: self._record(keys))
        except (ChainDamagedError, EventRefusedError) as error:
            # The chain of _system takes nothing now, or its place in the chain is taken; the next start tries again.
            log.error("key_change_not_recorded", error=str(error))
            return
        await self._follow_up(keys)

    async def _follow_up(self, keys: NodeKeys) -> None:
        """Once the chain says it: rows, the node's file, checkpoints by the new key."""
        retired = keys.retired
        await self._until_stored(lambda: self._end_rows(keys, retired))
        if retired:
            keys.retired = [item for item in keys.retired if item not in retired]
            await asyncio.to_thread(keys.store)
            await self._until_stored(self._notary.log_key_changed)

    async def _end_rows(self, keys: NodeKeys, retired: list[Retired]) -> None:
        async with reading(self._pool) as connection, connection.transaction():
            for item in retired:
                await store.retire(connection, item.key_id, time_of(item.not_after_ms or 0))
            await store.name_in_use(connection, self._node.node_id, keys.signer.key_id, keys.log_signer.key_id)

    async def _mend_rows(self) -> None:
        """Let the rows say at least what the chain says."""
        async with reading(self._pool) as connection, connection.transaction():
            for item in (await published_keys(connection, self._key_chain, self._keys.node_keys)).admitted:
                key = item.key
                if key.not_after is not None:
                    await store.retire(connection, key.key_id, key.not_after)
                if key.revoked_from_hlc is not None:
                    await store.revoke(connection, key.key_id, key.revoked_from_hlc.text(), item.revocation_reason)

    async def _until_stored(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                return await work()
            except _TRY_AGAIN as error:
                log.warning("key_change_delayed", error=str(error))
            await asyncio.sleep(RETRY_PAUSE_S)
