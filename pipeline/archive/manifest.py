"""The manifest of an archived range: a signed statement of what the range holds and which files make it up.

The payload is canonical JSON of an in-toto Statement, in a DSSE envelope that is canonical JSON itself and has exactly
one signature, as that of a bundle (docs/formats/archive.md)::

    _type          https://in-toto.io/Statement/v1
    subject        one: name "{tenant_id}/{from_seq}-{to_seq}", digest sha256 over the 32-byte digests of all files
    predicateType  https://tallystick.dev/archive/v1
    predicate      the fields of Manifest

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
from ledger.bundle.format import INTEGER_MAX
from ledger.errors import (
    ArchiveInvalidError,
    ArchiveSignatureError,
    BundleInvalidError,
    BundleSignatureError,
    InvalidInputError,
)
from ledger.hlc import Hlc
from ledger.merkle import Frontier
from ledger.names import NODE_ID, READABLE_TENANT_ID
from ledger.verdict import Head
from pipeline.archive.layout import (
    CHECKPOINT_CHARACTERS_MAX,
    CONSISTENCY_HASHES_MAX,
    FILE_BYTES_MAX,
    FILES_MAX,
    FORMAT_VERSION,
    FRONTIER_HASHES_MAX,
    MANIFEST_BYTES_MAX,
    FileName,
    month_order,
)
from signing import envelope
from signing.bundle import manifest as bundle_manifest
from signing.bundle.manifest import HLC_CHARACTERS_MAX, Signed
from signing.envelope import Envelope
from signing.keys import Keyring, Signer
from signing.snapshot import STATEMENT_TYPE

PREDICATE_TYPE: Final = "https://tallystick.dev/archive/v1"

_Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_HlcText = Annotated[str, Meta(max_length=HLC_CHARACTERS_MAX)]
_Count = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
_Seq = Annotated[int, Meta(ge=1, le=INTEGER_MAX)]


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


def statement(manifest: Manifest) -> bytes:
    """The bytes that are signed for ``manifest``.

    Raises:
        CanonicalError: a field has no canonical form, such as an integer beyond 2^53 - 1.
    """
    predicate: dict[str, object] = {
        **manifest._asdict(),
        "format_version": FORMAT_VERSION,
        "frontier": list(manifest.frontier),
        "consistency": list(manifest.consistency),
        "files": [file._asdict() for file in manifest.files],
    }
    return canonical.encode(
        {
            "_type": STATEMENT_TYPE,
            "subject": [_subject(manifest)],
            "predicateType": PREDICATE_TYPE,
            "predicate": predicate,
        }
    )


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
    try:
        opened = bundle_manifest.open_envelope(data)
    except BundleInvalidError as error:
        raise ArchiveInvalidError(str(error)) from error
    judge(opened, keyring)
    return SealedManifest(read_manifest(opened.payload), opened)


def judge(opened: Envelope, keyring: Keyring | None) -> Signed:
    """Who signed, by the keys of ``keyring``.

    Raises:
        ArchiveSignatureError: a held key is named that did not sign it.
    """
    try:
        return bundle_manifest.judge(opened, keyring)
    except BundleSignatureError as error:
        raise ArchiveSignatureError(str(error)) from error


class _FileItem(msgspec.Struct, forbid_unknown_fields=True):
    bytes: Annotated[int, Meta(ge=1, le=FILE_BYTES_MAX)]
    name: Annotated[str, Meta(max_length=200)]
    rows: _Seq
    sha256: _Hash


class _Predicate(msgspec.Struct, forbid_unknown_fields=True):
    format_version: Literal[1]
    node_id: Annotated[str, Meta(pattern=rf"^(?:{NODE_ID})\Z")]
    log_origin: Annotated[str, Meta(pattern=r"^[!-*,-~]{1,300}\Z")]
    tenant_id: Annotated[str, Meta(pattern=rf"^(?:{READABLE_TENANT_ID})\Z")]
    from_seq: _Seq
    to_seq: _Seq
    from_chain_link: _Hash
    to_chain_link: _Hash
    first_hlc: _HlcText
    last_hlc: _HlcText
    highest_physical_ms: _Count
    entry_count: _Seq
    snapshot_count: _Seq
    tree_size: _Seq
    tree_root: _Hash
    frontier: Annotated[list[_Hash], Meta(min_length=1, max_length=FRONTIER_HASHES_MAX)]
    checkpoint: Annotated[str, Meta(max_length=CHECKPOINT_CHARACTERS_MAX)]
    consistency: Annotated[list[_Hash], Meta(max_length=CONSISTENCY_HASHES_MAX)]
    previous_manifest: _Hash | None
    files: Annotated[list[_FileItem], Meta(min_length=2, max_length=FILES_MAX)]


class _Digest(msgspec.Struct, forbid_unknown_fields=True):
    sha256: _Hash


class _Subject(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(max_length=200)]
    digest: _Digest


class _Statement(msgspec.Struct, forbid_unknown_fields=True):
    type_: Annotated[str, Meta(max_length=200)] = msgspec.field(name="_type")
    subject: tuple[_Subject]
    predicate_type: Annotated[str, Meta(max_length=200)] = msgspec.field(name="predicateType")
    predicate: _Predicate


_decode = msgspec.json.Decoder(_Statement).decode


def read_manifest(payload: bytes) -> Manifest:
    """The manifest that the payload of an envelope is.

    Raises:
        ArchiveInvalidError: malformed, at odds with itself, or of another version.
    """
    try:
        said = _decode(payload).predicate
        for hlc in (said.first_hlc, said.last_hlc):
            Hlc.parse(hlc)
    except (msgspec.MsgspecError, UnicodeError, InvalidInputError) as error:
        raise ArchiveInvalidError(f"a manifest is malformed, or not of version {FORMAT_VERSION}: {error}") from error
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


def _subject(manifest: Manifest) -> dict[str, object]:
    digest = sha256(b"".join(bytes.fromhex(file.sha256) for file in manifest.files)).hexdigest()
    return {"name": f"{manifest.tenant_id}/{manifest.from_seq}-{manifest.to_seq}", "digest": {"sha256": digest}}
