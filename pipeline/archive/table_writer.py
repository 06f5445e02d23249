"""Appends the entry files of signed manifests to the Iceberg table of an archive, a version at a time::

    1. the newest version, its signed statement, and the files that it has
    2. the files of signed manifests after those, by tenant
    3. pyiceberg's ``fast_append`` of them, in memory; the snapshot's properties name the manifests' digests
    4. the objects that it made, the statement that names them, and last the metadata file, each written once
    5. the hint, which readers that cannot list objects go by

A process that dies before the metadata file of step 4 is written leaves objects that no version names. Where two
processes write one version, the metadata file of the first counts, and the second begins again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple

from pyarrow.parquet import FileMetaData
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import RemoveSnapshotsUpdate, update_table_metadata

from ledger.errors import ArchiveConflictError, ArchiveInvalidError, UnknownKeyError
from objects.store import ArchiveStore
from pipeline.archive import ArchivedFile, FileName, SealedManifest, put_object
from pipeline.archive.reader import ranges_of, read_signed
from pipeline.archive.table import (
    HINT,
    METADATA_BYTES_MAX,
    SUMMARY_OF_TENANT,
    ArchivedTo,
    TableFiles,
    TableObject,
    TableStatement,
    describing,
    metadata_name,
    new_table,
    parse_metadata,
    read_statement,
    statement_name,
    versions_of,
)
from signing.keys import Keyring, Signer

COMMIT_FILES_MAX: Final = 512
"""Most files that a version adds."""
LISTS_MAX: Final = 100
"""With more lists of files than this, an append merges them, so that each version names few."""
SNAPSHOTS_KEPT: Final = 8
"""Snapshots that a version names; older ones stay in the archive, in the versions of then."""
ATTEMPTS: Final = 5
"""How often a version is begun again because another process wrote it first."""


class TableVersion(NamedTuple):
    """A version of the table that a held key signed. Version 0 is the empty table."""

    number: int
    statement: str | None
    """Digest of the payload of its statement."""
    metadata: TableMetadata
    covered: dict[str, int]
    """By tenant, the last seq of its files."""


class TableWriter:
    """The table of one archive, for one thread at a time. ``extend`` goes on from the version that it wrote last."""

    def __init__(self, store: ArchiveStore, log_origin: str) -> None:
        self._store, self._log_origin = store, log_origin
        self._newest: TableVersion | None = None

    def extend(
        self,
        newest_of: Mapping[str, SealedManifest],
        signer: Signer,
        keyring: Keyring,
        footers: Mapping[str, FileMetaData] = MappingProxyType({}),
    ) -> TableVersion:
        """Append every file of these tenants that the table lacks; returns the newest version. Files are those of
        manifests that a key of ``keyring`` signed, as it signed the given newest manifest of each. A file is read
        unless the caller wrote it and has its footer, by name.

        Raises:
            ArchiveInvalidError: a manifest, a file or the newest version is not what it must be.
            UnknownKeyError: no held key signed one.
            ArchiveConflictError: other processes keep writing versions first.
            ArchiveUnavailableError, SigningUnavailableError: a service does not answer.
        """
        for _ in range(ATTEMPTS):
            newest = self._newest or self._open(keyring)
            files = self._missing(newest.covered, newest_of, keyring)
            while some := list(islice(files, COMMIT_FILES_MAX)):
                committed = self._commit(newest, some, signer, footers)
                if committed is None:
                    self._newest = None
                    break
                self._newest = newest = committed
            else:
                self._newest = newest
                return newest
        raise ArchiveConflictError(f"other processes keep writing the table of {self._store.url}: run one at a time")

    def _open(self, keyring: Keyring) -> TableVersion:
        """The newest version. Its hint is made right, as the process that wrote it may have been killed before."""
        if not (versions := versions_of(self._store)):
            return TableVersion(0, None, new_table(self._store.url.rstrip("/")), {})
        name = metadata_name(versions[-1])
        if (data := self._store.read(name, METADATA_BYTES_MAX)) is None:
            raise ArchiveInvalidError(f"{name} is missing from the archive")
        sealed = read_statement(self._store, versions[-1], sha256(data).hexdigest(), keyring)
        if sealed.signed.verdict != "ok":
            raise UnknownKeyError(f"version {versions[-1]} of the table: {sealed.signed.detail}")
        metadata = parse_metadata(data, name)
        covered: dict[str, int] = {}
        for file in named_files(self._store, metadata):
            covered[file.tenant_id] = max(covered.get(file.tenant_id, 0), file.to_seq)
        self._store.replace(HINT, str(versions[-1]).encode())
        return TableVersion(versions[-1], sealed.digest, metadata, covered)

    def _missing(
        self, covered: Mapping[str, int], newest_of: Mapping[str, SealedManifest], keyring: Keyring
    ) -> Iterator[tuple[SealedManifest, ArchivedFile]]:
        for tenant_id, newest in sorted(newest_of.items()):
            end_seq = covered.get(tenant_id, 0)
            for sealed in self._after(end_seq, newest, keyring):
                yield from ((sealed, file) for file in sealed.manifest.entry_files if file.parsed.to_seq > end_seq)

    def _after(self, seq: int, newest: SealedManifest, keyring: Keyring) -> Iterator[SealedManifest]:
        """The manifests of ranges that end after ``seq``. Those before the newest are read."""
        if newest.manifest.from_seq > seq + 1:
            for bounds in ranges_of(self._store, newest.manifest.tenant_id):
                if seq < bounds[1] < newest.manifest.from_seq:
                    yield read_signed(self._store, newest.manifest.tenant_id, bounds, keyring)
        if newest.manifest.to_seq > seq:
            yield newest

    def _commit(
        self,
        newest: TableVersion,
        files: list[tuple[SealedManifest, ArchivedFile]],
        signer: Signer,
        footers: Mapping[str, FileMetaData],
    ) -> TableVersion | None:
        """The version that has these files too; None if another process wrote it first."""
        number, location = newest.number + 1, newest.metadata.location
        table_files = TableFiles(self._store, location)
        archived = {sealed.manifest.tenant_id: ArchivedTo(sealed.digest, sealed.manifest.to_seq) for sealed, _ in files}
        describe = describing(self._store, newest.metadata, footers)
        described = [describe(file) for _, file in files]
        metadata = _appended(newest.metadata, described, archived, table_files)
        data = metadata.model_dump_json().encode()
        table_files.new[metadata_name(number)] = data
        statement = TableStatement(
            archived=archived,
            log_origin=self._log_origin,
            objects=tuple(
                TableObject(name, sha256(made).hexdigest(), len(made)) for name, made in table_files.new.items()
            ),
            previous=newest.statement,
            version=number,
        )
        digest = statement.objects[-1].sha256
        *lists, (name, _) = table_files.new.items()
        for made, content in (*lists, (statement_name(number, digest), statement.seal(signer))):
            put_object(self._store, made, content)
        if not put_object(self._store, name, data):
            return None
        self._store.replace(HINT, str(number).encode())
        covered = newest.covered | {file.parsed.tenant_id: file.parsed.to_seq for _, file in files}
        return TableVersion(number, sha256(statement.payload()).hexdigest(), metadata, covered)


def _appended(
    metadata: TableMetadata,
    files: list[DataFile],
    archived: dict[str, ArchivedTo],
    table_files: TableFiles,
) -> TableMetadata:
    """The table with these files too; the lists that it names are new in ``table_files``."""
    table = Table(("archive",), metadata, f"{metadata.location}/metadata", table_files, NoopCatalog("archive"))
    transaction = Transaction(table)
    update = transaction.update_snapshot(
        {f"{SUMMARY_OF_TENANT}{tenant_id}": each.manifest for tenant_id, each in archived.items()}
    )
    current = metadata.current_snapshot()
    has_many = current is not None and len(current.manifests(table_files)) >= LISTS_MAX
    with update.merge_append() if has_many else update.fast_append() as append:
        for file in files:
            append.append_data_file(file)
    made = transaction.table_metadata
    old = sorted(made.snapshots, key=lambda each: each.sequence_number or 0)[:-SNAPSHOTS_KEPT]
    if not old:
        return made
    return update_table_metadata(made, (RemoveSnapshotsUpdate(snapshot_ids=[each.snapshot_id for each in old]),))


def named_files(store: ArchiveStore, metadata: TableMetadata) -> Iterator[FileName]:
    """The files that the newest snapshot of a table names.

    Raises:
        ArchiveInvalidError: a list is missing, or one names no entry file of an archive.
        ArchiveUnavailableError: one cannot be read.
    """
    table_files = TableFiles(store, metadata.location)
    if (current := metadata.current_snapshot()) is not None:
        for listed in current.manifests(table_files):
            for entry in listed.fetch_manifest_entry(table_files):
                yield FileName.parse(table_files.name_of(entry.data_file.file_path))
