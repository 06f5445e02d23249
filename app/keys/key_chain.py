"""What the chain of ``_system`` says of keys, as far as a node has found that chain whole.

An entry counts when it is part of the chain as this node knows it: every row from seq 1 on was read, holds together
and follows the one before it; up to the newest checkpoint beside the WAL they make the tree that was signed, and beyond
it they go on without a gap to the head. So a row that somebody put behind the head, or in place of another, says
nothing, and one that was taken out is missed.

Where a row does not hold together, the entries that the stored tree proves to be in the checkpoint still count, but it
is not known what else was said: ``fault`` says so, and no signature counts as good meanwhile.

Rows are read once. What the checkpoint covers is not read again while the process lives; what lies beyond it is, when
something does not fit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import structlog

from app.store import keys as store
from app.store import notary as notary_store
from ledger import merkle
from ledger.errors import LedgerError
from ledger.machines.events import SYSTEM_TENANT
from ledger.merkle import tiles
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryChecker, EntryRow
from ledger.verification.verdict import Findings
from signing import checkpoint, note
from signing.key_entries import event_of, holds_together
from signing.key_history import KeyEvent, KeyHistory, history_of

if TYPE_CHECKING:
    from app.keys.ended_keys import EndedKeys
    from app.keys.root_key import RootKey
    from app.store import Connection
    from signing.checkpoint import Checkpoint

ENTRIES_A_READ = 1000
"""Entries read at once."""
READ_AGAIN_PAUSE_S = 30.0
"""Shortest time between two readings from the last proved entry on while the chain is damaged."""

_SEQ, _VERSION, _LINK = map(ENTRY_COLUMNS.index, ("seq", "link_version", "chain_link"))

log = structlog.get_logger()


class _Read(NamedTuple):
    """A beginning of the chain that holds together: its size, last link, tree, and what it says of keys."""

    size: int
    link: str | None
    may_be_v1: bool
    hashes: tuple[bytes, ...]
    """Of the frontier of its tree."""
    events: tuple[KeyEvent, ...]


_NOTHING = _Read(0, None, True, (), ())
_NO_KEYS = history_of(())


class KeyChain:
    """Follows the chain of ``_system`` for one node. Belongs to one event loop."""

    def __init__(self, load_checkpoint: Callable[[str], str | None], ended: EndedKeys, root: RootKey) -> None:
        """``load_checkpoint`` gives a tenant's newest note beside the WAL."""
        self.ended = ended
        self.root = root
        self.fault: str | None = None
        """Why it cannot be said what all entries about keys say, None while it can; as of the last reading."""
        self.is_of_another_root = False
        """Whether the chain, found whole, begins with another key than this node knows its ledger by."""
        self._load_checkpoint = load_checkpoint
        self._proved = _NOTHING
        """What makes the tree of a checkpoint of this node."""
        self._read = _NOTHING
        """The same, and what follows it without a gap."""
        self._folded: tuple[tuple[KeyEvent, ...], KeyHistory] = ((), _NO_KEYS)
        self._read_again_s = 0.0
        self._strays: list[int] = []
        self._one_at_a_time = asyncio.Lock()

    async def history(self, connection: Connection) -> KeyHistory:
        """What the entries about keys add up to; nothing, where the ledger began with another key than this node knows.

        That is a fault, once the chain was found whole: a chain with another root is another ledger.
        """
        async with self._one_at_a_time:
            await self._name_strays(connection)
            events, fault = await self._events(connection)
            if events != self._folded[0]:
                self._folded = events, history_of(events)
            history = self._folded[1]
            if fault is None and history.root_key_id is not None:
                await self.root.learn(history.root_key_id)
            is_other = history.root_key_id is not None and self.root.key_id not in (None, history.root_key_id)
            self.is_of_another_root = is_other and fault is None
            self._found(self.root.refusal(history.root_key_id) if self.is_of_another_root else fault)
            return _NO_KEYS if is_other else history

    async def _events(self, connection: Connection) -> tuple[tuple[KeyEvent, ...], str | None]:
        """What the chain says of keys, in its order, and why it cannot be said whether that is all."""
        try:
            # The checkpoint first, so that it is never newer than the rows it is compared with.
            kept = self._kept()
        except (LedgerError, UnicodeDecodeError) as error:
            return self._proved.events, f"the checkpoint of {SYSTEM_TENANT} beside the WAL cannot be read: {error}"
        was_ahead = self._read.size > self._proved.size
        fault = await self._follow(connection, kept)
        if fault is not None and was_ahead and time.monotonic() >= self._read_again_s:
            self._read_again_s = time.monotonic() + READ_AGAIN_PAUSE_S
            self._read = self._proved
            fault = await self._follow(connection, kept)
        if kept is not None and self._proved.size < kept.size:
            return (*self._proved.events, *await self._proved_singly(connection, kept)), fault
        return self._read.events, fault

    def _kept(self) -> Checkpoint | None:
        text = self._load_checkpoint(SYSTEM_TENANT)
        return None if text is None else checkpoint.parse(note.parse(text).text)

    def _found(self, fault: str | None) -> None:
        if fault != self.fault:
            if fault is None:
                log.info("key_entries_established")
            else:
                log.error("key_entries_not_established", tenant_id=SYSTEM_TENANT, error=fault)
        self.fault = fault

    async def _follow(self, connection: Connection, kept: Checkpoint | None) -> str | None:
        """Read on, to the checkpoint and then to the head; what is wrong with the chain."""
        head = await store.system_head(connection)
        if kept is not None and head.seq < kept.size:
            return f"the chain of {SYSTEM_TENANT} ends at seq {head.seq}, this node signed it up to {kept.size}"
        if kept is not None and kept.size > self._proved.size:
            if self._read.size > kept.size:
                self._read = self._proved
            fault = await self._read_to(connection, kept.size)
            if fault is not None:
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
        """Read on up to ``to_seq``; why not so far."""
        while (at := self._read).size < to_seq:
            wanted = min(ENTRIES_A_READ, to_seq - at.size)
            rows = await notary_store.read_entries(connection, SYSTEM_TENANT, at.size + 1, wanted)
            if not rows:
                return f"seq {at.size + 1} of {SYSTEM_TENANT} is missing"
            findings = Findings()
            EntryChecker(
                SYSTEM_TENANT, findings, first_seq=at.size + 1, prev_link=at.link, may_be_v1=at.may_be_v1
            ).check(rows)
            found = findings.first_break()
            self._take([row for row in rows if found is None or row[_SEQ] < found.seq])
            if found is not None:
                return f"{found.kind} at seq {found.seq} of {SYSTEM_TENANT}: {found.detail}"
            await asyncio.sleep(0)
        return None

    def _take(self, rows: list[EntryRow]) -> None:
        """``rows`` follow what was read and hold together."""
        if not rows:
            return
        frontier = merkle.Frontier.restore(self._read.size, self._read.hashes)
        frontier.extend(merkle.leaf_hash(bytes.fromhex(row[_LINK])) for row in rows)
        events = tuple(event for event in map(event_of, rows) if event is not None)
        self._read = _Read(
            size=frontier.size,
            link=rows[-1][_LINK],
            may_be_v1=rows[-1][_VERSION] == 1,
            hashes=tuple(frontier.hashes),
            events=(*self._read.events, *events),
        )

    async def _proved_singly(self, connection: Connection, kept: Checkpoint) -> list[KeyEvent]:
        """What the entries say that the stored tree proves to be in the checkpoint, beyond what was read."""
        rows = [
            row
            for row in await store.list_entries(connection)
            if self._proved.size < row[_SEQ] <= kept.size and holds_together(row)
        ]
        wanted = {each for row in rows for each in tiles.inclusion_tiles(row[_SEQ] - 1, kept.size)}
        stored = await notary_store.read_tiles(connection, SYSTEM_TENANT, wanted)
        proved = [row for row in rows if _is_in_tree(row, kept, stored)]
        return [event for event in map(event_of, proved) if event is not None]

    async def _name_strays(self, connection: Connection) -> None:
        strays = await store.list_strays(connection)
        if strays != self._strays:
            log.error(
                "chain_break_found", tenant_id=SYSTEM_TENANT, seqs=strays, error="entries about keys beyond the head"
            )
        self._strays = strays


def _is_in_tree(row: EntryRow, kept: Checkpoint, stored: dict[tiles.TileCoordinates, bytes]) -> bool:
    try:
        index = row[_SEQ] - 1
        proof = tiles.inclusion_proof(index, kept.size, lambda level, at: stored[level, at])
        merkle.verify_inclusion(index, kept.size, merkle.leaf_hash(bytes.fromhex(row[_LINK])), proof, kept.root)
    except (LedgerError, KeyError, ValueError, TypeError):
        return False
    return True
