"""An archive as a place of a ledger: a piece is one file of entries, which a task fetches, compares and reads alone.

Files are compared with the manifests that the driver read. Trust in their signers is not checked by readers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import pyarrow as pa

from ledger.errors import ArchiveInvalidError
from ledger.verification import ENTRY_COLUMNS, SNAPSHOT_COLUMNS
from ledger.verification.range_fold import ChainBounds
from ledger.verification.verdict import Anchor
from objects.store import ArchiveStore
from pipeline.archive import ArchivedFile, SealedManifest, month_of, month_order
from pipeline.archive.reader import ArchiveJudge, TenantArchive, cosigned, entries_of, snapshots_of, tenants_of
from pipeline.arrow import ENTRY_SCHEMA, SNAPSHOT_SCHEMA
from pipeline.places.protocol import (
    Facts,
    Judged,
    Judgement,
    OpenPlace,
    Piece,
    PieceReader,
    Place,
    ReaderOf,
    Sealed,
    Times,
)
from signing.anchors import ExternalWitnesses
from signing.keys import Keyring


@dataclass(frozen=True, slots=True)
class ArchivePlace(Place):
    """An archive, by its URL."""

    kind: ClassVar[str] = "archive"
    url: str

    def __str__(self) -> str:
        return self.url

    @contextmanager
    def open(self, keyring: Keyring | None = None, *, is_plan: bool = False) -> Iterator[OpenArchive]:
        """List its tenants; manifests are read on first use.

        Raises:
            ConfigurationError: the URL names no place of an archive.
            ArchiveUnavailableError: it cannot be read.
        """
        yield OpenArchive(ArchiveStore(self.url), keyring)


@dataclass(frozen=True, slots=True)
class FileOfArchive:
    """One file of entries for a task, the snapshot file of its manifest, and the requested bounds."""

    url: str
    file: ArchivedFile
    snapshots: ArchivedFile
    from_seq: int | None
    to_seq: int | None

    @contextmanager
    def session(self) -> Iterator[ReaderOf]:
        """A session without resources to hold between pieces."""
        yield partial(ArchivePieceReader, self)


class ArchivePieceReader(PieceReader):
    """Reads one file of an archive."""

    def __init__(self, where: FileOfArchive, piece: Piece) -> None:
        self._where, self._piece = where, piece
        self._store = ArchiveStore(where.url)

    def entries(self, columns: Sequence[str] = ENTRY_COLUMNS) -> Iterator[pa.RecordBatch]:
        """The stored rows of the file, even if their seqs contradict its name.

        Raises:
            ArchiveInvalidError: the file differs from its manifest, or is no archive file.
        """
        bounds = {"seq": (self._where.from_seq, self._where.to_seq), "hlc_physical": self._piece.times}
        read = [name for name in ENTRY_COLUMNS if name in {*columns, *bounds}]
        return (_as(ENTRY_SCHEMA, batch, columns) for batch in entries_of(self._store, self._where.file, read, bounds))

    def snapshots(self) -> Iterator[pa.RecordBatch]:
        """The snapshots that overlap the piece; raises as ``entries``."""
        first, last = self._piece.bounds
        touching = {"from_seq": (None, last), "to_seq": (first, None)}
        return (
            _as(SNAPSHOT_SCHEMA, batch, SNAPSHOT_COLUMNS)
            for batch in snapshots_of(self._store, self._where.snapshots, touching)
        )


class OpenArchive(OpenPlace):
    """An open archive, described by its manifests' unverified claims."""

    def __init__(self, store: ArchiveStore, keyring: Keyring | None) -> None:
        self._store, self._keyring = store, keyring
        self._tenants = tenants_of(store)
        self._read: dict[str, TenantArchive] = {}

    def __str__(self) -> str:
        return self._store.url

    def tenants(self) -> list[str]:
        """Every tenant with a manifest."""
        return list(self._tenants)

    def pieces_of(
        self, tenants: Sequence[str], rows_a_piece: int, from_seq: int | None, to_seq: int | None, times: Times
    ) -> list[Piece]:
        """One piece a file, however many rows it has: a file is fetched and compared whole.

        Files of months before ``times`` are skipped. Files of later months are not, as they may hold entries of any
        time.
        """
        earliest = month_order("" if times.from_ms is None else month_of(times.from_ms))
        found: list[Piece] = []
        for tenant_id in tenants:
            files = list(self._archive(tenant_id).files(from_seq, to_seq))
            pieces: list[Piece] = []
            for at, (manifest, file) in enumerate(files):
                _, first, last, month = file.parsed
                if month_order(month or "") < earliest:
                    continue
                where = FileOfArchive(self._store.url, file, manifest.snapshot_file, from_seq, to_seq)
                begin = from_seq if at == 0 else max(first, from_seq or first)
                end = to_seq if at == len(files) - 1 else min(last, to_seq or last)
                pieces.append(Piece(tenant_id, begin, end, file.rows, not pieces, where, times))
            found += pieces
        return found

    def reader(self, piece: Piece) -> PieceReader:
        """The reader that a task uses."""
        return ArchivePieceReader(cast(FileOfArchive, piece.where), piece)

    def facts(self, tenant_id: str) -> Facts:
        """Head and tree from the newest manifest, and the last archived entry."""
        if tenant_id not in self._tenants:
            return Facts(tenant_id, None, None, None)
        archive = self._archive(tenant_id)
        return Facts(tenant_id, archive.newest.last, archive.last_entry(), archive.newest.tree)

    def log_origin(self, tenant_id: str) -> str:
        """The origin in the newest manifest."""
        return self._archive(tenant_id).newest.log_origin

    def sealed(self, tenant_id: str) -> list[Sealed]:
        """The end of each manifest, with its checkpoint."""
        return [
            Sealed(each.manifest.to_seq, each.manifest.checkpoint, [*map(bytes.fromhex, each.manifest.consistency)])
            for each in self._archive(tenant_id).sealed
        ]

    def cosigned(self, tenant_id: str, keyring: Keyring | None, external: ExternalWitnesses) -> tuple[Anchor, ...]:
        """Those in the manifests."""
        return cosigned(self._archive(tenant_id, keyring), keyring, external)

    def manifests(self, tenant_id: str) -> Sequence[SealedManifest]:
        """As they were read."""
        return self._archive(tenant_id).sealed

    def tables(self, keyring: Keyring | None, broken: Collection[str]) -> list[dict[str, Any]]:
        """The verdict on the archive's Iceberg table."""
        # Imported here, because tasks that read the archive's files need no Iceberg.
        from pipeline.archive.table_reader import verify_table_of

        return [verify_table_of(self._store, keyring, broken)]

    def judged(self, tenants: Collection[str], keyring: Keyring | None) -> Judgement:
        """Verify signatures, checkpoints and digests of the manifests; verdict objects have the aspect ``archive``."""
        judged: dict[str, Judged] = {}
        broken: dict[str, ArchiveInvalidError] = {}
        for tenant_id in tenants:
            try:
                archive = self._archive(tenant_id, keyring)
                judge = ArchiveJudge(archive, keyring)
                judged[tenant_id] = Judged(
                    ChainBounds(tenant_id, archive.newest.last, archive.newest.tree, judge.judge()), judge.verdict
                )
            except ArchiveInvalidError as error:
                broken[tenant_id] = error
        return judged, broken

    def _archive(self, tenant_id: str, keyring: Keyring | None = None) -> TenantArchive:
        """The manifests of a tenant, read once.

        Raises:
            TenantNotFoundError: the tenant has no manifest.
            ArchiveInvalidError: a manifest is missing, malformed or does not follow its predecessor, or lacks a
                valid signature of the key of the ring that it names.
            ArchiveUnavailableError: a manifest cannot be read.
        """
        if tenant_id not in self._read:
            self._read[tenant_id] = TenantArchive.read(self._store, tenant_id, keyring or self._keyring)
        return self._read[tenant_id]


def _as(schema: pa.Schema, batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """These columns with the types common to all places."""
    fields = [schema.field(name) for name in columns]
    return pa.RecordBatch.from_arrays(
        [batch.column(field.name).cast(field.type) for field in fields], schema=pa.schema(fields)
    )
