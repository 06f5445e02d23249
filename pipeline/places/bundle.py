"""A bundle file as a place of a ledger: a piece is a few of its entry parts, which a task reads alone.

The driver hashes the whole file once; tasks compare each member they read with the manifest of that file. Trust in
the manifest's signer is not checked here. A file MUST have the same path on all workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, cast

import pyarrow as pa

from ledger.errors import BundleInvalidError, InvalidInputError
from ledger.verification import ENTRY_COLUMNS, SNAPSHOT_COLUMNS, Head, StoredTree
from pipeline.arrow import ENTRY_SCHEMA, SNAPSHOT_SCHEMA, batch_of, batched
from pipeline.places.protocol import (
    EVER,
    Facts,
    Judgement,
    OpenPlace,
    Piece,
    PieceReader,
    Place,
    ReaderOf,
    Sealed,
    Times,
)
from signing.bundle.reader import BundleReader, Scanned
from signing.keys import Keyring
from signing.snapshot import FROM_SEQ, TO_SEQ

_PHYSICAL = ENTRY_COLUMNS.index("hlc_physical")
_ENVELOPE = SNAPSHOT_COLUMNS.index("dsse_envelope")


@dataclass(frozen=True, slots=True)
class BundlePlace(Place):
    """A bundle file."""

    kind: ClassVar[str] = "bundle"
    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @contextmanager
    def open(self, keyring: Keyring | None = None, *, is_plan: bool = False) -> Iterator[OpenPlace]:
        """Read the whole file once: container, digests, manifest.

        Raises:
            BundleInvalidError: the file is no whole bundle; the error names it.
            OSError: it cannot be read.
        """
        try:
            bundle = BundleReader.open(self.path, keyring)
        except BundleInvalidError as error:
            raise type(error)(f"{self.path}: {error}") from error
        with bundle as reader:
            yield OpenBundle(self.path, reader)


@dataclass(frozen=True, slots=True)
class BundleFile:
    """A bundle for tasks, and the requested bounds."""

    path: str
    scanned: Scanned
    from_seq: int | None
    to_seq: int | None

    @contextmanager
    def session(self) -> Iterator[ReaderOf]:
        """The file, open."""
        with BundleReader.open(self.path, scanned=self.scanned) as bundle:
            yield partial(BundlePieceReader, bundle, self)


class BundlePieceReader(PieceReader):
    """Reads one piece of a bundle."""

    def __init__(self, bundle: BundleReader, where: BundleFile, piece: Piece) -> None:
        self._bundle, self._where, self._piece = bundle, where, piece

    def entries(self, columns: Sequence[str] = ENTRY_COLUMNS) -> Iterator[pa.RecordBatch]:
        """The stored rows of its parts, even if their seqs contradict the manifest."""
        bundle, (low, high), wanted = self._bundle, self._piece.times, list(columns)
        for number in bundle.parts_of(self._piece.from_seq, self._piece.to_seq):
            for rows in bundle.part_batches(number, bundle.read_part(number), self._where.from_seq, self._where.to_seq):
                if self._piece.times != EVER:
                    rows = [
                        row
                        for row in rows
                        if (low is None or row[_PHYSICAL] >= low) and (high is None or row[_PHYSICAL] <= high)
                    ]
                if rows:
                    yield batch_of(rows, ENTRY_SCHEMA).select(wanted)

    def snapshots(self) -> Iterator[pa.RecordBatch]:
        """The snapshots that overlap the piece."""
        first, last = self._piece.bounds
        rows = (row for row in self._bundle.snapshot_rows() if row[FROM_SEQ] <= last and row[TO_SEQ] >= first)
        return batched(rows, SNAPSHOT_SCHEMA, lambda row: len(row[_ENVELOPE] or ""))


class OpenBundle(OpenPlace):
    """An open bundle, described by its manifest's unverified claims."""

    def __init__(self, path: Path, bundle: BundleReader) -> None:
        self.file = self._path = path
        self._bundle = bundle

    def __str__(self) -> str:
        return str(self._path)

    def tenants(self) -> list[str]:
        """The one tenant of the bundle."""
        return [self._bundle.manifest.tenant_id]

    def pieces_of(
        self, tenants: Sequence[str], rows_a_piece: int, from_seq: int | None, to_seq: int | None, times: Times
    ) -> list[Piece]:
        """Runs of entry parts with at most ``rows_a_piece`` rows, or one part, in the range of the manifest."""
        if not tenants:
            return []
        manifest = self._bundle.manifest
        where = BundleFile(str(self._path.absolute()), self._bundle.scanned, from_seq, to_seq)
        pieces: list[Piece] = []
        rows, seq = 0, manifest.from_seq
        low, high = from_seq or manifest.from_seq, manifest.to_seq if to_seq is None else to_seq
        touched = set(self._bundle.parts_of(from_seq, to_seq))
        for number, part in enumerate(manifest.entry_parts):
            if number in touched:
                begins = not pieces or rows + part.rows > rows_a_piece
                first, rows = (max(seq, low), part.rows) if begins else (pieces.pop().from_seq, rows + part.rows)
                last = min(seq + part.rows - 1, high)
                pieces.append(Piece(manifest.tenant_id, first, last, rows, not pieces, where, times))
            seq += part.rows
        return pieces

    def reader(self, piece: Piece) -> PieceReader:
        """A reader of the file that is open here."""
        return BundlePieceReader(self._bundle, cast(BundleFile, piece.where), piece)

    def facts(self, tenant_id: str) -> Facts:
        """Head and tree from the manifest, and the last entry in the bundle."""
        manifest = self._bundle.manifest
        if tenant_id != manifest.tenant_id:
            return Facts(tenant_id, None, None, None)
        return Facts(
            tenant_id,
            Head(manifest.to_seq, manifest.to_chain_link, manifest.last_hlc),
            self._bundle.last_entry(),
            StoredTree(manifest.tree_size, manifest.tree_root),
        )

    def log_origin(self, tenant_id: str) -> str:
        """The origin in its manifest."""
        return self._bundle.manifest.log_origin

    def sealed(self, tenant_id: str) -> list[Sealed]:
        """The end of the bundle, with its checkpoint."""
        manifest = self._bundle.manifest
        return [Sealed(manifest.to_seq, self._bundle.checkpoint(), [*map(bytes.fromhex, manifest.consistency)])]

    def judged(self, tenants: Collection[str], keyring: Keyring | None) -> Judgement:
        """Always raises: a bundle is verified as a file, starting with its container."""
        raise InvalidInputError("verify is for databases and archives: see verify_bundles for bundles")
