"""Changing which keys count in a ledger, because somebody asks: rotating, admitting and revoking.

A rotation, each step durable before the next::

    1. the new key exists, in its file or where its URI says
    2. its row is published
    3. nobody signs: the end of the old key is chosen, at or after all it signed, and the clock goes past it;
       the node's file of keys names the new key, and the old one as retired
    4. KEY_ROTATED is queued in the WAL, and chained
    5. the new key signs, its row says so, and the file forgets the old one

A process that dies before the third step is done has changed nothing. One that dies later signs with the new key when
it starts, and does what is missing. While Postgres is away a rotation waits before the fourth step for as long as a
write may, then the new key signs, and the rest follows by itself.

Who admits or revokes gives the word of this node's key, or of one that is kept elsewhere, such as an offline root: its
statement is then made by whoever has it, and brought here to be recorded. It is judged before anything is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from app.config import Settings
from app.keys.in_use import KeyInUse
from app.keys.node_keys import Retired, last_signed_ms
from app.keys.recording import TRY_AGAIN, Facts, KeyRecords
from app.keys.uris import LocalOrRemote, log_key_beside, new_key_path, open_named
from app.node.state import Node
from app.store import keys as store
from app.store.reading import Pool, reading
from ledger.errors import (
    ChainDamagedError,
    ClockSkewError,
    DurabilityTimeoutError,
    EventRefusedError,
    InvalidInputError,
    KeyConflictError,
    NotFoundError,
    NotReadyError,
)
from ledger.hlc import Hlc
from ledger.machines.events import SystemAction
from signing import key_file, key_statement, remote_signer
from signing.key_file import FileSigner
from signing.key_history import KeyHistory, revoked_facts
from signing.keys import ED25519

log = structlog.get_logger()


@dataclass(kw_only=True, eq=False)
class KeyChanges:
    """Changes the keys of one node, one rotation at a time, and which keys count in its ledger."""

    settings: Settings
    node: Node
    pool: Pool
    keys: KeyInUse
    records: KeyRecords
    spawn: Callable[[Coroutine[Any, Any, None]], None]

    def __post_init__(self) -> None:
        self._held = self.keys.node_keys
        self._wait_s = self.settings.write.timeout.total_seconds()
        self._changing = False

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
                await self.records.recorded.wait()
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
        keys = self._held
        is_one_key = keys.signer.key_id == keys.log_signer.key_id
        if log_key and is_one_key:
            raise InvalidInputError("one key signs snapshots and checkpoints here; rotate it without log_key")
        old, own = keys.log_signer if log_key else keys.signer, keys.signers()
        signer = await asyncio.to_thread(self._new_signer, new_key_uri, log_key)
        history = await self.records.history()
        if signer.key_id in history.admitted.keys() | history.waiting.keys():
            raise KeyConflictError(f"key {signer.key_id} was used in this ledger before; give another one")
        log_signer = keys.log_signer
        if log_key or is_one_key:
            log_signer = await asyncio.to_thread(self._new_log_signer, signer)
        # 2. Its row.
        now_ms = self.node.wall.now_ms()
        async with reading(self.pool) as connection, connection.transaction():
            for key in {each.key_id: each.public_key for each in (signer, log_signer)}.values():
                await store.publish(connection, key, self.node.node_id, now_ms, is_known=False)
            signed_ms = await store.highest_signed_ms(connection)
        # 3. Nobody signs.
        async with self.keys.changing():
            now_ms = self.node.wall.now_ms()
            end_ms = last_signed_ms(self.node.clock, now_ms, max(signed_ms, self.keys.highest_signed_ms))
            self.node.clock.observe(Hlc(end_ms + 1, 0, self.node.node_id))
            retired = Retired.by(signer, old.key_id, end_ms, keys.uri_of(old))
            retired = await self.records.vouched(retired, history, (old, *own))
            keys.signer, keys.log_signer = keys.signer if log_key else signer, log_signer
            keys.retired = [*keys.retired, retired]
            await asyncio.to_thread(keys.store)
            self.records.judge(history)
            log.info("key_rotated", key_id=signer.key_id, previous_key_id=old.key_id)
            # 4. The entry.
            recording = asyncio.ensure_future(self.records.record())
            done, _ = await asyncio.wait((recording,), timeout=self._wait_s)
        # 5. The new key signs.
        is_recorded = bool(done) and recording.exception() is None
        if is_recorded:
            await self.records.follow_up()
        else:
            self.spawn(self._record_late(recording))
        return signer.key_id, old.key_id, is_recorded

    def _new_signer(self, new_key_uri: str | None, log_key: bool) -> LocalOrRemote:
        """The new key. Blocks."""
        configured = self._held.configured_uri
        if new_key_uri is None and log_key:
            return self._new_log_key()
        if new_key_uri is None:
            if isinstance(self.keys.signer, remote_signer.RemoteSigner) or remote_signer.is_remote(configured):
                raise InvalidInputError("new_key_uri: name the new key; this node signs outside of files")
            return key_file.generate(new_key_path(configured), self.keys.signer.public_key.algorithm)
        signing = self.settings.signing
        signer = open_named(new_key_uri, signing.uris_allowed, signing.read_pin)
        if isinstance(signer, remote_signer.RemoteSigner):
            if log_key:
                raise InvalidInputError("new_key_uri: checkpoints are signed with a key in a file", ("new_key_uri",))
            return signer
        if log_key and signer.algorithm != ED25519:
            raise InvalidInputError(f"new_key_uri: checkpoints are signed with {ED25519}", ("new_key_uri",))
        return signer

    def _new_log_signer(self, signer: LocalOrRemote) -> FileSigner:
        """The key of checkpoints that goes with a new ``signer``. Blocks."""
        if isinstance(signer, FileSigner) and signer.algorithm == ED25519:
            return signer
        return self._new_log_key()

    def _new_log_key(self) -> FileSigner:
        return key_file.generate(log_key_beside(self._held.configured_uri, self.settings))

    async def _record_late(self, recording: asyncio.Future[None]) -> None:
        try:
            await recording
        except TRY_AGAIN:
            await self.records.until_stored(self.records.record)
        except (ChainDamagedError, EventRefusedError) as error:
            # The chain of _system takes nothing now, or its place in the chain is taken; the next start tries again.
            log.error("key_change_not_recorded", error=str(error))
            return
        await self.records.follow_up()

    # --- admitting and revoking -------------------------------------------------------------------

    async def admit(self, key_id: str, statement: Mapping[str, object] | None) -> None:
        """Let a key count that an entry introduced, with the word of this node's key or with a ``statement``.

        Raises:
            NotFoundError: no entry introduces such a key.
            KeyConflictError: it is admitted already, or no key of this node may admit it.
            InvalidInputError: the statement is not one about this key, in this ledger, by a key that may admit it.
            DatabaseUnavailableError: Postgres cannot be reached; nothing has changed.
            DurabilityTimeoutError: it is in this node's log, and will count once Postgres answers.
        """
        history = await self.records.history()
        if key_id in history.admitted:
            raise KeyConflictError(f"key {key_id} is admitted already")
        if key_id not in history.waiting:
            raise NotFoundError(f"no entry of _system introduces key {key_id}; start the node that signs with it first")
        late = f"key {key_id} will be admitted once Postgres answers"
        await self._change(SystemAction.KEY_ADMITTED, history.waiting[key_id].facts, history, statement, late)

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
        history = await self.records.history()
        key = history.keys().get(key_id) or (history.waiting[key_id].key if key_id in history.waiting else None)
        now_ms = self.node.wall.now_ms()
        if key is None:
            raise NotFoundError(f"there is no key {key_id} in this ledger")
        if statement is None and key_id in {own.key_id for own in self.keys.own()}:
            raise KeyConflictError(f"this node signs with key {key_id}; rotate it first, then revoke it")
        if from_hlc is not None and from_hlc.physical_ms > now_ms + self.node.clock.max_clock_skew_ms:
            raise ClockSkewError(f"from_hlc {from_hlc} lies ahead; a key is revoked from now on or from earlier")
        start = from_hlc or self.node.clock.tick(now_ms)
        if key.revoked_from_hlc is not None and key.revoked_from_hlc <= start:
            raise KeyConflictError(f"key {key_id} is revoked from HLC {key.revoked_from_hlc} on already")
        facts = revoked_facts(key_id, self.node.node_id, start, reason)
        late = f"key {key_id} will be revoked from HLC {start} on once Postgres answers"
        await self._change(SystemAction.KEY_REVOKED, facts, history, statement, late)
        return start

    async def _change(
        self,
        action: SystemAction,
        facts: Facts,
        history: KeyHistory,
        statement: Mapping[str, object] | None,
        late: str,
    ) -> None:
        """Chain the change with the word of a key that may change keys; what is ``late`` goes on after the answer."""
        if statement is not None:
            vouched: Facts = {**facts, key_statement.FIELD: statement}
            if not history.would_count(action, vouched):
                raise InvalidInputError(
                    "statement: it is not one about this key, in this ledger, by a key that may change keys now",
                    ("statement",),
                )
        else:
            vouched = await self.records.stated(action, facts, history, self._held.signers())
            if key_statement.FIELD not in vouched:
                why = self.keys.not_admitted or self.keys.fault or "they have ended or were revoked"
                raise KeyConflictError(
                    f"no key that this node signs with may vouch for this: {why}. Ask another node, or use --root-key"
                )
        entering = asyncio.ensure_future(self.records.enter(action, vouched))
        done, _ = await asyncio.wait((entering,), timeout=self._wait_s)
        if not done:
            self.spawn(_joined(entering))
            raise DurabilityTimeoutError(late)
        entering.result()


async def _joined(work: asyncio.Future[None]) -> None:
    await work
