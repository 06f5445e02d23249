"""Receipts (docs/formats/receipt.md) made from an archive alone: entries, proofs and checkpoint are all in its files.

One receipt, in order::

    1. the manifests of the tenant; a held key signed each
    2. the newest checkpoint in them whose whole tree is archived: only then are these all entries of the job under it;
       and for a job the newest snapshot up to it with an index of jobs, by a held key
    3. one pass over the files: the requested entries, the tiles of that tree which their proofs need, and the runs of
       that index, each with the place of the job in it
    4. each entry is compared with its link, each proof with the root of the checkpoint, each run with its root; then
       the statement is signed

Memory holds the tiles above the leaves, 32 bytes for 256 entries, those of leaves that the proofs need, and one run of
the index, at most 136 bytes for each of half a million entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET

from ledger import merkle
from ledger.errors import (
    ArchiveInvalidError,
    BrokenRangeError,
    InvalidInputError,
    JobNotFoundError,
    NotFoundError,
    ProofError,
    ReceiptTooLargeError,
    SeqOutOfRangeError,
    SigningUnavailableError,
    reported_as,
)
from ledger.job_index import RunPlace, key_of, keys_of, run_leaves
from ledger.job_index.proof import Directory, RunProof, pieces_of, prove, verify_job
from ledger.machines.jobs import refused_job_id
from ledger.merkle import HASH_BYTES, leaf_hash, tiles
from ledger.merkle.tiles import TileCoordinates, TileTree
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.snapshot_check import SnapshotClaim
from objects.store import ArchiveStore
from pipeline.archive import Manifest
from pipeline.archive.reader import TenantArchive, entries_of, snapshots_of
from pipeline.arrow import Row, rows_of
from signing.anchors import StoredAnchor
from signing.checkpoint import Checkpoint, open_checkpoint
from signing.checkpoint import read as read_checkpoint
from signing.keys import Keyring, Signer
from signing.receipt import ABSENT, ENTRIES_MAX, ENTRY, JOB, Covers, IndexProof, Material, draft_of, make
from signing.snapshot import ENVELOPE, open_snapshot

_SEQ, _JOB_ID, _LINK = map(ENTRY_COLUMNS.index, ("seq", "job_id", "chain_link"))
_LEAVES: Final = 0
"""Level of the tiles of leaf hashes."""


class Wanted(NamedTuple):
    """What is proved: all entries of a job, that it has none, or the entry of a seq."""

    job_id: str | None
    seq: int | None
    is_absent: bool = False

    @property
    def covers(self) -> Covers:
        """The scope of the receipt."""
        return ABSENT if self.is_absent else JOB if self.seq is None else ENTRY

    @property
    def names(self) -> list[str]:
        """The job, and what substitutes for its refused events are about; none for an entry."""
        return [] if self.job_id is None else [self.job_id, refused_job_id(self.job_id)]

    def within(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of ``batch`` that may be proved, substitutes for refused events of the job among them."""
        if self.job_id is None:
            return batch.filter(pc.equal(batch.column(_SEQ), self.seq))
        return batch.filter(pc.is_in(batch.column(_JOB_ID), pa.array(self.names)))


def archived_receipt(
    store: ArchiveStore, tenant_id: str, wanted: Wanted, extends: int | None, keyring: Keyring, signer: Signer
) -> bytes:
    """The receipt of what is wanted, signed by ``signer``, up to the newest checkpoint whose tree is archived. With
    ``extends`` it also proves that the log extends its tree of that size, unless the checkpoint is of an older one.

    Raises:
        TenantNotFoundError, JobNotFoundError, SeqOutOfRangeError: there is none in the archive.
        InvalidInputError: the job that is proved to be absent has entries.
        SigningUnavailableError: no checkpoint of the archive covers it with all before it; or of an absent job no
            snapshot has an index of jobs.
        ReceiptTooLargeError: the job is too large for one receipt.
        ArchiveInvalidError: the archive does not hold.
        UnknownKeyError: no key of ``keyring`` signed a manifest, or the checkpoint.
        ArchiveUnavailableError: the archive cannot be read.
    """
    archive = TenantArchive.signed(store, tenant_id, keyring)
    manifest, checkpoint = _covering(archive, keyring)
    size = checkpoint.size
    extends = extends if extends is not None and extends <= size else None
    said = _said(archive, checkpoint)
    index = None if wanted.job_id is None else _index(archive, size, keyring, wanted.names)
    if wanted.is_absent and index is None:
        raise SigningUnavailableError(
            f"no archived snapshot of tenant {tenant_id} up to seq {size} has an index of jobs by a held key"
        )
    firsts = [each.size for each in said] + ([] if extends is None else [extends])
    found = _Found(wanted, size, firsts + ([] if index is None else [index.size]), index)
    with _as_signed(tenant_id):
        for batch in _entries(archive, size):
            found.add(batch)
    rows = found.rows(archive)
    job_id = rows[0][_JOB_ID] if rows else wanted.names[0]
    draft = draft_of(
        tenant_id=tenant_id,
        log_origin=manifest.log_origin,
        node_id=manifest.node_id,
        covers=wanted.covers,
        job_id=job_id,
        checkpoint=manifest.checkpoint,
        keys=keyring,
    )
    with _as_signed(tenant_id):
        indexed = None if index is None else index.proof(job_id, rows)
        return make(Material(draft, rows, said, extends, indexed), tiles.getter(found.stored), signer)


def _as_signed(tenant_id: str) -> AbstractContextManager[None]:
    """Report errors of entries that are not those under the checkpoint."""
    return reported_as(
        ArchiveInvalidError,
        f"no receipt is made, the archive of tenant {tenant_id} is not what was signed",
        *(BrokenRangeError, ProofError, InvalidInputError, TypeError, ValueError),
    )


def _covering(archive: TenantArchive, keyring: Keyring) -> tuple[Manifest, Checkpoint]:
    """The newest manifest whose checkpoint is of archived entries alone, and that checkpoint."""
    end_seq = archive.newest.to_seq
    for manifest in (each.manifest for each in reversed(archive.sealed)):
        if read_checkpoint(manifest.checkpoint).size <= end_seq:
            return manifest, open_checkpoint(manifest.checkpoint, keyring, origin=manifest.origin)
    raise SigningUnavailableError(
        f"every checkpoint in the archive of tenant {archive.tenant_id} is of more than its {end_seq} entries; archive "
        f"what came after: tally snapshot --tenant {archive.tenant_id}, then tally archive run --once"
    )


def _said(archive: TenantArchive, checkpoint: Checkpoint) -> list[StoredAnchor]:
    """The newest cosignature of each witness in the manifests on a tree of the log up to ``checkpoint``."""
    found: dict[str, StoredAnchor] = {}
    for manifest in (each.manifest for each in archive.sealed):
        for each in () if manifest.anchors is UNSET else manifest.anchors:
            size, time = read_checkpoint(each.checkpoint).size, datetime.fromisoformat(each.time)
            if size <= checkpoint.size:
                found[each.by] = StoredAnchor(each.kind, each.by, each.checkpoint, size, time)
    return [*found.values()]


def _entries(archive: TenantArchive, to_seq: int) -> Iterator[pa.RecordBatch]:
    for _, file in archive.files(to_seq=to_seq):
        yield from entries_of(archive.store, file, ENTRY_COLUMNS, {"seq": (None, to_seq)})


def _index(archive: TenantArchive, size: int, keyring: Keyring, names: Sequence[str]) -> _Index | None:
    """The index of jobs of the newest snapshot of at most ``size`` entries that has one, by a key of ``keyring``."""
    for sealed in reversed(archive.sealed):
        file = sealed.manifest.snapshot_file
        rows = [row for batch in snapshots_of(archive.store, file, {"to_seq": (None, size)}) for row in rows_of(batch)]
        for row in reversed(rows):
            if (envelope := row[ENVELOPE]) is not None:
                opened = open_snapshot(envelope, keyring)
                if opened.verdict == "ok" and opened.claim.index_roots:
                    return _Index(envelope, opened.claim, names)
    return None


class _Index:
    """Makes the runs of an index of jobs as its entries pass, and keeps the place of a job in each."""

    def __init__(self, envelope: str, claim: SnapshotClaim, names: Sequence[str]) -> None:
        self.size = claim.to_seq
        self._envelope, self._claim = envelope, claim
        self._left = [*claim.index_roots.items()]
        self._end = claim.index_begin
        self._keys, self._hashes = bytearray(), bytearray()
        self._proofs: dict[str, list[RunProof]] = {name: [] for name in names}

    def add(self, begin: int, job_ids: Sequence[str], hashes: Sequence[bytes]) -> None:
        """The next entries of the log, from leaf index ``begin`` on."""
        known = max(0, self._end - begin)
        count = max(0, min(len(job_ids), self.size - begin) - known)
        self._keys += keys_of(job_ids[known : known + count])
        self._hashes += b"".join(hashes[known : known + count])
        self._end += count
        while self._left and self._left[0][0].end <= self._end:
            self._close(*self._left.pop(0))

    def _close(self, place: RunPlace, root: bytes) -> None:
        size = (place.end - place.begin) * HASH_BYTES
        leaves = run_leaves(place, bytes(self._keys[:size]), bytes(self._hashes[:size]))
        del self._keys[:size], self._hashes[:size]
        directory, pieces = Directory.of(leaves), pieces_of(leaves)
        if merkle.root(directory.roots) != root:
            raise ProofError(
                f"the index of jobs of entries {place.begin + 1} to {place.end} is not that of the entries"
            )
        for name, proofs in self._proofs.items():
            proofs.append(prove(key_of(name), directory, pieces))

    def proof(self, job_id: str, rows: Sequence[Row]) -> IndexProof:
        """That the job has no other entries than these rows."""
        claim = self._claim
        inside = [row for row in rows if claim.index_begin < row[_SEQ] <= claim.to_seq]
        entries = [(row[_SEQ] - 1, leaf_hash(bytes.fromhex(row[_LINK]))) for row in inside]
        roots, runs = [*claim.index_roots.values()], self._proofs[job_id]
        verify_job(job_id, claim.to_seq, roots, entries, runs, claim.index_begin)
        return IndexProof(claim.to_seq, self._envelope, runs)


@dataclass
class _Found:
    """What a pass over the entries has found."""

    wanted: Wanted
    size: int
    earlier: Sequence[int]
    """Sizes of trees that the one of ``size`` is proved to extend."""
    index: _Index | None
    stored: dict[TileCoordinates, bytes] = field(default_factory=dict)
    """The tiles that proofs need, and perhaps more."""
    _rows: list[Row] = field(default_factory=list)
    _tree: TileTree = field(default_factory=lambda: TileTree(0, {}))
    _kept: set[TileCoordinates] = field(default_factory=set)
    """Tiles of leaves that proofs need."""

    def __post_init__(self) -> None:
        self._kept |= {*tiles.right_edge(self.size)}
        for each in self.earlier:
            self._kept |= tiles.consistency_tiles(each, self.size)

    def add(self, batch: pa.RecordBatch) -> None:
        """The next entries."""
        for row in rows_of(self.wanted.within(batch)):
            self._rows.append(row)
            self._kept.add((_LEAVES, (row[_SEQ] - 1) // tiles.TILE_WIDTH))
        if len(self._rows) > ENTRIES_MAX:
            raise ReceiptTooLargeError(f"job {self.wanted.job_id} has more entries than one receipt holds")
        hashes = merkle.leaf_hashes([bytes.fromhex(link) for link in batch.column(_LINK).to_pylist()])
        if self.index is not None:
            self.index.add(self._tree.size, batch.column(_JOB_ID).to_pylist(), hashes)
        self._tree.append_leaf_hashes(hashes)
        self.stored |= {at: tile for at, tile in self._tree.changed.items() if at[0] > _LEAVES or at in self._kept}
        self._tree.forget_changed()

    def rows(self, archive: TenantArchive) -> list[Row]:
        """The entries to be proved; none of an absent job, else at least one."""
        if self.wanted.is_absent:
            if self._rows:
                last = self._rows[-1][_SEQ]
                raise InvalidInputError(f"job {self.wanted.job_id} has entries, the last is seq {last}", ("job_id",))
            return []
        of_job = [row for row in self._rows if row[_JOB_ID] == self.wanted.job_id]
        if rows := of_job or self._rows:
            return rows
        tenant_id, end_seq = archive.tenant_id, archive.newest.to_seq
        up_to = f"tenant {tenant_id} up to seq {self.size}, which the newest checkpoint in the archive covers"
        if self.wanted.seq is None:
            raise JobNotFoundError(f"there is no job {self.wanted.job_id} of {up_to}")
        if self.wanted.seq > end_seq:
            raise SeqOutOfRangeError(f"the archive of tenant {tenant_id} ends at seq {end_seq}", ("seq",))
        raise NotFoundError(f"seq {self.wanted.seq} is not of {up_to}")
