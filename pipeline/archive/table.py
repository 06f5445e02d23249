"""The Iceberg table over the entry files of an archive: its form, and the signed statement of each of its versions.

The format is described in docs/formats/archive.md. In short::

    metadata/v<N>.metadata.json                version N of the table, as Iceberg's file system tables name it
    metadata/<id>.avro                         the lists of files that it names
    metadata/version-hint.text                 N, for readers that do not list; the only object that is ever replaced
    table/<N>-<sha256 of v<N>>.dsse.json       signed: the objects that version N added, and what it is made of

Invariants::

    a statement is written before the metadata file that it names; of several statements of N, that one counts
    versions run from 1 without gap; the statement of each names the digest of the one before
    a version names only files of signed manifests
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import pyarrow as pa
from msgspec import Meta
from pyarrow.parquet import FileMetaData
from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.io.pyarrow import (
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.serializers import FromByteStream
from pyiceberg.table.metadata import TableMetadata, new_table_metadata
from pyiceberg.table.name_mapping import create_mapping_from_schema
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from ledger.chain.form import Hash, Seq, TenantId
from ledger.decoding import decode
from ledger.errors import ArchiveInvalidError, ArchiveSignatureError, reported_as
from objects.store import ArchiveStore
from pipeline.archive import MANIFEST_BYTES_MAX, SEQ_DIGITS, ArchivedFile
from pipeline.archive.parquet import ENTRY_FILE_SCHEMA, opened
from signing import manifest as statements
from signing.envelope import Signed
from signing.keys import Keyring, Signer
from signing.manifest import LOG_ORIGIN, Statement

METADATA: Final = "metadata"
STATEMENTS: Final = "table"
HINT: Final = f"{METADATA}/version-hint.text"
STATEMENT_TYPE_OF_TABLE: Final = "https://tallystick.dev/archive-table/v1"
FORMAT_VERSION: Final = 1
HINT_BYTES_MAX: Final = 64
OBJECTS_MAX: Final = 4_096
"""Most objects of one statement."""
METADATA_BYTES_MAX: Final = 256 << 20
"""Largest metadata object that is read."""
SUMMARY_OF_TENANT: Final = "tally.manifest."
"""Prefix, before the tenant, of the snapshot properties with the digest of the newest manifest of its files."""

_TYPES: Final = {pa.string(): StringType(), pa.int64(): LongType(), pa.int16(): IntegerType()}
_BOUNDED: Final = {"seq": "full", "hlc_physical": "full", "hlc_logical": "full"} | dict.fromkeys(
    ("hlc_node", "job_id", "action"), "truncate(16)"
)
"""Columns whose lowest and highest values are in the metadata, and in what length."""
_VERSION: Final = re.compile(r"v([1-9][0-9]{0,18})\.metadata\.json")
_STATEMENT: Final = re.compile(rf"([0-9]{{{SEQ_DIGITS}}})-([0-9a-f]{{64}})\.dsse\.json")


# --- the form of the table ----------------------------------------------------------------------------


def _schema() -> Schema:
    """Columns of entry files, then the two that are in their paths: optional, as the files lack them."""
    columns = [
        NestedField(at, field.name, _TYPES[field.type], required=not field.nullable)
        for at, field in enumerate(ENTRY_FILE_SCHEMA, 1)
    ]
    paths = [
        NestedField(at, name, StringType(), required=False)
        for at, name in enumerate(("tenant_id", "month"), len(columns) + 1)
    ]
    return Schema(*columns, *paths)


def new_table(location: str) -> TableMetadata:
    """The empty table at ``location``."""
    schema = _schema()
    by_path = [schema.find_field(name) for name in ("tenant_id", "month")]
    spec = PartitionSpec(
        *(PartitionField(each.field_id, 1000 + at, IdentityTransform(), each.name) for at, each in enumerate(by_path))
    )
    metrics = {f"write.metadata.metrics.column.{name}": mode for name, mode in _BOUNDED.items()}
    properties = {
        "format-version": "2",
        "schema.name-mapping.default": create_mapping_from_schema(schema).model_dump_json(),
        "write.metadata.metrics.default": "none",
        "commit.manifest-merge.enabled": "true",
        "commit.manifest.min-count-to-merge": "2",
        **metrics,
    }
    return new_table_metadata(schema, spec, UNSORTED_SORT_ORDER, location, properties)


def describing(
    store: ArchiveStore, table: TableMetadata, footers: Mapping[str, FileMetaData]
) -> Callable[[ArchivedFile], DataFile]:
    """Makes the table's record of an entry file, from its footer; one that ``footers`` lacks is fetched and compared
    with its manifest first.

    The function that is returned raises:
        ArchiveInvalidError: the file is missing, or not the one that its manifest names.
        ArchiveUnavailableError: it cannot be read.
    """
    collected = compute_statistics_plan(table.schema(), table.properties)
    ids = parquet_path_to_id_mapping(table.schema())

    def describe(file: ArchivedFile) -> DataFile:
        if (footer := footers.get(file.name)) is None:
            with opened(store, file, ENTRY_FILE_SCHEMA) as found:
                footer = found.metadata
        statistics = data_file_statistics_from_parquet_metadata(footer, collected, ids)
        name = file.parsed
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=f"{table.location}/{file.name}",
            file_format=FileFormat.PARQUET,
            partition=Record(name.tenant_id, name.month),
            file_size_in_bytes=file.bytes,
            sort_order_id=None,
            spec_id=table.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    return describe


# --- statements ---------------------------------------------------------------------------------------


class TableObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One object that a version added."""

    name: Annotated[str, Meta(max_length=300)]
    sha256: Hash
    bytes: Annotated[int, Meta(ge=1, le=METADATA_BYTES_MAX)]


class ArchivedTo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant's newest manifest whose files a version has."""

    manifest: Hash
    to_seq: Seq


class TableStatement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The predicate of a version's statement."""

    archived: dict[TenantId, ArchivedTo]
    """Of the tenants whose files this version added."""
    log_origin: Annotated[str, Meta(pattern=rf"^{LOG_ORIGIN}\Z")]
    objects: Annotated[tuple[TableObject, ...], Meta(min_length=2, max_length=OBJECTS_MAX)]
    """What this version added, the metadata file last."""
    previous: Hash | None
    """SHA-256 of the payload of the statement of the version before."""
    version: Seq
    format_version: Literal[1] = FORMAT_VERSION

    def payload(self) -> bytes:
        """The bytes that are signed."""
        digest = sha256(b"".join(bytes.fromhex(each.sha256) for each in self.objects)).hexdigest()
        return statements.encode(f"table/{self.version}", digest, STATEMENT_TYPE_OF_TABLE, msgspec.to_builtins(self))

    def seal(self, signer: Signer) -> bytes:
        """The bytes of the envelope around it.

        Raises:
            SigningUnavailableError: the signer cannot be reached.
        """
        return statements.seal(self.payload(), signer)


class SealedStatement(NamedTuple):
    """A statement as read, and what its signature is worth."""

    statement: TableStatement
    digest: str
    """SHA-256 of its payload, hex."""
    signed: Signed


def open_statement(data: bytes, keyring: Keyring | None) -> SealedStatement:
    """The statement in an object.

    Raises:
        ArchiveInvalidError: malformed.
        ArchiveSignatureError: it names a key of ``keyring`` that did not sign it.
    """
    what = "the statement of a version of the table"
    opened_envelope = statements.open_envelope(data, what, ArchiveInvalidError)
    signed = statements.judge(opened_envelope, keyring, what, ArchiveSignatureError)
    form: Any = Statement
    with reported_as(ArchiveInvalidError, f"{what} is malformed, or of another version", msgspec.MsgspecError):
        found: TableStatement = decode(opened_envelope.payload, form[TableStatement]).predicate
    if found.payload() != opened_envelope.payload:
        raise ArchiveInvalidError(f"{what} is not in canonical form, or its subject is another")
    return SealedStatement(found, sha256(opened_envelope.payload).hexdigest(), signed)


def metadata_name(version: int) -> str:
    """The name of the metadata file of a version."""
    return f"{METADATA}/v{version}.metadata.json"


def statement_name(version: int, metadata_sha256: str) -> str:
    """The name of the statement of a version whose metadata file has this digest."""
    return f"{STATEMENTS}/{version:0{SEQ_DIGITS}d}-{metadata_sha256}.dsse.json"


def versions_of(store: ArchiveStore) -> list[int]:
    """The versions that have a metadata file, ascending.

    Raises:
        ArchiveUnavailableError: they cannot be listed.
    """
    return sorted(int(found[1]) for name in store.objects(METADATA) if (found := _VERSION.fullmatch(name)))


def hinted_version(store: ArchiveStore) -> int:
    """The version that the hint names, which nobody signed; 0 if it names none."""
    hint = store.read(HINT, HINT_BYTES_MAX) or b""
    return int(hint) if hint.isdigit() else 0


def stated_versions(store: ArchiveStore) -> list[int]:
    """The versions that have a statement, ascending; raises as ``versions_of``."""
    return sorted({int(found[1]) for name in store.objects(STATEMENTS) if (found := _STATEMENT.fullmatch(name))})


def read_statement(store: ArchiveStore, version: int, metadata_sha256: str, keyring: Keyring | None) -> SealedStatement:
    """The statement of a version with this metadata file.

    Raises:
        ArchiveInvalidError: there is none, or it is malformed or about another.
        ArchiveSignatureError: it names a key of ``keyring`` that did not sign it.
        ArchiveUnavailableError: it cannot be read.
    """
    name, about = statement_name(version, metadata_sha256), metadata_name(version)
    if (data := store.read(name, MANIFEST_BYTES_MAX)) is None:
        raise ArchiveInvalidError(f"no statement signs {about} as it is: {name} is missing")
    sealed = open_statement(data, keyring)
    last = sealed.statement.objects[-1]
    if (sealed.statement.version, last.name, last.sha256) != (version, about, metadata_sha256):
        raise ArchiveInvalidError(f"{name} is the statement of another version")
    return sealed


# --- its files ----------------------------------------------------------------------------------------


def parse_metadata(data: bytes, name: str) -> TableMetadata:
    """The table in a metadata file.

    Raises:
        ArchiveInvalidError: it is none.
    """
    with reported_as(partial(ArchiveInvalidError), f"{name} is no metadata of an Iceberg table", ValueError):
        return FromByteStream.table_metadata(io.BytesIO(data))


class TableFiles(FileIO):
    """The objects below the table's location, in the archive's store. New ones stay in memory, in ``new``."""

    def __init__(self, store: ArchiveStore, location: str, expected: Mapping[str, TableObject] | None = None) -> None:
        """With ``expected``, only these objects are read, and each is compared with its digest."""
        super().__init__()
        self._store, self._location, self._expected = store, location, expected
        self.new: dict[str, bytes] = {}

    def name_of(self, location: str) -> str:
        """The name in the archive of an absolute location.

        Raises:
            ArchiveInvalidError: it is not below the table.
        """
        if not location.startswith(f"{self._location}/"):
            raise ArchiveInvalidError(f"the table names {location[:300]!r}, which is not below {self._location}")
        return location.removeprefix(f"{self._location}/")

    def read(self, name: str) -> bytes:
        """The object of this name.

        Raises:
            ArchiveInvalidError: it is missing, or not one that is expected.
            ArchiveUnavailableError: it cannot be read.
        """
        if (held := self.new.get(name)) is not None:
            return held
        if (data := self._store.read(name, METADATA_BYTES_MAX)) is None:
            raise ArchiveInvalidError(f"{name} is missing from the archive")
        if self._expected is not None:
            check_object(name, data, self._expected.get(name))
        return data

    def new_input(self, location: str) -> InputFile:
        """The object at ``location``, to be read."""
        return _Input(location, self)

    def new_output(self, location: str) -> OutputFile:
        """The object at ``location``, to be written."""
        return _Output(location, self)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Forget a new object; nothing that was written is ever removed."""
        self.new.pop(self.name_of(location if isinstance(location, str) else location.location), None)


def check_object(name: str, data: bytes, expected: TableObject | None) -> None:
    """Raises ArchiveInvalidError unless ``data`` is the object that a statement names."""
    if expected is None:
        raise ArchiveInvalidError(f"the table names {name}, and no statement signs it")
    if (sha256(data).hexdigest(), len(data)) != (expected.sha256, expected.bytes):
        raise ArchiveInvalidError(f"{name} is not the object that its statement names: size or digest is another")


class _Input(InputFile):
    def __init__(self, location: str, files: TableFiles) -> None:
        super().__init__(location)
        self._files = files

    def __len__(self) -> int:
        return len(self._files.read(self._files.name_of(self.location)))

    def exists(self) -> bool:
        return self._files.name_of(self.location) in self._files.new

    def open(self, seekable: bool = True) -> InputStream:
        return io.BytesIO(self._files.read(self._files.name_of(self.location)))


class _Output(OutputFile):
    def __init__(self, location: str, files: TableFiles) -> None:
        super().__init__(location)
        self._files = files

    def __len__(self) -> int:
        return len(self._files.new[self._files.name_of(self.location)])

    def exists(self) -> bool:
        return False

    def to_input_file(self) -> InputFile:
        return _Input(self.location, self._files)

    def create(self, overwrite: bool = False) -> OutputStream:
        return _Kept(self._files, self._files.name_of(self.location))


class _Kept(io.BytesIO):
    """Bytes that are an object once closed."""

    def __init__(self, files: TableFiles, name: str) -> None:
        super().__init__()
        self._files, self._name = files, name

    def close(self) -> None:
        if not self.closed:
            self._files.new[self._name] = self.getvalue()
        super().close()
