"""The keys that a ledger trusts, by the entries of ``_system`` that a node has verified.

An entry is trusted if it is part of the chain as this node knows it. Every row from seq 1 on was read, matches its
digest and link, and follows the row before it. The rows up to the newest checkpoint beside the WAL make the tree that
was signed. The rows after it continue without a gap to the head. So a row that an attacker adds after the head, or puts
in place of another, has no effect, and a removed row is noticed.

If a row is damaged, the entries that the stored tree proves to be in the checkpoint are still trusted, and so are all
revocations of tokens. The other entries are unknown: ``fault`` says so, and no signature is accepted as valid
meanwhile.

Rows are read once. Rows that the checkpoint covers are not read again while the process lives; later rows are, if a
check fails.

A node cannot admit itself: its key is trusted once the root of the ledger, or a key admitted before, has admitted it. A
key that no entry introduces yet is trusted already if this node can write the entry that will admit it: as the first
node of a ledger, or with the signature of a key that it signs with or signed with last.

The rows of ``signing_keys`` are a cache, which an administrator of the database can edit. Only two of their columns are
used: the node, and the start of validity if it is not later than the key's entry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

from app.runtime.logs import log
from app.store import Connection
from app.store import keys as store
from app.store import notary as notary_store
from app.store.keys import KeyRow
from app.store.reading import Pool, reading, run_in
from app.trust.node_keys import NodeKeys
from ledger import merkle
from ledger.errors import KeyConflictError, LedgerError, SignatureError, UnknownKeyError
from ledger.facts.events import SYSTEM_TENANT, SystemAction
from ledger.hlc import Hlc
from ledger.merkle import tiles
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryRow, first_break_in, holds_together
from ledger.verification.tree_check import TreeHead
from ledger.verification.verdict import damaged
from signing import checkpoint
from signing.checkpoint import Checkpoint
from signing.key_history import KeyEvent, KeyFold, KeyHistory, KnownKey, event_of, history_of, time_of
from signing.key_statement import TOKEN_PREFIX, Anchor
from signing.keys import ED25519, Keyring, KnownCallers, PublicKey
from signing.note import VerifierKey

ENTRIES_A_READ = 1000
"""Entries read at once."""
READ_AGAIN_PAUSE_S = 30.0
"""Shortest time between two reads from the last proved entry on while the chain is damaged."""
LOG_KEYS_MAX = 16
"""Most verifier keys named for one log; older ones are still trusted, by the list of keys."""

_SEQ, _VERSION, _LINK = map(ENTRY_COLUMNS.index, ("seq", "link_version", "chain_link"))
_ACTION, _JOB = map(ENTRY_COLUMNS.index, ("action", "job_id"))


class _Read(NamedTuple):
    """A verified prefix of the chain: its size, last link, tree, and its events about keys."""

    size: int
    link: str | None
    may_be_v1: bool
    hashes: tuple[bytes, ...]
    """Hashes of the tree's frontier."""
    events: tuple[KeyEvent, ...]


_NOTHING = _Read(0, None, True, (), ())
_NO_KEYS = history_of(())
_NO_ROW = KeyRow(None, None, None, None, None)


class PublishedKey(NamedTuple):
    """A key with its validity; the node on which it signs or signed, None if unknown; for what it signs now; the key
    that admitted it, None for the root; and the entry that introduced it. A key that is about to be admitted has
    neither of the last two."""

    key: PublicKey
    node_id: str | None
    signs_snapshots: bool
    signs_checkpoints: bool
    revocation_reason: str | None
    admitted_by: str | None
    introduced_by: Anchor | None


class PublishedKeys(NamedTuple):
    """Keys that may be trusted, oldest first; keys that wait to be admitted; the ledger's first key; its callers."""

    admitted: list[PublishedKey]
    waiting: list[KnownKey]
    root_key_id: str | None
    callers: KnownCallers


class KeyChain:
    """Follows the chain of ``_system`` for one node, whose own keys are ``keys``. Belongs to one event loop."""

    def __init__(self, load_checkpoint: Callable[[str], str | None], keys: NodeKeys) -> None:
        """``load_checkpoint`` gives a tenant's newest note beside the WAL."""
        self.keys = keys
        self.load_checkpoint = load_checkpoint
        self.fault: str | None = None
        """Why the entries about keys are not all known, None while they are; as of the last read."""
        self.is_of_another_root = False
        """Whether the chain, verified whole, begins with another root key than this node knows."""
        self._proved = _NOTHING
        """The prefix that makes the tree of a checkpoint of this node."""
        self._read = _NOTHING
        """The same, with the rows that follow it without a gap."""
        self._fold = KeyFold()
        self._read_again_s = 0.0
        self._strays: list[int] = []
        self._one_at_a_time = asyncio.Lock()

    # --- what follows from it ---------------------------------------------------------------------

    async def history(self, connection: Connection) -> KeyHistory:
        """The history that the entries about keys fold to; empty if the ledger began with another key than this node
        knows. That is a fault once the chain was verified whole: a chain with another root is another ledger.
        """
        async with self._one_at_a_time:
            events, fault = await self._events(connection)
            history = self._fold.history(events)
            root_key_id = history.root_key_id
            if fault is None and root_key_id is not None:
                await self.keys.learn_root(root_key_id)
            is_other = root_key_id is not None and self.keys.root_key_id not in (None, root_key_id)
            self.is_of_another_root = is_other and fault is None
            if self.is_of_another_root:
                fault = (
                    f"the chain of _system begins with key {root_key_id}, and this node knows its ledger by root key "
                    f"{self.keys.root_key_id}: the chain was replaced, or this is another ledger"
                )
            self._found(fault)
            return _NO_KEYS if is_other else history

    async def counting(self, connection: Connection) -> dict[str, PublicKey]:
        """Every trusted key by id: admitted keys, and this node's own that are about to be. None is valid for longer
        than this node has seen."""
        return await self.keys.narrowed(self._counting(await self.history(connection)))

    def admission_fault(self, history: KeyHistory) -> str | None:
        """Why the node signs nothing, and what to do; None when its keys are trusted."""
        counting = self._counting(history)
        if not (missing := [signer.key_id for signer in self.keys.signers() if signer.key_id not in counting]):
            return None
        commands = " && ".join(f"tally keys admit {key_id}" for key_id in missing)
        return (
            f"this node signs nothing: {' and '.join(missing)}, which it would sign with, is not admitted to the "
            "ledger. Compare with what tally keys list says, then run, against a node whose key is admitted or with "
            f"--root-key FILE: {commands}"
        )

    def _counting(self, history: KeyHistory) -> dict[str, PublicKey]:
        own = {signer.key_id: signer.public_key for signer in self.keys.signers()}
        if history.root_key_id is None:
            may_vouch = self.keys.root_key_id is None or self.keys.root_key_id in own
        else:
            vouching = {*own, *(item.key_id for item in self.keys.retired if item.statement is not None)}
            may_vouch = not vouching.isdisjoint(history.authorities)
        early = {key_id: key for key_id, key in own.items() if may_vouch and key_id not in history.waiting}
        return early | history.keys()

    async def published(self, connection: Connection, history: KeyHistory | None = None) -> PublishedKeys:
        """The keys of the ledger, with the nodes that their rows name; from ``history`` if one was just read."""
        rows = {row.key_id: row for row in await store.list_rows(connection)}
        if history is None:
            history = await self.history(connection)
        counting = await self.keys.narrowed(self._counting(history))
        order = [
            *(key_id for key_id in rows if key_id in counting),
            *(key_id for key_id in counting if key_id not in rows),
        ]
        return PublishedKeys(
            [_published(counting[key_id], rows.get(key_id, _NO_ROW), history) for key_id in order],
            list(history.waiting.values()),
            self.keys.root_key_id or history.root_key_id,
            history.callers,
        )

    # --- following it -----------------------------------------------------------------------------

    async def _events(self, connection: Connection) -> tuple[tuple[KeyEvent, ...], str | None]:
        """The chain's events about keys, in its order, and why they may not be all."""
        try:
            # The checkpoint first, so that it is never newer than the rows it is compared with.
            text = self.load_checkpoint(SYSTEM_TENANT)
            kept = None if text is None else checkpoint.read(text)
        except (LedgerError, UnicodeDecodeError) as error:
            unread = f"the checkpoint of {SYSTEM_TENANT} beside the WAL cannot be read: {error}"
            return (*self._proved.events, *_revocations(await store.list_entries(connection))), unread
        was_ahead = self._read.size > self._proved.size
        fault = await self._follow(connection, kept)
        if fault is not None and was_ahead and time.monotonic() >= self._read_again_s:
            self._read_again_s = time.monotonic() + READ_AGAIN_PAUSE_S
            self._read = self._proved
            fault = await self._follow(connection, kept)
        if fault is None:
            return self._read.events, None
        entries = await store.list_entries(connection)
        found = self._read.events
        if kept is not None and self._proved.size < kept.size:
            found = (*self._proved.events, *await self._proved_singly(connection, kept, entries))
        return (*found, *_revocations(entries)), fault

    def _found(self, fault: str | None) -> None:
        if fault != self.fault:
            if fault is None:
                log.info("key_entries_established")
            else:
                log.error("key_entries_not_established", tenant_id=SYSTEM_TENANT, error=fault)
        self.fault = fault

    async def _follow(self, connection: Connection, kept: Checkpoint | None) -> str | None:
        """Continue to the checkpoint and then to the head. Returns the fault of the chain."""
        head = await store.system_head(connection)
        if head.strays != self._strays:
            self._strays = head.strays
            log.error(
                "chain_break_found",
                tenant_id=SYSTEM_TENANT,
                seqs=head.strays,
                error="entries about keys beyond the head",
            )
        if kept is not None and head.seq < kept.size:
            return f"the chain of {SYSTEM_TENANT} ends at seq {head.seq}, this node signed it up to {kept.size}"
        if kept is not None and kept.size > self._proved.size:
            if self._read.size > kept.size:
                self._read = self._proved
            if (fault := await self._read_to(connection, kept.size)) is not None:
                return fault
            if merkle.Frontier.restore(self._read.size, self._read.hashes).root() != kept.root:
                self._read = self._proved
                return f"the first {kept.size} entries of {SYSTEM_TENANT} are not those that this node signed"
            self._proved = self._read
        fault = await self._read_to(connection, head.seq)
        if fault is None and (self._read.size, self._read.link) != (head.seq, head.chain_link):
            return f"the head of {SYSTEM_TENANT} at seq {head.seq} is not the entry that was read there"
        return fault

    async def _read_to(self, connection: Connection, to_seq: int) -> str | None:
        """Continue up to ``to_seq``. Returns the fault that stopped it."""
        while (at := self._read).size < to_seq:
            rows = await notary_store.read_entries(
                connection, SYSTEM_TENANT, at.size + 1, min(ENTRIES_A_READ, to_seq - at.size)
            )
            if not rows:
                return f"seq {at.size + 1} of {SYSTEM_TENANT} is missing"
            found = first_break_in(
                SYSTEM_TENANT, rows, first_seq=at.size + 1, prev_link=at.link, may_be_v1=at.may_be_v1
            )
            self._take([row for row in rows if found is None or row[_SEQ] < found.seq])
            if found is not None:
                return f"{found.kind} at seq {found.seq} of {SYSTEM_TENANT}: {found.detail}"
            await asyncio.sleep(0)
        return None

    def _take(self, rows: list[EntryRow]) -> None:
        """Append verified ``rows``, which follow the rows read before."""
        if not rows:
            return
        frontier = merkle.Frontier.restore(self._read.size, self._read.hashes)
        frontier.extend(merkle.leaf_hashes([bytes.fromhex(row[_LINK]) for row in rows]))
        self._read = _Read(
            size=frontier.size,
            link=rows[-1][_LINK],
            may_be_v1=rows[-1][_VERSION] == 1,
            hashes=tuple(frontier.hashes),
            events=(*self._read.events, *(event for event in map(event_of, rows) if event is not None)),
        )

    async def _proved_singly(
        self, connection: Connection, kept: Checkpoint, entries: Iterable[EntryRow]
    ) -> list[KeyEvent]:
        """Events of entries after the read prefix that the stored tree proves to be in the checkpoint."""
        rows = [
            row for row in entries if self._proved.size < row[_SEQ] <= kept.size and holds_together(SYSTEM_TENANT, row)
        ]
        stored = await notary_store.read_tiles(
            connection,
            SYSTEM_TENANT,
            {each for row in rows for each in tiles.inclusion_tiles(row[_SEQ] - 1, kept.size)},
        )
        proved = [row for row in rows if tiles.has_leaf(row[_SEQ] - 1, kept.size, kept.root, row[_LINK], stored)]
        return [event for event in map(event_of, proved) if event is not None]


def _revocations(entries: Iterable[EntryRow]) -> Iterator[KeyEvent]:
    """Revocations of tokens, verified or not, at any seq. In a damaged chain nothing shows which are part of it, and an
    event that only removes trust needs no proof."""
    for row in entries:
        if row[_ACTION] == SystemAction.TOKEN_REVOKED:
            yield KeyEvent(
                Anchor(row[_SEQ], ""),
                Hlc(0, 0, "damaged"),
                SystemAction.TOKEN_REVOKED,
                {"token_id": row[_JOB].removeprefix(TOKEN_PREFIX)},
            )


def _published(key: PublicKey, row: KeyRow, history: KeyHistory) -> PublishedKey:
    known = history.admitted.get(key.key_id)
    if row.not_before is not None:
        introduced = None if known is None else time_of(known.introduced.hlc.physical_ms)
        latest = [time for time in (key.not_after, introduced) if time is not None]
        key = replace(key, not_before=min((row.not_before, *latest)))
    return PublishedKey(
        key,
        row.node_id if known is None else known.node_id,
        bool(row.signs_snapshots),
        bool(row.signs_checkpoints),
        history.reasons.get(key.key_id),
        None if known is None else known.admitted_by,
        None if known is None else known.introduced.at,
    )


@dataclass(eq=False)
class Trust:
    """The trusted keys of a node's ledger and its logs, read at each call."""

    chain: KeyChain
    pool: Pool
    origin: Callable[[str], str]
    """Gives the name of a tenant's log."""

    def fault(self) -> str | None:
        """Why the entries about keys are not all known, None while they are."""
        return self.chain.fault

    async def published(self) -> PublishedKeys:
        """Every key that is or was trusted in this ledger, oldest first, and the keys that were not admitted.

        Raises:
            DatabaseUnavailableError: Postgres cannot be reached.
        """
        return await run_in(reading(self.pool), self.chain.published)

    async def keyring(self) -> Keyring:
        """The trusted keys of the ledger: those that the chain of ``_system`` admits."""
        published = await self.published()
        keys = [item.key for item in published.admitted]
        return Keyring(keys, root_key_id=published.root_key_id, callers=published.callers)

    async def signing_now(self) -> Keyring:
        """The keys that may sign checkpoints now: neither ended nor revoked."""
        now = datetime.now(UTC)
        return Keyring(
            key
            for key in await self.keyring()
            if key.revoked_from_hlc is None and (key.not_after is None or key.not_after > now)
        )

    async def keys_of(self, tenant_id: str) -> Keyring:
        """The published keys, and the verifier keys of the tenant's log."""
        ring = await self.keyring()
        return Keyring(ring, self.log_verifier_keys(tenant_id, ring), callers=ring.callers)

    def log_verifier_keys(self, tenant_id: str, ring: Iterable[PublicKey], algorithm: str = ED25519) -> list[str]:
        """C2SP verifier keys of the tenant's log, ``origin+id+key``, of all nodes, this node's first, then the
        newest."""
        own_ids = {signer.key_id for signer in self.chain.keys.checkpoint_signers}
        counting = sorted(
            (key for key in ring if key.algorithm == algorithm and key.revoked_from_hlc is None),
            key=lambda key: key.key_id in own_ids,
        )
        return [VerifierKey.of(self.origin(tenant_id), key).text() for key in reversed(counting[-LOG_KEYS_MAX:])]

    async def log_keys(self, tenant_id: str) -> list[VerifierKey]:
        """All keys that may have signed a checkpoint of the tenant's log, under its name."""
        return checkpoint.log_keys(self.origin(tenant_id), await self.keyring())

    def checkpoints(self, tenant_id: str, ring: Keyring) -> list[TreeHead]:
        """The newest checkpoint beside the WAL; one that cannot be opened is reported as such."""
        try:
            if (text := self.chain.load_checkpoint(tenant_id)) is None:
                return []
            origin = self.origin(tenant_id)
            # The folder is the node's own, so a checkpoint that it signed itself is usable, admitted or not.
            found = checkpoint.open_checkpoint(
                text,
                checkpoint.log_keys(origin, (*(signer.public_key for signer in self.chain.keys.signers()), *ring)),
                origin=origin,
            )
        except SignatureError as error:
            log.error("checkpoint_unreadable", tenant_id=tenant_id, error=str(error))
            return [TreeHead(0, b"", "node", str(error))]
        return [TreeHead(found.size, found.root, "node")]


def open_stored(tenant_id: str, note: str, keys: Keyring | Sequence[VerifierKey], origin: str) -> Checkpoint:
    """Open the newest stored checkpoint and verify that this log signed it with a trusted key.

    Raises:
        KeyConflictError: the key that signed it is not trusted.
        ChainDamagedError: it is no checkpoint of this log.
    """
    try:
        return checkpoint.open_checkpoint(note, keys, origin=origin)
    except UnknownKeyError as error:
        raise KeyConflictError(
            f"the newest checkpoint of tenant {tenant_id} is signed by no key that counts: {error}. See tally keys "
            "list; the next one that a node signs whose key is admitted takes its place"
        ) from error
    except SignatureError as error:
        raise damaged(tenant_id, "tree", 0, f"the stored checkpoint is not one of this log: {error}") from error
