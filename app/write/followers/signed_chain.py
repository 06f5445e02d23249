"""Compares stored chains with signed checkpoints and with the entries that this node made.

*The chain.* Checks whether a chain still is the one that a checkpoint signed. Before the notary signs more of a chain,
the new tree must extend the signed one and consist of the followed entries. Rows and tiles come from a database that an
attacker may have changed or rolled back. Trusted are the checkpoint beside the WAL, the tree in memory, and the links
that this node chained itself. The stored tree is trusted only if it proves that the entry at the checkpoint's size is
the signed one.

*The node's own entries* (``OwnEntries``). An attacker who can write to the database can append a consistent row in the
name of this node: the link is a hash without a secret. Such a row is not signed. The node compares each entry in its
name with knowledge that the database cannot change::

    chained since its start    the seqs, in memory, until a checkpoint beside the WAL covers them
    chained before its start   the WAL, which keeps every record until it is signed: by HLC, job, action and digest

An entry with an ``origin`` was imported and does not claim that this node made it here. Entries of other nodes cannot
be checked here. An entry older than the WAL is trusted only in a chain without a stored checkpoint: this node never
signed that chain, or its checkpoints were discarded.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import orjson

from app.runtime.logs import log
from app.store import Connection
from app.store import notary as store
from app.store.notary import GrownTree, LinkRow, LockedTree, TileCoordinates
from ledger import merkle
from ledger.chain import record
from ledger.errors import ChainBrokenError, LedgerError, ProofError, StoredTreeBehindError, StoredTreeError, reported_as
from ledger.facts.events import ACTIONS, VERDICTS, CommitmentAction, SystemAction
from ledger.machines.promises import proposed_payload
from ledger.merkle import tiles
from ledger.merkle.tiles import TileTree
from ledger.positions import Lsn
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryRow, first_break_in
from ledger.verification.verdict import Break
from signing.checkpoint import Checkpoint
from signing.checkpoint import read as read_checkpoint
from wal import reader as wal_reader
from wal.segment import list_segments

LINKS_A_READ = 10_000
"""Links read at once when a root is computed from the chain."""
ENTRIES_A_READ = 1000
"""Entries read back at once when a tree is rebuilt."""

_SEQ, _T_HLC, _PHYSICAL, _NODE, _JOB = map(ENTRY_COLUMNS.index, ("seq", "t_hlc", "hlc_physical", "hlc_node", "job_id"))
_ACTION, _DIGEST, _PAYLOAD, _ORIGIN, _CHAIN_LINK = map(
    ENTRY_COLUMNS.index, ("action", "payload_digest", "payload", "origin", "chain_link")
)
_MARK_BYTES = 16


async def tree_agrees(connection: Connection, tenant_id: str, checkpoint: Checkpoint) -> bool:
    """Whether the stored tree proves that the entry at the checkpoint's size is the signed one. If that entry has left
    with a prune: that the last one that left follows from it."""
    if checkpoint.size == 0:
        return True
    if (link := await store.read_link(connection, tenant_id, checkpoint.size)) is not None:
        stored = await store.read_tiles(connection, tenant_id, leaf_tiles(checkpoint))
        return is_in_tree(link, checkpoint, stored)
    try:
        left = await left_tree(connection, tenant_id)
        if left.size < checkpoint.size:
            return False
        wanted = tiles.consistency_tiles(checkpoint.size, left.size)
        get_tile = tiles.getter(await store.read_tiles(connection, tenant_id, wanted))
        proof = tiles.consistency_proof(checkpoint.size, left.size, get_tile)
        merkle.verify_consistency(checkpoint.size, left.size, checkpoint.root, left.tree.root(), proof)
    except (StoredTreeError, ProofError):
        return False
    return True


class LeftTree(NamedTuple):
    """The tree of the entries that left a chain, which begins again behind it."""

    tree: TileTree
    link: str | None
    """Of its last entry."""

    @property
    def size(self) -> int:
        return self.tree.size


async def left_tree(connection: Connection, tenant_id: str) -> LeftTree:
    """The stored tree of the entries that left with a prune; empty if none did.

    Raises:
        StoredTreeError: its tiles are damaged, or their last leaf is not the link that the first entry names.
    """
    left = await store.read_left_link(connection, tenant_id)
    if left is None:
        return LeftTree(TileTree(0, {}), None)
    seq, link = left
    wanted = {*tiles.right_edge(seq), *tiles.root_tiles(seq), *tiles.inclusion_tiles(seq - 1, seq)}
    stored = await store.read_tiles(connection, tenant_id, wanted)
    with reported_as(
        StoredTreeError, f"the stored tree of the entries of tenant {tenant_id} that left is damaged", ProofError
    ):
        tree = TileTree(seq, stored)
        if not tiles.has_leaf(seq - 1, seq, tree.root(), link, stored):
            raise ProofError(f"its leaf {seq - 1} is not the link that seq {seq + 1} names")
    return LeftTree(tree, link)


def leaf_tiles(checkpoint: Checkpoint) -> set[TileCoordinates]:
    """The tiles that prove the last leaf of the tree that ``checkpoint`` signed."""
    return tiles.root_tiles(checkpoint.size) | tiles.inclusion_tiles(checkpoint.size - 1, checkpoint.size)


def is_in_tree(link: str | None, checkpoint: Checkpoint, stored: Mapping[TileCoordinates, bytes]) -> bool:
    """Whether these tiles prove ``link`` to be the last leaf of the tree that ``checkpoint`` signed."""
    return tiles.has_leaf(checkpoint.size - 1, checkpoint.size, checkpoint.root, link, stored)


async def root_of_chain(connection: Connection, tenant_id: str, size: int) -> bytes | None:
    """Root over the links of the first ``size`` entries, of those that left by their tiles; None if one is missing or
    malformed."""
    try:
        left = await left_tree(connection, tenant_id)
        if left.size >= size:
            stored = await store.read_tiles(connection, tenant_id, tiles.root_tiles(size))
            return tiles.root_at(size, tiles.getter(stored))
    except (StoredTreeError, ProofError):
        return None
    tree = left.tree
    while tree.size < size:
        wanted = min(LINKS_A_READ, size - tree.size)
        rows = await store.read_links(connection, tenant_id, tree.size + 1, wanted)
        if [row.seq for row in rows] != list(range(tree.size + 1, tree.size + wanted + 1)):
            return None
        try:
            tree.append_leaf_hashes(merkle.leaf_hashes([bytes.fromhex(row.chain_link) for row in rows]))
        except (ValueError, TypeError):
            return None
        tree.forget_changed()
    return tree.root()


async def extended_tree(connection: Connection, stored: LockedTree, kept: str | None) -> TileTree:
    """The stored tree, proved to extend that of ``kept``, the newest checkpoint that this node signed.

    Raises:
        StoredTreeBehindError: it is shorter.
        StoredTreeError: it does not extend it, or cannot be read.
    """
    size, anchor = stored.tree_size, _anchor(kept)
    if not isinstance(size, int):  # an administrator of the database can drop the NOT NULL
        raise StoredTreeError(f"the stored tree of tenant {stored.tenant_id} has no size")
    if anchor is not None and size < anchor.size:
        raise StoredTreeBehindError(
            f"the stored tree of tenant {stored.tenant_id} has size {size}, this node signed one of size {anchor.size}"
        )
    with reported_as(
        StoredTreeError,
        f"the stored tree of tenant {stored.tenant_id} is damaged",
        LedgerError,
        TypeError,
        ValueError,
    ):
        wanted = {*tiles.right_edge(size), *tiles.root_tiles(size), *tiles.root_tiles(anchor.size if anchor else 0)}
        found = await store.read_tiles(connection, stored.tenant_id, wanted)
        if anchor is not None and tiles.root_at(anchor.size, tiles.getter(found)) != anchor.root:
            raise ProofError(f"its first {anchor.size} leaves are not those that this node signed")
        tree = TileTree(size, found)
        if tree.root().hex() != stored.root_hash:
            raise ProofError(f"its root is {stored.root_hash}, that of its tiles {tree.root().hex()}")
    return tree


async def rebuild_tree(connection: Connection, tenant_id: str, kept: str | None) -> None:
    """Store the tree of the entries that ``kept`` covers, rebuilt from the chain; empty without ``kept``. Every row is
    checked. The tiles of entries that left stay as they are.

    Raises:
        StoredTreeError: the tiles of entries that left are damaged.
        ChainBrokenError: the chain does not give the signed tree; the transaction MUST be rolled back.
    """
    anchor = _anchor(kept)
    tree, prev_link = await left_tree(connection, tenant_id) if anchor is not None else LeftTree(TileTree(0, {}), None)
    while anchor is not None and tree.size < anchor.size:
        rows = await store.read_entries(
            connection, tenant_id, tree.size + 1, min(ENTRIES_A_READ, anchor.size - tree.size)
        )
        if not rows:
            raise not_signed(
                tenant_id, f"its chain ends at seq {tree.size}, but this node signed it up to {anchor.size}"
            )
        links = checked_links(tenant_id, tree.size, prev_link, rows, ())
        tree.append_leaf_hashes(merkle.leaf_hashes([bytes.fromhex(link.chain_link) for link in links]))
        prev_link = links[-1].chain_link
        await _store(connection, GrownTree(tenant_id, tree, kept))
        tree.forget_changed()
    if anchor is None:
        await _store(connection, GrownTree(tenant_id, tree, None))
    elif tree.root() != anchor.root:
        raise not_signed(tenant_id, f"its first {anchor.size} entries are not those that this node signed")


async def _store(connection: Connection, tree: GrownTree) -> None:
    for tenant_id in await store.store_trees(connection, [tree]):
        raise not_stored(tenant_id, "its Merkle tree")


def not_signed(
    tenant_id: str, why: str, what_to_do: str = "; run tally verify", found: Break | None = None
) -> ChainBrokenError:
    """The error when a tenant is signed no further, because of the break ``found`` if its place is known."""
    return ChainBrokenError(tenant_id, f"tenant {tenant_id} is signed no further: {why}{what_to_do}", found)


def not_stored(tenant_id: str, what: str) -> ChainBrokenError:
    """The error when PostgreSQL did not store ``what`` of a tenant and reported no error."""
    return not_signed(
        tenant_id,
        f"PostgreSQL did not store {what}, without an error: a trigger or a rule drops rows",
        ". Remove what migrations/sql does not have",
    )


def _anchor(kept: str | None) -> Checkpoint | None:
    return None if kept is None else read_checkpoint(kept)


def checked_links(
    tenant_id: str, tree_size: int, prev_link: str | None, rows: Sequence[EntryRow], ours: Sequence[LinkRow]
) -> list[LinkRow]:
    """The links of ``rows``, to be appended to a tree of ``tree_size``. Every row must be consistent and follow the one
    before it, the first row ``prev_link``. Rows that this node chained, ``ours``, must be as it chained them.

    Raises:
        ChainBrokenError: names the first row that fails.
    """
    if not rows:
        return []
    if (found := first_break_in(tenant_id, rows, first_seq=tree_size + 1, prev_link=prev_link)) is not None:
        raise not_signed(tenant_id, f"{found.kind} at seq {found.seq}, {found.detail}", found=found)
    links = [LinkRow(row[_SEQ], row[_T_HLC], row[_CHAIN_LINK], row[_JOB]) for row in rows]
    known = {link.seq: link for link in ours}
    for link in links:
        if known.get(link.seq, link) != link:
            raise not_signed(tenant_id, f"seq {link.seq} is not the entry that this node chained")
    return links


def unforeseen(tenant_id: str, error: Exception) -> ChainBrokenError:
    """The fault of a tenant whose stored rows caused an unforeseen error in following or signing; logged with the
    trace."""
    log.error("task_failed", tenant_id=tenant_id, exc_info=error)
    return not_signed(tenant_id, f"what is stored of it cannot be followed, {error!r}")


def leaf_hashes_of(tenant_id: str, links: Sequence[LinkRow], entry_count: int) -> list[bytes]:
    """Leaf hashes of ``links``, of which there must be ``entry_count``.

    Raises:
        ChainBrokenError: there are fewer, or one is malformed.
    """
    try:
        leaf_hashes = merkle.leaf_hashes([bytes.fromhex(row.chain_link) for row in links])
    except (ValueError, TypeError):
        leaf_hashes = []
    if len(leaf_hashes) != entry_count:
        raise not_signed(tenant_id, "entries are missing or have no link")
    return leaf_hashes


async def proved_root(
    connection: Connection, tenant_id: str, tree: TileTree, from_seq: int, leaf_hashes: list[bytes]
) -> bytes:
    """Root of the tree up to the end of these leaves, after proof that ``tree`` holds them.

    Raises:
        ChainBrokenError: it does not; rows or tiles were changed after they were followed.
    """
    to_seq = from_seq + len(leaf_hashes) - 1
    stored = await store.read_tiles(
        connection, tenant_id, {*tiles.right_edge(from_seq - 1), *tiles.consistency_tiles(to_seq, tree.size)}
    )
    try:
        prefix = TileTree(from_seq - 1, stored)
        prefix.append_leaf_hashes(leaf_hashes)
        root = prefix.root()
        merkle.verify_consistency(
            to_seq, tree.size, root, tree.root(), tiles.consistency_proof(to_seq, tree.size, tiles.getter(stored))
        )
    except ProofError as error:
        raise not_signed(
            tenant_id,
            f"entries {from_seq} to {to_seq} are not those that this node followed, rows or tiles were changed",
        ) from error
    return root


@dataclass(eq=False)
class OwnEntries:
    """Knowledge of one node about its own entries. Belongs to one event loop."""

    wal_folder: Path
    node_id: str
    last_lsn: Lsn
    """The last record in the WAL when this process started, 0 if there was none."""
    head_seqs: Mapping[str, int]
    """The head of each chain at the start; a missing chain did not exist."""
    quarantined: Sequence[str]
    """Tenants whose chains this process does not extend; it does not know their heads."""
    believes_earlier: bool
    """Whether every entry from before this start is trusted, because the operator accepted the loss of WAL records."""

    def __post_init__(self) -> None:
        self._reading = threading.Lock()
        self._marks: set[bytes] = set()
        """Marks of every record of the WAL from ``_from_lsn`` to ``last_lsn``, read as far back as needed: about 100
        bytes each."""
        self._from_lsn = Lsn(self.last_lsn + 1)
        self._first_ms: int | None = None
        """Physical HLC of the first record in the WAL, None if not known."""
        self._runs: dict[str, list[tuple[int, int]]] = {}
        """By tenant, first and last seq of each run of entries chained since the start."""
        self._newest: dict[str, int] = {}

    def chained(self, tenant_id: str, first_seq: int, last_seq: int) -> None:
        """This node chained these consecutive entries."""
        if (runs := self._runs.setdefault(tenant_id, [])) and runs[-1][1] + 1 == first_seq:
            first_seq, _ = runs.pop()
        runs.append((first_seq, last_seq))
        self._newest[tenant_id] = max(self._newest.get(tenant_id, 0), last_seq)

    def forget(self, tenant_id: str, upto_seq: int) -> None:
        """A checkpoint beside the WAL covers the chain up to ``upto_seq``."""
        self._runs[tenant_id] = [run for run in self._runs.get(tenant_id, ()) if run[1] > upto_seq]

    async def vouched(self, tenant_id: str, rows: Sequence[EntryRow], *, is_kept: bool) -> int:
        """How many of ``rows``, from the first on, hold no unconfirmed entry in this node's name and may be signed. The
        row after them may be an entry of a commit of this process that has not been answered yet.

        ``is_kept`` tells whether a checkpoint of the chain is stored beside the WAL.

        Raises:
            ChainBrokenError: names the first entry in this node's name that it did not make.
        """
        earlier: list[EntryRow] = []
        count = len(rows)
        for at, row in enumerate(rows):
            if row[_NODE] != self.node_id or row[_ORIGIN] is not None:
                continue
            if tenant_id in self.quarantined or row[_SEQ] <= self.head_seqs.get(tenant_id, 0):
                earlier.append(row)
            elif row[_SEQ] > self._newest.get(tenant_id, 0):
                count = at
                break
            elif not any(first <= row[_SEQ] <= last for first, last in self._runs.get(tenant_id, ())):
                raise _forged(tenant_id, row, "which this process, running since before, did not chain")
        if earlier and not self.believes_earlier:
            forged = await asyncio.to_thread(self._first_missing, tenant_id, earlier, is_kept)
            if forged is not None:
                raise _forged(tenant_id, forged, "of which its WAL holds no record")
        return count

    def _first_missing(self, tenant_id: str, rows: Sequence[EntryRow], is_kept: bool) -> EntryRow | None:
        """The first row without a record in the WAL; blocks on the disk.

        Raises:
            WalError: the WAL cannot be read.
        """
        marks = [_mark_of(tenant_id, row) for row in rows]
        with self._reading:
            if not self._marks.issuperset(marks):
                self._read_back_to(min(map(_physical_ms, rows)))
        first_ms = math.inf if self._first_ms is None else self._first_ms
        missing = (row for row, mark in zip(rows, marks, strict=True) if mark not in self._marks)
        return next((row for row in missing if is_kept or first_ms <= _physical_ms(row)), None)

    def _read_back_to(self, oldest_ms: int) -> None:
        """Read the records back to the segment that may hold HLCs of ``oldest_ms``: WAL order is HLC order."""
        bases = [each.base_lsn for each in list_segments(self.wal_folder) if each.base_lsn <= self.last_lsn]
        if not bases:
            return
        self._first_ms = self._begins_ms(bases[0])
        unread = [base_lsn for base_lsn in bases if base_lsn < self._from_lsn]
        old_enough = (base_lsn for base_lsn in reversed(unread) if self._begins_ms(base_lsn) < oldest_ms)
        from_lsn = Lsn(next(old_enough, min(unread, default=self._from_lsn)))
        for each in wal_reader.read(self.wal_folder, from_lsn, self.node_id, Lsn(self._from_lsn - 1)):
            event = record.decode(each.payload)
            digest = hashlib.sha256(event.payload).hexdigest()
            self._marks.add(_mark(event.tenant_id, each.hlc.text(), event.job_id, ACTIONS[each.type], digest))
        self._from_lsn = from_lsn

    def _begins_ms(self, base_lsn: Lsn) -> int:
        """Physical HLC of the first record of the segment that begins with ``base_lsn``."""
        return next(wal_reader.read(self.wal_folder, Lsn(base_lsn), self.node_id, self.last_lsn)).hlc.physical_ms


def _forged(tenant_id: str, row: EntryRow, why: str) -> ChainBrokenError:
    return not_signed(
        tenant_id,
        f"seq {row[_SEQ]} ({row[_ACTION]} of job {row[_JOB]}) bears the name of this node, {why}: somebody put it "
        "there",
        ". Mend the chain from a backup; if records of this node's WAL were lost, start once with --accept-lost-wal",
    )


def _physical_ms(row: EntryRow) -> int:
    """The row's physical HLC; for an edited value, a time that the WAL certainly covers."""
    return row[_PHYSICAL] if isinstance(row[_PHYSICAL], int) else sys.maxsize


def _mark(*parts: object) -> bytes:
    """The mark of a record: a hash of tenant, HLC, job, action and payload digest."""
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()[:_MARK_BYTES]


def _mark_of(tenant_id: str, row: EntryRow) -> bytes:
    """The mark of the row's record; for a REFUSED entry that of the record it keeps, for a verdict that of the
    proposal."""
    job_id, action, digest = row[_JOB], row[_ACTION], row[_DIGEST]
    try:
        if action == SystemAction.REFUSED:
            kept = orjson.loads(row[_PAYLOAD])
            action = ACTIONS[kept["record_type"]]
            job_id = base64.b64decode(kept["job_id"]).decode()
            digest = hashlib.sha256(base64.b64decode(kept["payload"])).hexdigest()
        elif action in VERDICTS:
            action, digest = CommitmentAction.PROPOSED, hashlib.sha256(proposed_payload(row[_PAYLOAD])).hexdigest()
    except (ValueError, TypeError, KeyError):
        return b""
    return _mark(tenant_id, row[_T_HLC], job_id, action, digest)
