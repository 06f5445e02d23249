"""Writing a bundle as a stream: rows go in, pieces of the file come out, memory holds one part.

The writer does no I/O except for the snapshots, which follow the entries and whose size must be known before their
first byte: beyond a megabyte they go to a temporary file. Packing a part takes a while, so an event loop should call
``add_entries`` and ``finish`` in a thread. The same rows, proof, checkpoint, keys and signer give the same bytes.

``OwnChainBundle`` writes a bundle of a chain built for this file: entries of no chain, or of many, linked in sequence.
No ledger holds that chain. Its log has its own origin, so it cannot be mistaken for a tenant's. Its maker signs it: a
snapshot for every ``ENTRIES_A_SNAPSHOT`` entries and a checkpoint at the end. Memory holds one part of the file.

Invariants::

    snapshots cover 1..seq without gap once ``finish`` was called    entries after the last < ENTRIES_A_SNAPSHOT
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from ledger import canonical, merkle
from ledger.bundle.format import (
    ANCHORS,
    CHECKPOINT,
    END,
    ENTRY_PARTS_MAX,
    EVIDENCE,
    JOB_INDEX,
    KEYS,
    MANIFEST,
    PART_BYTES_MAX,
    ROW_BYTES_MAX,
    ROWS_A_PART_MAX,
    SNAPSHOTS,
    Part,
    entries_name,
    padding_of,
    tar_header,
    version_of,
)
from ledger.bundle.rows import CHAIN_LINK, JOB_ID, PREV_CHAIN_LINK, SEQ, T_HLC, Row, encode_entry
from ledger.chain import Linker
from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from ledger.job_index import keys_of
from ledger.job_index.builder import IndexBuilder, PartIndex, in_order
from ledger.verification.left_index import IndexAtFloor
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS, SnapshotClaim
from ledger.verification.verdict import Break
from signing.anchors import BundledAnchor, encode_anchors
from signing.bundle.manifest import Manifest, seal_evidence
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.files import close_for_good
from signing.keys import Keyring, Signer
from signing.note import VerifierKey
from signing.snapshot import encode_snapshot, sign_snapshot

GZIP_LEVEL: Final = 3
"""Output within a tenth of level 6's size, in less than half its time."""
SPOOL_BYTES: Final = 1 << 20
"""Bytes of snapshots kept in memory before they go to a temporary file."""
_GZIP: Final = 31


class BundleEnd(NamedTuple):
    """The content of a bundle besides its rows."""

    tree_root: str
    """Root, hex, of the tenant's whole tree at the last entry."""
    checkpoint: str
    """The signed note that covers the last entry."""
    consistency: Sequence[bytes]
    """Proof from the last entry's tree to the checkpoint's."""
    keys: Keyring
    """The keys in ``keys.json``."""
    anchors: Sequence[BundledAnchor] = ()
    """Statements of external witnesses about the log; without any the bundle has no such member."""
    job_index: IndexAtFloor | None = None
    """What is kept of the index of jobs of all entries before the first one, which left."""


@dataclass(kw_only=True, eq=False)
class BundleWriter:
    """Writes one bundle. Calls in order: ``add_entries`` and ``add_snapshots``, either first, then ``finish``."""

    tenant_id: str
    node_id: str
    log_origin: str

    def __post_init__(self) -> None:
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._parts: list[Part] = []
        self._first: Sequence[Any] = ()
        self._last: Sequence[Any] = ()
        self.entry_count = 0
        self._snapshots = tempfile.SpooledTemporaryFile(SPOOL_BYTES)  # noqa: SIM115 (closed by ``close``)
        self._snapshots_digest = sha256()
        self._snapshot_count = 0

    def close(self) -> None:
        """Close the temporary file. The writer MUST NOT be used afterwards."""
        close_for_good(self._snapshots)

    def add_entries(
        self, rows: Iterable[Sequence[Any]], encode: Callable[[str, Sequence[Any]], bytes] = encode_entry
    ) -> bytes:
        """Add the next rows of ``ENTRY_COLUMNS``, in seq order; returns the pieces of the file that are ready.

        Raises:
            InvalidInputError: a row is longer than a bundle takes, or there are too many.
        """
        pieces: list[bytes] = []
        for row in rows:
            line = encode(self.tenant_id, row)
            if len(line) > ROW_BYTES_MAX:
                raise InvalidInputError(f"seq {row[SEQ]} has {len(line)} bytes, a bundle takes {ROW_BYTES_MAX}")
            is_full = len(self._lines) == ROWS_A_PART_MAX or self._lines_bytes + len(line) > PART_BYTES_MAX
            if is_full and self._lines:
                pieces += self._pack()
            self._lines.append(line)
            self._lines_bytes += len(line)
            self._first = self._first or row
            self._last = row
            self.entry_count += 1
        return b"".join(pieces)

    def add_snapshots(
        self, rows: Iterable[Sequence[Any]], encode: Callable[[str, Sequence[Any]], bytes] = encode_snapshot
    ) -> None:
        """Add the next rows of ``SNAPSHOT_COLUMNS``, by ``from_seq``.

        Raises:
            SignatureError: a stored envelope is not unambiguous JSON.
            OSError: the temporary file cannot be written.
        """
        lines = [encode(self.tenant_id, row) for row in rows]
        self._snapshots.writelines(lines)
        self._snapshots_digest.update(b"".join(lines))
        self._snapshot_count += len(lines)
        self._snapshots.flush()

    def finish(self, end: BundleEnd, signer: Signer) -> Iterator[bytes]:
        """The rest of the file. At least one entry MUST have been added.

        Raises:
            SigningUnavailableError: the signer cannot be reached.
            OSError: the temporary file cannot be read.
        """
        yield from self._parts_before_the_last(end)
        manifest = Manifest(
            node_id=self.node_id,
            log_origin=self.log_origin,
            tenant_id=self.tenant_id,
            from_seq=self._first[SEQ],
            to_seq=self._last[SEQ],
            first_hlc=self._first[T_HLC],
            last_hlc=self._last[T_HLC],
            to_chain_link=self._last[CHAIN_LINK],
            entry_count=self.entry_count,
            format_version=version_of([part.name for part in self._parts]),
            snapshot_count=self._snapshot_count,
            tree_size=self._last[SEQ],
            tree_root=end.tree_root,
            consistency=tuple(each.hex() for each in end.consistency),
            parts=tuple(self._parts),
        )
        yield from _member(MANIFEST, manifest.seal(signer))
        yield END

    def finish_as_evidence(self, end: BundleEnd, breaks: Sequence[Break], signer: Signer) -> Iterator[bytes]:
        """The rest of a file that is evidence of a chain with these breaks, at least one, and no bundle. Only
        checkpoint and keys of ``end`` are used.

        Raises:
            As ``finish``.
        """
        yield from self._parts_before_the_last(end)
        data = seal_evidence(
            node_id=self.node_id,
            log_origin=self.log_origin,
            tenant_id=self.tenant_id,
            seqs=(_seq_in(self._first), _seq_in(self._last)),
            entry_count=self.entry_count,
            snapshot_count=self._snapshot_count,
            breaks=breaks,
            parts=self._parts,
            signer=signer,
        )
        yield from _member(EVIDENCE, data)
        yield END

    def _parts_before_the_last(self, end: BundleEnd) -> Iterator[bytes]:
        if self._lines:
            yield from self._pack()
        size = self._snapshots.tell()
        self._parts.append(Part(SNAPSHOTS, self._snapshots_digest.hexdigest(), size, size, self._snapshot_count))
        self._snapshots.seek(0)
        yield tar_header(SNAPSHOTS, size)
        while data := self._snapshots.read(SPOOL_BYTES):
            yield data
        yield bytes(padding_of(size))
        anchors = [(ANCHORS, encode_anchors(end.anchors))] if end.anchors else []
        index = [] if end.job_index is None else [(JOB_INDEX, msgspec.json.encode(end.job_index))]
        keys = (KEYS, canonical.encode(end.keys.to_json()))
        for name, data in ((CHECKPOINT, end.checkpoint.encode()), *anchors, *index, keys):
            self._parts.append(Part(name, sha256(data).hexdigest(), len(data), len(data), 0))
            yield from _member(name, data)

    def _pack(self) -> Iterator[bytes]:
        """The entry part of the lines so far."""
        if len(self._parts) == ENTRY_PARTS_MAX:
            raise InvalidInputError(f"more than {ENTRY_PARTS_MAX} entry parts; export a shorter range")
        raw = b"".join(self._lines)
        packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP)
        data = packer.compress(raw) + packer.flush()
        name = entries_name(len(self._parts) + 1)
        self._parts.append(Part(name, sha256(data).hexdigest(), len(data), len(raw), len(self._lines)))
        self._lines, self._lines_bytes = [], 0
        yield from _member(name, data)


def _seq_in(row: Sequence[Any]) -> int:
    return row[SEQ] if row and isinstance(row[SEQ], int) else 0


def _member(name: str, data: bytes) -> Iterator[bytes]:
    yield tar_header(name, len(data))
    yield data
    yield bytes(padding_of(len(data)))


ENTRIES_A_SNAPSHOT: Final = 1000


class OwnEntry(NamedTuple):
    """One entry before it is linked; ``origin`` is the text of its first place in a chain, None if it has none."""

    hlc: Hlc
    job_id: str
    action: str
    payload: bytes
    origin: str | None = None


@dataclass(kw_only=True, eq=False)
class OwnChainBundle:
    """Writes one bundle of a chain of its own. Calls in order: ``keep``, ``append``, ``finish``; then ``close``."""

    tenant_id: str
    node_id: str
    log_origin: str
    signer: Signer
    """Signs snapshots and the manifest."""
    log_signer: Signer
    """Signs the checkpoint; of Ed25519."""

    def __post_init__(self) -> None:
        self._origin = f"{self.log_origin}/{self.tenant_id}"
        self._writer = BundleWriter(tenant_id=self.tenant_id, node_id=self.node_id, log_origin=self.log_origin)
        self._linker = Linker(self.tenant_id)
        self._tree = merkle.Frontier()
        self._link = b""
        self._unsigned: list[bytes] = []
        self._jobs: list[str] = []
        self._job_index = IndexBuilder()
        self._snapshot_digest: str | None = None

    @property
    def end(self) -> tuple[int, str | None]:
        """Seq and link of the last entry; 0 and None when there is none."""
        return self._writer.entry_count, self._link.hex() or None

    def close(self) -> None:
        """Close the temporary files. No method may be called afterwards."""
        self._writer.close()

    def append(self, entries: Sequence[OwnEntry]) -> bytes:
        """Link the next entries; returns the pieces of the file that are ready.

        Raises:
            InvalidInputError: an entry is longer than a bundle takes, or there are too many.
            SigningUnavailableError: the signer cannot be reached.
        """
        seq, link = self.end
        return self._add(self._linker.rows(seq + 1, link, entries) if entries else ())

    def keep(self, rows: Sequence[Row]) -> bytes:
        """Add rows of ``ENTRY_COLUMNS`` with their links, unchanged. They MUST be verified and MUST continue the chain
        so far. Returns the pieces of the file that are ready.

        Raises:
            InvalidInputError: a row is longer than a bundle takes, or there are too many.
            SigningUnavailableError: the signer cannot be reached.
        """
        seq, link = self.end
        for row in rows:
            assert (row[SEQ], row[PREV_CHAIN_LINK]) == (seq + 1, link)
            seq, link = row[SEQ], row[CHAIN_LINK]
        return self._add(rows)

    def finish(self) -> Iterator[bytes]:
        """The rest of the file. At least one entry MUST have been added.

        Raises:
            SigningUnavailableError: a signer cannot be reached.
        """
        if self._unsigned:
            self._sign(self._last_hlc)
        root = self._tree.root()
        note = sign_checkpoint(Checkpoint(self._origin, self._tree.size, root), self.log_signer)
        log_key = VerifierKey.of(self._origin, self.log_signer.public_key).text()
        keys = Keyring([self.signer.public_key, self.log_signer.public_key], [log_key])
        yield from self._writer.finish(BundleEnd(root.hex(), note, (), keys), self.signer)

    def _add(self, rows: Sequence[Row]) -> bytes:
        pieces = self._writer.add_entries(rows)
        for row in rows:
            self._link, self._last_hlc = bytes.fromhex(row[CHAIN_LINK]), row[T_HLC]
            self._unsigned.append(self._link)
            self._jobs.append(row[JOB_ID])
            if len(self._unsigned) == ENTRIES_A_SNAPSHOT:
                self._sign(self._last_hlc)
        return pieces

    def _sign(self, last_hlc: str) -> None:
        """Sign a snapshot over the entries after the last one."""
        links, self._unsigned = self._unsigned, []
        jobs, self._jobs = self._jobs, []
        from_seq = self._tree.size + 1
        leaf_hashes = merkle.leaf_hashes(links)
        part = PartIndex(self._tree.size, [self._tree.size + len(links)])
        part.append(keys_of(jobs), b"".join(leaf_hashes))
        self._tree.extend(leaf_hashes)
        roots = self._job_index.add(part.finish())[self._tree.size]
        claim = SnapshotClaim(
            tenant_id=self.tenant_id,
            from_seq=from_seq,
            to_seq=self._tree.size,
            from_chain_link=links[0].hex(),
            to_chain_link=links[-1].hex(),
            entry_count=len(links),
            merkle_root=merkle.root(leaf_hashes).hex(),
            tree_size=self._tree.size,
            tree_root=self._tree.root().hex(),
            snapshot_hlc=last_hlc,
            previous_snapshot=self._snapshot_digest,
            node_id=self.node_id,
            key_id=self.signer.key_id,
            job_index=[root.hex() for root in in_order(roots, self._tree.size) if root is not None],
        )
        envelope, self._snapshot_digest = sign_snapshot(claim, self.signer)
        columns = (getattr(claim, column) for column in SNAPSHOT_COLUMNS[:-1])
        self._writer.add_snapshots([(*columns, orjson.dumps(envelope).decode())])
