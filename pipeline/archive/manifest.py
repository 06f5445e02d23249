"""The manifest of an archived range: a signed statement of what the range holds and which files make it up.

Spelled and signed as ``signing.manifest`` has it, with predicate type ``https://tallystick.dev/archive/v1``. The
digests that its subject covers are those of all files (docs/formats/archive.md).

Each manifest has one spelling: what was read is written again and compared. Invariants::

    entry_count == to_seq - from_seq + 1 == rows of all entry files >= 1
    files cover the range without gap; the last is of snapshots, with snapshot_count rows
    tree_size == to_seq        root of frontier == tree_root
    previous_manifest is None exactly when from_seq == 1
"""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ledger.errors import ArchiveInvalidError, ArchiveSignatureError, InvalidInputError
from ledger.merkle import Frontier
from ledger.verification.verdict import Head
from pipeline.archive.layout import (
    CHECKPOINT_CHARACTERS_MAX,
    FILE_BYTES_MAX,
    FILES_MAX,
    FORMAT_VERSION,
    FRONTIER_HASHES_MAX,
    MANIFEST_BYTES_MAX,
    FileName,
    month_order,
)
from signing.envelope import Envelope
from signing.keys import Keyring
from signing.manifest import Count, Hash, ManifestForm, RangeManifest, Seq, Statement

PREDICATE_TYPE: Final = "https://tallystick.dev/archive/v1"


class ArchivedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a manifest. ``sha256`` is hex; ``rows`` are entries, or snapshots."""

    name: Annotated[str, Meta(max_length=200)]
    sha256: Hash
    bytes: Annotated[int, Meta(ge=1, le=FILE_BYTES_MAX)]
    rows: Seq

    @property
    def parsed(self) -> FileName:
        """What its name says."""
        return FileName.parse(self.name)


class Manifest(RangeManifest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an archived range is."""

    from_chain_link: Hash
    """Chain link of the first entry."""
    highest_physical_ms: Count
    """Highest hlc_physical of all entries up to the last, those before the range too."""
    snapshot_count: Seq
    frontier: Annotated[tuple[Hash, ...], Meta(min_length=1, max_length=FRONTIER_HASHES_MAX)]
    """Roots of the perfect subtrees of its tree, the largest first: what the next range is appended to."""
    checkpoint: Annotated[str, Meta(max_length=CHECKPOINT_CHARACTERS_MAX)]
    """The newest signed note there was, of size ``to_seq`` or more."""
    previous_manifest: Hash | None
    """SHA-256 of the payload of the manifest before."""
    files: Annotated[tuple[ArchivedFile, ...], Meta(min_length=2, max_length=FILES_MAX)]
    format_version: Literal[1] = FORMAT_VERSION

    @property
    def entry_files(self) -> tuple[ArchivedFile, ...]:
        """The files that hold entries."""
        return self.files[:-1]

    @property
    def snapshot_file(self) -> ArchivedFile:
        """The file that holds the snapshots."""
        return self.files[-1]

    @property
    def last(self) -> Head:
        """The last entry."""
        return Head(self.to_seq, self.to_chain_link, self.last_hlc)


class SealedManifest(NamedTuple):
    """A manifest as it was read; who signed it is not judged."""

    manifest: Manifest
    envelope: Envelope

    @property
    def digest(self) -> str:
        """SHA-256 of its payload, hex: what the manifest behind it names."""
        return sha256(self.envelope.payload).hexdigest()


def open_manifest(data: bytes, keyring: Keyring | None = None) -> SealedManifest:
    """The manifest in an object; with ``keyring`` one that a key of it is named for and did not sign is not parsed.

    Raises:
        ArchiveInvalidError: malformed, at odds with itself, or of another version.
        ArchiveSignatureError: the signature does not hold.
    """
    if len(data) > MANIFEST_BYTES_MAX:
        raise ArchiveInvalidError(f"a manifest is over {MANIFEST_BYTES_MAX} bytes")
    opened = FORM.open_envelope(data)
    FORM.judge(opened, keyring)
    return SealedManifest(FORM.read(opened.payload), opened)


def frontier_of(manifest: Manifest) -> Frontier:
    """The right edge of the tree at the end of the range.

    Raises:
        ArchiveInvalidError: there are not as many hashes as a tree of that size has.
    """
    try:
        return Frontier.restore(manifest.tree_size, [bytes.fromhex(each) for each in manifest.frontier])
    except InvalidInputError as error:
        raise ArchiveInvalidError(f"the frontier of a manifest is none of its tree: {error}") from error


def _check(manifest: Manifest) -> None:
    if (manifest.from_seq == 1) != (manifest.previous_manifest is None):
        raise ArchiveInvalidError("only the manifest that begins at seq 1 has none before it")
    if not manifest.to_seq - manifest.from_seq + 1 == manifest.entry_count:
        raise ArchiveInvalidError("range and entry_count of a manifest do not agree")
    if manifest.tree_size != manifest.to_seq:
        raise ArchiveInvalidError("tree_size of a manifest is not its to_seq")
    if frontier_of(manifest).root().hex() != manifest.tree_root:
        raise ArchiveInvalidError("the frontier of a manifest does not have its tree_root")
    expected_seq, month = manifest.from_seq, ""
    for file in manifest.entry_files:
        name = file.parsed
        is_next = (name.tenant_id, name.from_seq) == (manifest.tenant_id, expected_seq) and name.month is not None
        if not is_next or name.is_over() or name.to_seq - name.from_seq + 1 != file.rows:
            raise ArchiveInvalidError(f"{file.name[:200]!r} is listed where a file of seq {expected_seq} on must be")
        if month_order(name.month or "") < month_order(month):
            raise ArchiveInvalidError(f"{file.name} is of an earlier month than the file before it")
        expected_seq, month = name.to_seq + 1, name.month or ""
    if expected_seq != manifest.to_seq + 1:
        raise ArchiveInvalidError("the files of a manifest do not cover its range")
    snapshots = FileName(manifest.tenant_id, manifest.from_seq, manifest.to_seq, None)
    if manifest.snapshot_file.parsed != snapshots or manifest.snapshot_file.rows != manifest.snapshot_count:
        raise ArchiveInvalidError("the last file of a manifest is not that of its snapshots")


FORM: Final = ManifestForm(
    Statement[Manifest],
    PREDICATE_TYPE,
    digests=lambda manifest: (file.sha256 for file in manifest.files),
    check=_check,
    invalid=ArchiveInvalidError,
    forged=ArchiveSignatureError,
)
