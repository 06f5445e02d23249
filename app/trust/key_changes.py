"""Records this node's keys in ``_system``, retrying until they are chained, and carries out rotations, admissions and
revocations.

At start, and while the node runs::

    1. the keys that the node signs with are published, before anything is signed with them
    2. once everything that an earlier process left is chained: the chain names the keys, and which key replaced which
    3. once a second: the node checks whether they are admitted, and whether the rows match the chain

A rotation, each step durable before the next::

    1. the new key exists, in its file or at its URI
    2. its row is published
    3. signing pauses: the end of the old key is chosen, not before anything it signed, and the clock moves past it;
       the node's file of keys names the new key, and the old one as retired
    4. KEY_ROTATED is queued in the WAL, and chained
    5. the new key signs, its row says so, and the file forgets the old one

A process that dies before the end of step 3 has changed nothing. A process that dies later signs with the new key after
its restart, and does the missing steps. While Postgres is away a rotation waits before step 4 for as long as a write
may. Then the new key signs, and the remaining steps follow once Postgres answers.

Every entry carries a statement by a key that was admitted before (signing.key_statement). The statement of a rotation
is by the replaced key. Any other is by a key that this node signs with, or by a key that is kept elsewhere, such as an
offline root: its owner makes the statement, and the node verifies it before it writes anything. A key without a
statement is recorded all the same; the node then signs nothing until the key is admitted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from app.runtime.logs import log
from app.runtime.postgres import DATABASE_FAULTS
from app.runtime.settings.config import Settings
from app.runtime.state.node import Node
from app.store import Connection
from app.store import keys as store
from app.store.reading import Pool, reading, run_in
from app.trust import node_keys
from app.trust.key_chain import KeyChain
from app.trust.key_in_use import KeyInUse
from app.trust.node_keys import (
    LOG_KEY_NAME,
    SECOND_KEY_NAME,
    LocalOrRemote,
    NodeKeys,
    Retired,
    last_signed_ms,
    new_key_beside,
    new_key_path,
    offline_root,
    open_named,
    retired_signer,
)
from ledger.errors import (
    ChainDamagedError,
    ClockSkewError,
    ConfigurationError,
    DatabaseUnavailableError,
    DurabilityTimeoutError,
    EventRefusedError,
    InvalidInputError,
    KeyConflictError,
    LedgerError,
    NotFoundError,
    NotReadyError,
    SigningUnavailableError,
    WalFullError,
)
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc
from signing import key_statement, private_keys
from signing.key_history import SUBJECT_PREFIX, KeyHistory, added_facts, revoked_facts, root_facts, rotated_facts
from signing.keys import ALGORITHMS, ED25519, ML_DSA_44, PublicKey, Signer
from signing.private_keys import FileSigner

FOLLOW_INTERVAL_S = 1.0
"""How often a node reads what the chain says: whether its keys are trusted and the rows match it, and of callers,
regions and tokens."""
REVOKED_LEARNED_S = 5.0
"""Longest until a node has learned that its key is revoked and stops signing checkpoints with it."""
RETRY_PAUSE_S = 1.0
"""Pause before a change retries a request to Postgres."""

WhichKey = Literal["first", "log", "second"]
_SIGNS: Mapping[WhichKey, str] = {"first": "signer", "log": "log_signer", "second": "second"}
"""Where ``NodeKeys`` has it."""

TRY_AGAIN = (DatabaseUnavailableError, WalFullError, *DATABASE_FAULTS)

Facts = dict[str, object]
WriteEntry = Callable[[SystemAction, str, Facts], Awaitable[object]]
"""Writes an entry of ``_system`` about a subject, and waits until it is chained."""


async def publish_at_start(connection: Connection, node: Node, chain: KeyChain, oldest_ms: int | None) -> None:
    """Publish the node's keys, valid for everything that they may have to sign: new entries, entries of the WAL that
    are not chained yet, from the HLC time ``oldest_ms`` on, and entries that no snapshot covers yet. The keys that they
    replaced end here, even if an earlier process had started that.

    A row that is missing, or holds another key, is restored, valid for everything that the key may have signed.
    """
    keys = chain.keys
    now_ms = time.time_ns() // 1_000_000
    # A wall clock that is set back later must not lead to HLCs from before the keys are valid.
    node.clock.observe(Hlc(now_ms, 0, node.node_id))
    oldest_ms = now_ms if oldest_ms is None else min(now_ms, oldest_ms)
    history = await chain.history(connection)
    for signer in keys.signers():
        is_known = signer.key_id in history.admitted or signer.key_id in history.waiting
        key = signer.public_key
        if not await store.publish(connection, key, node.node_id, oldest_ms, is_known=is_known) and is_known:
            log.error("own_key_was_removed", key_id=key.key_id, done="published again")
    end_ms = last_signed_ms(node.clock, now_ms, await store.highest_signed_ms(connection) if keys.retired else 0)
    keys.retired = [
        item if item.not_after_ms is not None else structs.replace(item, not_after_ms=end_ms) for item in keys.retired
    ]
    await asyncio.to_thread(keys.store)
    for item in keys.retired:
        node.clock.observe(Hlc((item.not_after_ms or 0) + 1, 0, node.node_id))
    await _name_in_use(connection, node, keys)


async def _name_in_use(connection: Connection, node: Node, keys: NodeKeys) -> None:
    """Write to the rows which of the keys sign what."""
    used = (keys.snapshot_signers, keys.checkpoint_signers)
    await store.name_in_use(connection, node.node_id, *([each.key_id for each in signers] for signers in used))


@dataclass(kw_only=True, eq=False)
class KeyChanges:
    """Keeps chain, rows and admission of one node's keys together, and changes them, one rotation at a time."""

    settings: Settings
    node: Node
    pool: Pool
    keys: KeyInUse
    chain: KeyChain
    write_entry: WriteEntry
    sign_checkpoints_again: Callable[[], Awaitable[None]]
    sign_uncounted_again: Callable[[Sequence[PublicKey]], Awaitable[None]]
    """Signs again the checkpoints that none of these keys signed."""
    spawn: Callable[[Coroutine[Any, Any, None]], object]

    def __post_init__(self) -> None:
        self._held = self.chain.keys
        self._offline_root = offline_root(self.settings)
        self._wait_s = self.settings.write.timeout.total_seconds()
        self._rotating: asyncio.Future[tuple[str, str, bool]] | None = None
        self.recorded = asyncio.Event()
        """Set once the chain names the keys that the node started with."""
        self._counted: Set[str] | None = None
        """Keys that could sign checkpoints at the last check."""
        self._revoked_at_s: list[float] = []
        """When to look for checkpoints by a revoked key."""
        self._rows_say: KeyHistory | None = None
        """The history that the rows were last written from."""

    async def record_start(self) -> None:
        """Bring chain and rows up to date with the node's keys, retrying until Postgres answers.

        It MUST be called only after everything that an earlier process left in the WAL is chained.
        """
        await self.until_stored(self.record)
        await self.follow_up()
        self.recorded.set()

    async def follow_admission(self) -> None:
        """Once the start is recorded, follow the chain for ever. The node signs only while its keys are trusted, and
        asks for their admission otherwise; the rows are kept equal to the chain."""
        await self.recorded.wait()
        while True:
            with suppress(DatabaseUnavailableError):
                history = await self.history()
                if self.chain.fault is None or self.chain.is_of_another_root:
                    await self._follow(history)
            await asyncio.sleep(FOLLOW_INTERVAL_S)

    async def _follow(self, history: KeyHistory) -> None:
        before = self.keys.not_admitted
        self.keys.not_admitted = self.chain.admission_fault(history)
        if self.keys.not_admitted is None and before is not None:
            log.info("keys_admitted", key_ids=[key.key_id for key in self.keys.own()])
            await self.until_stored(self.sign_checkpoints_again)
        elif self.keys.not_admitted != before:
            log.warning("keys_not_admitted", error=self.keys.not_admitted)
        if self.keys.not_admitted is None:
            await self._follow_revocations(history)
        if history is not self._rows_say:
            await self._write_rows()

    async def _follow_revocations(self, history: KeyHistory) -> None:
        """Have the last checkpoints of a revoked key signed again, as their tenants may write nothing for long."""
        keys, now_s = history.keys(), time.monotonic()
        counting = {key_id: key for key_id, key in keys.items() if key.revoked_from_hlc is None}
        if (keys.keys() if self._counted is None else self._counted) - counting.keys():
            self._revoked_at_s = [now_s, now_s + REVOKED_LEARNED_S]
        self._counted = counting.keys()
        if self._revoked_at_s and self._revoked_at_s[0] <= now_s:
            del self._revoked_at_s[0]
            await self.until_stored(
                partial(self.sign_uncounted_again, [key for key in counting.values() if key.algorithm == ED25519])
            )

    async def _write_rows(self) -> None:
        async with reading(self.pool) as connection, connection.transaction():
            history = await self.chain.history(connection)
            if self.chain.fault is None:
                published = await self.chain.published(connection, history)
                await store.write_rows(connection, [(each.key, each.revocation_reason) for each in published.admitted])
            await _name_in_use(connection, self.node, self._held)
        self._rows_say = history

    async def record(self) -> None:
        """Chain the entries about the node's keys that ``_system`` lacks."""
        keys, history = self._held, await self.history()
        # 1. The ledger's first key.
        if history.root_key_id is None and keys.root_key_id in (None, keys.signer.key_id):
            await self.enter(SystemAction.KEY_ADDED, root_facts(keys.signer.public_key, self.node.node_id))
            history = await self.history()
        elif history.root_key_id is None and self._offline_root is not None:
            await self.enter(SystemAction.KEY_ADDED, root_facts(self._offline_root, None))
            history = await self.history()
        # 2. Keys that replaced others.
        for number, item in enumerate(keys.retired):
            if (item.successor_id, item.key_id) not in history.replaced:
                if item.statement is None:
                    old = await asyncio.to_thread(retired_signer, item, keys, self.settings.signing.read_pin)
                    item = await self.vouched(item, history, [*([old] if old else []), *keys.signers()])
                    keys.retired[number] = item
                    await asyncio.to_thread(keys.store)
                await self.enter(SystemAction.KEY_ROTATED, self._facts_of(item))
                # By then the key that may vouch for the next one is trusted.
                history = await self.history()
        # 3. New keys. If the ledger's first key is gone, there is no history to add one to.
        if history.root_key_id is None:
            log.error("keys_not_recorded", root_key_id=keys.root_key_id, fault=self.chain.fault)
            return
        introduced = history.admitted.keys() | history.waiting.keys() | {item.successor_id for item in keys.retired}
        for signer in keys.signers():
            if signer.key_id not in introduced:
                facts = await self.stated(
                    SystemAction.KEY_ADDED,
                    added_facts(signer.public_key, self.node.node_id),
                    history,
                    keys.signers(),
                )
                await self.enter(SystemAction.KEY_ADDED, facts)
        # 4. A chain without statements accepts no further change without one.
        root = next((signer for signer in keys.signers() if signer.key_id == history.root_key_id), None)
        if history.is_old_form and root is not None:
            facts = await self.stated(
                SystemAction.KEY_ADMITTED, added_facts(root.public_key, self.node.node_id), history, (root,)
            )
            if key_statement.FIELD in facts:
                await self.enter(SystemAction.KEY_ADMITTED, facts)

    async def follow_up(self) -> None:
        """After the change is chained: update the rows and the node's file, and sign checkpoints with the new key."""
        keys, retired = self._held, self._held.retired
        await self.until_stored(self._write_rows)
        if retired:
            keys.retired = [item for item in keys.retired if item not in retired]
            await self.until_stored(partial(asyncio.to_thread, keys.store))
            await self.until_stored(self.sign_checkpoints_again)

    async def until_stored(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work``, retrying until Postgres or the disk accepts it."""
        while True:
            try:
                return await work()
            except TRY_AGAIN as error:
                log.warning("key_change_delayed", error=str(error))
            await asyncio.sleep(RETRY_PAUSE_S)

    # --- entries and who vouches for them ---------------------------------------------------------

    async def history(self) -> KeyHistory:
        """The chain's present history of keys.

        Raises:
            DatabaseUnavailableError: Postgres cannot be reached.
        """
        return await run_in(reading(self.pool), self.chain.history)

    def _facts_of(self, item: Retired) -> Facts:
        """The facts of a rotation's entry."""
        facts = rotated_facts(PublicKey.of(item.successor_pem), self.node.node_id, item.key_id, item.not_after_ms or 0)
        return facts if item.statement is None else {**facts, key_statement.FIELD: item.statement}

    async def vouched(self, item: Retired, history: KeyHistory, signers: Sequence[Signer]) -> Retired:
        """``item`` with a statement by a key that may vouch for it, if there is one."""
        statement = (await self.stated(SystemAction.KEY_ROTATED, self._facts_of(item), history, signers)).get(
            key_statement.FIELD
        )
        return structs.replace(item, statement=statement if isinstance(statement, dict) else None)

    async def stated(self, action: SystemAction, facts: Facts, history: KeyHistory, signers: Sequence[Signer]) -> Facts:
        """``facts`` with a statement by the first of ``signers`` that may change keys and answers; else unchanged."""
        root_id, after = history.root_key_id, history.newest
        for signer in signers:
            if root_id is None or after is None or signer.key_id not in history.authorities:
                continue
            try:
                return await self.keys.sign_with(
                    signer, partial(key_statement.sign, action, facts, root_id, after, signer)
                )
            except SigningUnavailableError as error:
                log.warning("signing_delayed", error=str(error))
        return facts

    async def enter(self, action: SystemAction, facts: Facts) -> None:
        """Write the entry about a key and wait until it is chained.

        Raises: as ``SystemEntries.record``.
        """
        await self.write_entry(action, f"{SUBJECT_PREFIX}{facts['key_id']}", facts)
        log.info("key_entry_chained", action=action.value, key_id=facts["key_id"])

    async def in_time(self, waited: Awaitable[object], late: LedgerError) -> None:
        """Wait as long as a write may, then raise ``late``. The entry is in the WAL by then and will still be
        chained."""
        try:
            async with asyncio.timeout(self._wait_s):
                await waited
        except TimeoutError:
            raise late from None

    async def check_recorded(self) -> None:
        """Return once the chain names the keys that the node started with.

        Raises:
            NotReadyError: not in time.
        """
        await self.in_time(
            self.recorded.wait(), NotReadyError("the chain does not name the keys of this node yet; try again")
        )

    async def enter_vouched(self, action: SystemAction, subject: str, facts: Facts) -> None:
        """Write an entry about ``subject`` with a statement by a key of this node, and wait until it is chained.

        Raises:
            NotReadyError: the start of the node is not recorded yet.
            KeyConflictError: no key of this node may vouch for it.
            DatabaseUnavailableError: PostgreSQL cannot be reached; nothing has changed.
            DurabilityTimeoutError: not chained in time; it still will be.
            ChainDamagedError: the chain of ``_system`` takes nothing.
        """
        await self.check_recorded()
        vouched = await self.vouched_here(action, facts, await self.history())
        await self.in_time(
            self.write_entry(action, subject, vouched),
            DurabilityTimeoutError(f"{action} about {subject} is in this node's log, and not in the chain yet"),
        )

    # --- rotation ---------------------------------------------------------------------------------

    async def rotate(self, new_key_uri: str | None, which: WhichKey = "first") -> tuple[str, str]:
        """Rotate to the key at ``new_key_uri``, or to a new file beside the configured one.

        The first key is that of snapshots, and of checkpoints if it signs them too.

        Returns:
            Ids of the new key and of the replaced one.

        Raises:
            KeyConflictError: another change is under way, or the key was used before.
            InvalidInputError: no such key is possible.
            SigningUnavailableError: the new signer does not answer, or a file of keys cannot be written; nothing has
                changed.
            DatabaseUnavailableError: Postgres cannot be reached; nothing has changed.
            NotReadyError: the start of the node is not recorded yet.
            DurabilityTimeoutError: the new key signs, but the rotation is not chained yet.
        """
        await self.check_recorded()
        if self._rotating is not None and not self._rotating.done():
            raise KeyConflictError("another change of keys is under way; try again when it is done")
        self._rotating = asyncio.ensure_future(self._rotate(new_key_uri, which))
        self._rotating.add_done_callback(lambda done: done.cancelled() or done.exception())
        new_id, old_id, done = await asyncio.shield(self._rotating)
        if not done:
            raise DurabilityTimeoutError(
                f"key {new_id} signs now in the place of {old_id}; the chain will say so once Postgres answers"
            )
        return new_id, old_id

    async def _rotate(self, new_key_uri: str | None, which: WhichKey) -> tuple[str, str, bool]:
        # 1. The new key.
        keys, own = self._held, self._held.signers()
        old = self._replaceable(which)
        signer = await asyncio.to_thread(self._new_signer, new_key_uri, which)
        history = await self.history()
        if signer.key_id in history.admitted.keys() | history.waiting.keys():
            raise KeyConflictError(f"key {signer.key_id} was used in this ledger before; give another one")
        changed: dict[str, Any] = {_SIGNS[which]: signer}
        if which == "first" and keys.signer.key_id == keys.log_signer.key_id:
            is_for_both = isinstance(signer, FileSigner) and signer.algorithm == ED25519
            changed["log_signer"] = signer if is_for_both else await asyncio.to_thread(self._new_file, LOG_KEY_NAME)
        # 2. Its row.
        now_ms = self.node.wall.now_ms()
        async with reading(self.pool) as connection, connection.transaction():
            for key in {each.key_id: each.public_key for each in changed.values()}.values():
                await store.publish(connection, key, self.node.node_id, now_ms, is_known=False)
            signed_ms = await store.highest_signed_ms(connection)
        # 3. Signing pauses.
        async with self.keys.changing():
            now_ms = self.node.wall.now_ms()
            end_ms = last_signed_ms(self.node.clock, now_ms, max(signed_ms, self.keys.highest_signed_ms))
            self.node.clock.observe(Hlc(end_ms + 1, 0, self.node.node_id))
            retired = Retired.by(signer, old.key_id, end_ms, keys.uri_of(old))
            retired = await self.vouched(retired, history, (old, *own))
            changed["retired"] = [*keys.retired, retired]
            before = {name: getattr(keys, name) for name in changed}
            _assign(keys, changed)
            try:
                await asyncio.to_thread(keys.store)
            except OSError as error:
                _assign(keys, before)
                raise SigningUnavailableError(
                    f"{keys.folder / node_keys.NAME} cannot be written: {error.strerror}"
                ) from error
            self.keys.not_admitted = self.chain.admission_fault(history)
            log.info("key_rotated", key_id=signer.key_id, previous_key_id=old.key_id)
            # 4. The entry.
            recording = asyncio.ensure_future(self.record())
            done, _ = await asyncio.wait((recording,), timeout=self._wait_s)
        # 5. The new key signs.
        is_recorded = bool(done) and recording.exception() is None
        if is_recorded:
            await self.follow_up()
        else:
            self.spawn(self._record_late(recording))
        return signer.key_id, old.key_id, is_recorded

    def _replaceable(self, which: WhichKey) -> LocalOrRemote:
        """The key to replace."""
        keys = self._held
        if which == "log" and keys.signer.key_id == keys.log_signer.key_id:
            raise InvalidInputError("one key signs snapshots and checkpoints here; rotate it without log_key")
        if which == "second" and keys.second is None:
            raise InvalidInputError("this node signs with no second key: signing.second is not set")
        old: LocalOrRemote = getattr(keys, _SIGNS[which])
        return old

    def _new_signer(self, new_key_uri: str | None, which: WhichKey) -> LocalOrRemote:
        """The new key. Blocks."""
        configured = self._held.configured_uri
        if new_key_uri is None and which != "first":
            return self._new_file(LOG_KEY_NAME if which == "log" else SECOND_KEY_NAME)
        if new_key_uri is None:
            if isinstance(self.keys.signer, private_keys.RemoteSigner) or private_keys.is_remote(configured):
                raise InvalidInputError("new_key_uri: name the new key; this node signs outside of files")
            return _generated(new_key_path(configured), self.keys.signer.public_key.algorithm)
        signing = self.settings.signing
        algorithms = (ML_DSA_44,) if which == "second" else ALGORITHMS
        signer = open_named(new_key_uri, signing.uris_allowed, signing.read_pin, algorithms)
        if isinstance(signer, private_keys.RemoteSigner):
            if which != "first":
                raise InvalidInputError("new_key_uri: this key must be one in a file", ("new_key_uri",))
            return signer
        if which == "log" and signer.algorithm != ED25519:
            raise InvalidInputError(f"new_key_uri: checkpoints are signed with {ED25519}", ("new_key_uri",))
        return signer

    def _new_file(self, name: str) -> FileSigner:
        """A new log key or second key in a file of its own."""
        path = new_key_beside(self._held.configured_uri, self.settings, name)
        return _generated(path, ML_DSA_44 if name == SECOND_KEY_NAME else ED25519)

    async def _record_late(self, recording: asyncio.Future[None]) -> None:
        try:
            await recording
        except TRY_AGAIN:
            await self.until_stored(self.record)
        except (ChainDamagedError, EventRefusedError) as error:
            # The chain of _system accepts nothing now, or another entry has the place of this one; the next start
            # retries.
            log.error("key_change_not_recorded", error=str(error))
            return
        await self.follow_up()

    # --- admitting and revoking -------------------------------------------------------------------

    async def admit(self, key_id: str, statement: Mapping[str, object] | None) -> None:
        """Admit a key that an entry introduced, by this node's key or by a ``statement``.

        Raises:
            NotFoundError: no entry introduces such a key.
            KeyConflictError: it is admitted already, or no key of this node may admit it.
            InvalidInputError: the statement is not about this key and this ledger, or not by a key that may admit it.
            DatabaseUnavailableError: Postgres cannot be reached; nothing has changed.
            DurabilityTimeoutError: it is in this node's log, and will count once Postgres answers.
        """
        history = await self.history()
        if key_id in history.admitted:
            raise KeyConflictError(f"key {key_id} is admitted already")
        if key_id not in history.waiting:
            raise NotFoundError(f"no entry of _system introduces key {key_id}; start the node that signs with it first")
        await self._change(
            SystemAction.KEY_ADMITTED,
            history.waiting[key_id].facts,
            history,
            statement,
            f"key {key_id} will be admitted once Postgres answers",
        )

    async def revoke(
        self, key_id: str, from_hlc: Hlc | None, reason: str | None, statement: Mapping[str, object] | None
    ) -> Hlc:
        """Revoke the key: its signatures for ``from_hlc`` or later, by default for now or later, are invalid.

        Returns:
            The HLC from which on it is revoked.

        Raises:
            NotFoundError: the ledger has no such key.
            KeyConflictError: this node signs with it and no statement is given, it is revoked from there on, or
                earlier, already, or no key of this node may revoke.
            InvalidInputError: the statement is not one about this revocation by a key that may revoke.
            ClockSkewError: ``from_hlc`` lies ahead.
            DatabaseUnavailableError: Postgres cannot be reached; nothing has changed.
            DurabilityTimeoutError: it is in this node's log, and will count once Postgres answers.
        """
        history = await self.history()
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
        await self._change(
            SystemAction.KEY_REVOKED,
            revoked_facts(key_id, self.node.node_id, start, reason),
            history,
            statement,
            f"key {key_id} will be revoked from HLC {start} on once Postgres answers",
        )
        return start

    async def vouched_here(self, action: SystemAction, facts: Facts, history: KeyHistory) -> Facts:
        """``facts`` with a statement by a key that this node signs with.

        Raises:
            KeyConflictError: none of them may vouch for anything.
        """
        vouched = await self.stated(action, facts, history, self._held.signers())
        if key_statement.FIELD not in vouched:
            why = self.keys.not_admitted or self.keys.fault or "they have ended or were revoked"
            raise KeyConflictError(
                f"no key that this node signs with may vouch for this: {why}. Ask another node, or use --root-key"
            )
        return vouched

    async def _change(
        self,
        action: SystemAction,
        facts: Facts,
        history: KeyHistory,
        statement: Mapping[str, object] | None,
        late: str,
    ) -> None:
        """Chain the change with a statement by a key that may change keys; ``late`` is the error text if that takes too
        long."""
        if statement is not None:
            vouched: Facts = {**facts, key_statement.FIELD: statement}
            if not history.would_count(action, vouched):
                raise InvalidInputError(
                    "statement: it is not one about this key, in this ledger, by a key that may change keys now",
                    ("statement",),
                )
        else:
            vouched = await self.vouched_here(action, facts, history)
        await self.in_time(self.enter(action, vouched), DurabilityTimeoutError(late))


def _assign(keys: NodeKeys, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        setattr(keys, name, value)


def _generated(path: Path, algorithm: str) -> FileSigner:
    """A new key in a new file. Blocks.

    Raises:
        SigningUnavailableError: the file cannot be made.
    """
    try:
        return private_keys.generate(path, algorithm)
    except ConfigurationError as error:
        raise SigningUnavailableError(str(error)) from error
