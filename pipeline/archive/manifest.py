"""The manifest of an archived range: a signed statement of what the range holds and which files make it up.

Spelled and signed as ``signing.range_manifest`` has it, with predicate type ``https://tallystick.dev/archive/v1``. The
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

from ledger import canonical
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
from signing import envelope
from signing.envelope import Envelope
from signing.keys import Keyring, Signer
from signing.range_manifest import Count, Hash, ManifestForm, RangePredicate, Seq, Statement

PREDICATE_TYPE: Final = "https://tallystick.dev/archive/v1"


class ArchivedFile(NamedTuple):
    """One file of a manifest. ``sha256`` is hex; ``rows`` are entries, or snapshots."""

    name: str
    sha256: str
    bytes: int
    rows: int

    @property
    def parsed(self) -> FileName:
        """What its name says."""
        return FileName.parse(self.name)


class Manifest(NamedTuple):
    """What an archived range is. Links, roots and digests are lowercase hex."""

    node_id: str
    """The node that signed the last snapshot of the range."""
    log_origin: str
    """With ``/`` and the tenant the origin of the tenant's log, as in its checkpoints."""
    tenant_id: str
    from_seq: int
    to_seq: int
    from_chain_link: str
    to_chain_link: str
    """Chain links of the first and of the last entry."""
    first_hlc: str
    last_hlc: str
    highest_physical_ms: int
    """Highest hlc_physical of all entries up to the last, those before the range too."""
    entry_count: int
    snapshot_count: int
    tree_size: int
    tree_root: str
    """Root of the tenant's whole tree at ``to_seq``."""
    frontier: tuple[str, ...]
    """Roots of the perfect subtrees of that tree, the largest first: what the next range is appended to."""
    checkpoint: str
    """The newest signed note there was, of size ``to_seq`` or more."""
    consistency: tuple[str, ...]
    """Proof that the tree of the checkpoint extends that of ``tree_size``; empty when they have one size."""
    previous_manifest: str | None
    """SHA-256 of the payload of the manifest before."""
    files: tuple[ArchivedFile, ...]

    @property
    def origin(self) -> str:
        """Origin of the tenant's log."""
        return f"{self.log_origin}/{self.tenant_id}"

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


class _FileItem(msgspec.Struct, forbid_unknown_fields=True):
    bytes: Annotated[int, Meta(ge=1, le=FILE_BYTES_MAX)]
    name: Annotated[str, Meta(max_length=200)]
    rows: Seq
    sha256: Hash


class _Predicate(RangePredicate, forbid_unknown_fields=True):
    format_version: Literal[1]
    from_chain_link: Hash
    highest_physical_ms: Count
    snapshot_count: Seq
    frontier: Annotated[list[Hash], Meta(min_length=1, max_length=FRONTIER_HASHES_MAX)]
    checkpoint: Annotated[str, Meta(max_length=CHECKPOINT_CHARACTERS_MAX)]
    previous_manifest: Hash | None
    files: Annotated[list[_FileItem], Meta(min_length=2, max_length=FILES_MAX)]


_FORM: Final = ManifestForm(
    Statement[_Predicate],
    PREDICATE_TYPE,
    version=FORMAT_VERSION,
    invalid=ArchiveInvalidError,
    forged=ArchiveSignatureError,
)
judge = _FORM.judge


def statement(manifest: Manifest) -> bytes:
    """The bytes that are signed for ``manifest``.

    Raises:
        CanonicalError: a field has no canonical form, such as an integer beyond 2^53 - 1.
    """
    predicate = {
        **manifest._asdict(),
        "frontier": list(manifest.frontier),
        "consistency": list(manifest.consistency),
        "files": [file._asdict() for file in manifest.files],
    }
    return _FORM.statement(predicate, (file.sha256 for file in manifest.files))


def seal(manifest: Manifest, signer: Signer) -> bytes:
    """The bytes of the object that holds ``manifest``.

    Raises:
        ArchiveInvalidError: it breaks an invariant.
        SigningUnavailableError: the signer cannot be reached.
    """
    payload = statement(manifest)
    read_manifest(payload)
    return canonical.encode(envelope.sign(payload, signer))


def open_manifest(data: bytes, keyring: Keyring | None = None) -> SealedManifest:
    """The manifest in an object; with ``keyring`` one that a key of it is named for and did not sign is not parsed.

    Raises:
        ArchiveInvalidError: malformed, at odds with itself, or of another version.
        ArchiveSignatureError: the signature does not hold.
    """
    if len(data) > MANIFEST_BYTES_MAX:
        raise ArchiveInvalidError(f"a manifest is over {MANIFEST_BYTES_MAX} bytes")
    opened = _FORM.open_envelope(data)
    judge(opened, keyring)
    return SealedManifest(read_manifest(opened.payload), opened)


def read_manifest(payload: bytes) -> Manifest:
    """The manifest that the payload of an envelope is.

    Raises:
        ArchiveInvalidError: malformed, at odds with itself, or of another version.
    """
    said = _FORM.predicate(payload)
    values = {name: getattr(said, name) for name in Manifest._fields}
    values |= {
        "frontier": tuple(said.frontier),
        "consistency": tuple(said.consistency),
        "files": tuple(ArchivedFile(item.name, item.sha256, item.bytes, item.rows) for item in said.files),
    }
    manifest = Manifest(**values)
    _check(manifest)
    if statement(manifest) != payload:
        raise ArchiveInvalidError("a manifest's statement is not in canonical form, or its subject is another")
    return manifest


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
