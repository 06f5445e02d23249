"""Writing a bundle as a stream: rows go in, pieces of the file come out, memory holds one part.

The writer does no I/O but for the snapshots, which stand behind the entries and whose size must be known before
their first byte: what of them is over a megabyte waits in a temporary file. Packing a part takes a while, so an
event loop should call ``add_entries`` and ``finish`` in a thread. The same rows, proof, checkpoint, keys and
signer give the same bytes.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, NamedTuple

from ledger import canonical
from ledger.bundle.format import (
    ANCHORS,
    CHECKPOINT,
    END,
    ENTRY_PARTS_MAX,
    EVIDENCE,
    FORMAT_VERSION,
    FORMAT_VERSION_ANCHORED,
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
)
from ledger.bundle.rows import CHAIN_LINK, SEQ, T_HLC, encode_entry
from ledger.errors import InvalidInputError
from ledger.verification.verdict import Break
from signing.bundle import evidence
from signing.bundle.anchors import BundledAnchor, encode_anchors
from signing.bundle.manifest import FORM, Manifest
from signing.bundle.snapshot_rows import encode_snapshot
from signing.files import close_for_good
from signing.keys import Keyring, Signer

GZIP_LEVEL: Final = 3
"""Within a tenth of the size of level 6, in less than half its time."""
SPOOL_BYTES: Final = 1 << 20
"""Snapshots kept in memory before they go to a temporary file."""
_GZIP: Final = 31


class BundleEnd(NamedTuple):
    """What a bundle needs besides its rows."""

    tree_root: str
    """Root, hex, of the tenant's whole tree at the last entry."""
    checkpoint: str
    """The signed note that covers the last entry."""
    consistency: Sequence[bytes]
    """Proof from the last entry's tree to the checkpoint's."""
    keys: Keyring
    """What ``keys.json`` lists."""
    anchors: Sequence[BundledAnchor] = ()
    """What outsiders said of the log; without any the bundle has no such member."""


@dataclass(kw_only=True, eq=False)
class BundleWriter:
    """Makes one bundle. Calls in order: ``add_entries`` and ``add_snapshots``, either first, then ``finish``."""

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
        """Close the temporary file; the writer is of no more use."""
        close_for_good(self._snapshots)

    def add_entries(
        self, rows: Iterable[Sequence[Any]], encode: Callable[[str, Sequence[Any]], bytes] = encode_entry
    ) -> bytes:
        """Take the next rows of ``ENTRY_COLUMNS``, in seq order; returns the pieces of the file that are ready.

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
        """Take the next rows of ``SNAPSHOT_COLUMNS``, by ``from_seq``.

        Raises:
            SignatureError: a stored envelope is not JSON with one reading.
            OSError: the temporary file does not take them.
        """
        for row in rows:
            line = encode(self.tenant_id, row)
            self._snapshots.write(line)
            self._snapshots_digest.update(line)
            self._snapshot_count += 1
        self._snapshots.flush()

    def finish(self, end: BundleEnd, signer: Signer) -> Iterator[bytes]:
        """The rest of the file. At least one entry MUST have been added.

        Raises:
            SigningUnavailableError: the signer cannot be reached.
            OSError: the temporary file cannot be read.
        """
        yield from self._parts_before_the_last(end)
        yield from _member(MANIFEST, FORM.seal(self._manifest(end), signer))
        yield END

    def finish_as_evidence(self, end: BundleEnd, breaks: Sequence[Break], signer: Signer) -> Iterator[bytes]:
        """The rest of a file that is no bundle: evidence of a chain that has these breaks, one at least. Of ``end``
        only checkpoint and keys are used.

        Raises:
            As ``finish``.
        """
        yield from self._parts_before_the_last(end)
        data = evidence.seal(
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
        keys = (KEYS, canonical.encode(end.keys.to_json()))
        for name, data in ((CHECKPOINT, end.checkpoint.encode()), *anchors, keys):
            self._parts.append(Part(name, sha256(data).hexdigest(), len(data), len(data), 0))
            yield from _member(name, data)

    def _manifest(self, end: BundleEnd) -> Manifest:
        return Manifest(
            node_id=self.node_id,
            log_origin=self.log_origin,
            tenant_id=self.tenant_id,
            from_seq=self._first[0],
            to_seq=self._last[SEQ],
            first_hlc=self._first[1],
            last_hlc=self._last[T_HLC],
            to_chain_link=self._last[CHAIN_LINK],
            entry_count=self.entry_count,
            format_version=FORMAT_VERSION_ANCHORED if end.anchors else FORMAT_VERSION,
            snapshot_count=self._snapshot_count,
            tree_size=self._last[SEQ],
            tree_root=end.tree_root,
            consistency=tuple(each.hex() for each in end.consistency),
            parts=tuple(self._parts),
        )

    def _pack(self) -> Iterator[bytes]:
        """The entry part that holds the lines so far."""
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
