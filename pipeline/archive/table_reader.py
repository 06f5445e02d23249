"""Verifies the Iceberg table of an archive against signed statements and the manifests of its tenants::

    1. versions run from 1 without gap, and the newest statement is of the newest version, or of one begun after it
    2. the metadata file of each version is the one that a statement names, which a held key signed and which names the
       statement before it; every object of it has its digest
    3. the newest version names, from signed objects alone, the files of the manifests: no other file, each in its own
       partition, with its rows and bytes, and none left out
    4. the hint names a version that exists

Step 3 allows that the newest ranges of a tenant are not in the table yet, because it is extended after their manifest:
then the table is ``behind``, which is no break.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

from pyiceberg.manifest import DataFile, ManifestContent
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from ledger.errors import ArchiveInvalidError
from ledger.exit_code import ExitCode
from ledger.text import first_of
from objects.store import ArchiveStore
from pipeline.archive import ArchivedFile, FileName, SealedManifest
from pipeline.archive.reader import TenantArchive, tenants_of
from pipeline.archive.table import (
    HINT,
    HINT_BYTES_MAX,
    METADATA_BYTES_MAX,
    SealedStatement,
    TableFiles,
    TableObject,
    check_object,
    metadata_name,
    parse_metadata,
    read_statement,
    stated_versions,
    versions_of,
)
from signing.keys import Keyring

CODE_OF_TABLE: Final = {
    "broken": ExitCode.TAMPERED,
    "unknown_key": ExitCode.UNKNOWN_KEY,
    "behind": ExitCode.INCOMPLETE,
    "not_checked": ExitCode.INCOMPLETE,
}
"""Exit codes of the verdicts on a table that are not 0."""
TENANTS_NAMED_MAX: Final = 10


def verify_table_of(store: ArchiveStore, keyring: Keyring | None, broken: Collection[str] = ()) -> dict[str, Any]:
    """As ``verify_table``, with ``archive``, the URL. Where manifests do not hold, which the verdicts on their tenants
    say, the table is not checked. It is broken where the verdict on one of these tenants found that what its manifests
    name does not hold."""
    try:
        archives = {each: TenantArchive.read(store, each, keyring).sealed for each in tenants_of(store)}
        found = verify_table(store, archives, keyring)
    except ArchiveInvalidError as error:
        detail = f"the manifests do not hold: {error}"
        found = {"verdict": "not_checked", "version": 0, "metadata": None, "files": 0, "detail": detail}
    if broken and found["verdict"] in ("ok", "behind"):
        detail = f"what it names does not hold, as the verdicts say, of {first_of(sorted(broken), TENANTS_NAMED_MAX)}"
        found |= {"verdict": "broken", "detail": detail}
    return {"archive": store.url, **found}


def line_of_table(found: Mapping[str, Any]) -> str:
    """The verdict on a table in one line."""
    if found["verdict"] == "absent":
        return f"Iceberg table of {found['archive']}: there is none"
    said = (
        f"Iceberg table of {found['archive']}: {found['verdict']}, version {found['version']}, {found['files']} files"
    )
    return said if found["detail"] is None else f"{said}: {found['detail']}"


def verify_table(
    store: ArchiveStore, archives: Mapping[str, Sequence[SealedManifest]], keyring: Keyring | None
) -> dict[str, Any]:
    """What the table of an archive is worth, given the manifests of all its tenants.

    ``verdict`` is ``ok``, ``broken``, ``unknown_key``, ``not_checked`` without keys, ``behind`` with ``detail``, or
    ``absent``: the archive has no table. ``detail`` says what was found, else it is None.

    Raises:
        ArchiveUnavailableError: the archive cannot be read.
    """
    found: dict[str, Any] = {"version": 0, "metadata": None, "files": 0, "detail": None}
    versions = versions_of(store)
    if not versions and not stated_versions(store):
        return {**found, "verdict": "absent"}
    try:
        return {**found, **_verified(store, versions, archives, keyring)}
    except ArchiveInvalidError as error:
        return {**found, "version": versions[-1] if versions else 0, "verdict": "broken", "detail": str(error)}


def _verified(
    store: ArchiveStore,
    versions: Sequence[int],
    archives: Mapping[str, Sequence[SealedManifest]],
    keyring: Keyring | None,
) -> dict[str, Any]:
    # 1. The versions.
    _check_versions(versions, stated_versions(store))
    # 2. The objects of each.
    signed: dict[str, TableObject] = {}
    unknown: str | None = None
    before: SealedStatement | None = None
    for number in versions:
        before = _check_version(store, number, before, signed, keyring)
        if before.signed.verdict == "unknown_key" and unknown is None:
            unknown = f"version {number} of the table: {before.signed.detail}"
    # 3. The files that the newest names.
    count, behind = 0, None
    if versions:
        name = metadata_name(versions[-1])
        metadata = parse_metadata(_read(store, name), name)
        count, behind = _check_files(metadata, TableFiles(store, metadata.location, signed), archives)
    elif archives:
        behind = "no version of the table is whole yet: a process that wrote the first was stopped"
    # 4. The hint.
    _check_hint(store, versions)
    verdict = "unknown_key" if unknown else "not_checked" if keyring is None else "behind" if behind else "ok"
    return {
        "verdict": verdict,
        "version": versions[-1] if versions else 0,
        "metadata": f"{store.url}/{metadata_name(versions[-1])}" if versions else None,
        "files": count,
        "detail": unknown or behind,
    }


def _check_versions(versions: Sequence[int], stated: Sequence[int]) -> None:
    if list(versions) != list(range(1, len(versions) + 1)):
        gone = next(at for at, number in enumerate([*versions, 0], 1) if at != number)
        raise ArchiveInvalidError(f"{metadata_name(gone)} is missing from the archive, and a later version is there")
    if stated and stated[-1] > len(versions) + 1:
        raise ArchiveInvalidError(
            f"{metadata_name(len(versions) + 1)} is missing from the archive, and version {stated[-1]} was signed"
        )


def _check_version(
    store: ArchiveStore,
    number: int,
    before: SealedStatement | None,
    signed: dict[str, TableObject],
    keyring: Keyring | None,
) -> SealedStatement:
    """Check the objects of a version; they are added to ``signed``."""
    data = _read(store, metadata_name(number))
    sealed = read_statement(store, number, sha256(data).hexdigest(), keyring)
    if sealed.statement.previous != (None if before is None else before.digest):
        raise ArchiveInvalidError(f"the statement of version {number} of the table names another one before it")
    for each in sealed.statement.objects[:-1]:
        check_object(each.name, _read(store, each.name), each)
        signed[each.name] = each
    return sealed


def _check_files(
    metadata: TableMetadata, files: TableFiles, archives: Mapping[str, Sequence[SealedManifest]]
) -> tuple[int, str | None]:
    """How many files the newest snapshot names, and in what it is behind the manifests."""
    listed: dict[str, ArchivedFile] = {
        file.name: file for sealed in archives.values() for each in sealed for file in each.manifest.entry_files
    }
    covered: dict[str, int] = {}
    seen: set[str] = set()
    for snapshot in metadata.snapshots:
        files.read(files.name_of(snapshot.manifest_list))
    for named in _data_files(metadata.current_snapshot(), files):
        name = files.name_of(named.file_path)
        if (file := listed.get(name)) is None:
            raise ArchiveInvalidError(f"the table names {name[:300]}, and no manifest signed such a file")
        if name in seen:
            raise ArchiveInvalidError(f"the table names {name} twice")
        _check_file(named, file)
        seen.add(name)
        covered[file.parsed.tenant_id] = max(covered.get(file.parsed.tenant_id, 0), file.parsed.to_seq)
    waiting: list[FileName] = []
    for name, file in listed.items():
        if name in seen:
            continue
        if file.parsed.from_seq <= covered.get(file.parsed.tenant_id, 0):
            raise ArchiveInvalidError(f"the table does not name {name}, which a manifest signed")
        waiting.append(file.parsed)
    if not waiting:
        return len(seen), None
    return len(seen), (
        f"the table does not have {len(waiting)} newer files yet, the first {waiting[0].path()}: see tally archive run"
    )


def _check_file(named: DataFile, file: ArchivedFile) -> None:
    stated = (*tuple(named.partition[at] for at in range(2)), named.record_count, named.file_size_in_bytes)
    due = (file.parsed.tenant_id, file.parsed.month, file.rows, file.bytes)
    if stated != due:
        raise ArchiveInvalidError(f"the table has {file.name} as {stated}, its manifest as {due}")


def _data_files(snapshot: Snapshot | None, files: TableFiles) -> Iterator[DataFile]:
    if snapshot is None:
        return
    for listed in snapshot.manifests(files):
        if listed.content != ManifestContent.DATA:
            raise ArchiveInvalidError(f"the table has a list of deleted rows, {listed.manifest_path[:300]}")
        for entry in listed.fetch_manifest_entry(files):
            yield entry.data_file


def _check_hint(store: ArchiveStore, versions: Sequence[int]) -> None:
    hint = store.read(HINT, HINT_BYTES_MAX)
    if hint is not None and not (hint.isdigit() and 1 <= int(hint) <= len(versions)):
        raise ArchiveInvalidError(
            f"{HINT} names version {hint[:20]!r}, and the newest in the archive is {len(versions)}"
        )


def _read(store: ArchiveStore, name: str) -> bytes:
    if (data := store.read(name, METADATA_BYTES_MAX)) is None:
        raise ArchiveInvalidError(f"{name} is missing from the archive")
    return data
