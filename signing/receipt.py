"""The content of a receipt, its one encoding, and the statement that covers it.

Canonical JSON (RFC 8785), described in docs/formats/receipt.md::

    {"receipt":{"anchors":[...], "checkpoint":NOTE, "completeness":{...}, "covers":"job", "entry" or "absent",
                "entries":[{"inclusion":[...], "row":{...}}, ...], "extends":null or {...}, "format_version":2,
                "job_id":..., "keys":{...}, "log_origin":..., "node_id":..., "tenant_id":...},
     "statement":{"payload":..., "payloadType":..., "signatures":[{"keyid":..., "sig":...}]}}

The statement is an in-toto Statement in a DSSE envelope; the digest of its subject is SHA-256 of the value of
``receipt`` as encoded in the file. So a signature covers every byte, and a change of any value is detected.

Invariants::

    entries <= ENTRIES_MAX        seq ascends        none where covers == "absent", one where it is "entry", else some
    format_version == 2 exactly where there is "completeness", as there is where covers == "absent", not where "entry"
    bytes of the file <= FILE_BYTES_MAX

``make`` builds one from stored rows and tiles and trusts neither: every row must match its link, and every link must be
the leaf that the signed checkpoint covers. Rows that do not are rejected, never signed.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ledger import positions
from ledger.bundle.rows import CHAIN_LINK, SEQ, EntryObject, Row
from ledger.chain.form import Hash, NodeId, Seq, TenantId
from ledger.decoding import convert, decode
from ledger.errors import (
    BrokenRangeError,
    ReceiptInvalidError,
    ReceiptTooLargeError,
    SignatureError,
    refuse,
    reported_as,
)
from ledger.job_index.proof import RUNS_MAX, Neighbour, RunProof
from ledger.merkle import leaf_hash, tiles, verify_inclusion
from ledger.verification.entry_check import check_apart
from ledger.verification.verdict import Findings
from signing import manifest
from signing.anchors import ANCHORS_MAX, BundledAnchor, StoredAnchor
from signing.checkpoint import Checkpoint
from signing.checkpoint import read as read_checkpoint
from signing.envelope import SIGNATURES_MAX, Envelope
from signing.keys import KeyJson, Keyring, KeyringJson, Signer
from signing.manifest import CONSISTENCY_HASHES_MAX, LOG_ORIGIN

FORMAT_VERSIONS: Final = (1, 2)
"""Of a receipt without and with ``completeness``."""
PREDICATE_TYPE: Final = "https://tallystick.dev/receipt/v1"

FILE_BYTES_MAX: Final = 64 << 20
ENTRIES_MAX: Final = 10_000
INCLUSION_HASHES_MAX: Final = 64
"""A proof has one hash for each level of the tree, and sizes are below 2^53."""
CHECKPOINT_CHARACTERS_MAX: Final = 1 << 20
JOB_ID_CHARACTERS_MAX: Final = 1024

JOB: Final = "job"
ENTRY: Final = "entry"
ABSENT: Final = "absent"
"""Scope of a receipt: all entries of a job under the checkpoint, one entry, or that a job has none."""
Covers = Literal["job", "entry", "absent"]

STATED: Final = ("covers", "format_version", "job_id", "log_origin", "node_id", "tenant_id")
"""The fields of a receipt that its statement repeats."""

_JobId = Annotated[str, Meta(min_length=1, max_length=JOB_ID_CHARACTERS_MAX)]


class ProvedEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One entry, and the proof (RFC 9162 2.1.3) that it is in the tree of the checkpoint."""

    inclusion: Annotated[list[Hash], Meta(max_length=INCLUSION_HASHES_MAX)]
    row: EntryObject


class Extended(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The proof (RFC 9162 2.1.4) that the checkpoint's tree extends the log's tree at ``size``."""

    consistency: Annotated[list[Hash], Meta(max_length=CONSISTENCY_HASHES_MAX)]
    size: Seq


class SnapshotSignature(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A signature of a snapshot."""

    keyid: str
    sig: str


class SnapshotEnvelope(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The DSSE envelope of a snapshot."""

    payload: str
    payloadType: str  # noqa: N815 - DSSE names it so
    signatures: Annotated[list[SnapshotSignature], Meta(min_length=1, max_length=SIGNATURES_MAX)]


class Completeness(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The proof that the job has no other entries up to the end of a snapshot (``ledger.job_index.proof``)."""

    consistency: Annotated[list[Hash], Meta(max_length=CONSISTENCY_HASHES_MAX)]
    """That the checkpoint's tree extends the snapshot's (RFC 9162 2.1.4)."""
    runs: Annotated[list[RunProof], Meta(max_length=RUNS_MAX)]
    snapshot: SnapshotEnvelope


class Receipt(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The content of a receipt; the fields are in the order of canonical JSON."""

    anchors: Annotated[list[BundledAnchor], Meta(max_length=ANCHORS_MAX)]
    checkpoint: Annotated[str, Meta(max_length=CHECKPOINT_CHARACTERS_MAX)]
    completeness: Completeness | UnsetType = UNSET
    covers: Covers
    entries: Annotated[list[ProvedEntry], Meta(max_length=ENTRIES_MAX)]
    extends: Extended | None
    format_version: Literal[1, 2]
    job_id: _JobId
    keys: KeyringJson
    """As ``/v1/keys`` returns them, for people; never used to verify this receipt."""
    log_origin: Annotated[str, Meta(pattern=rf"^{LOG_ORIGIN}\Z")]
    node_id: NodeId
    tenant_id: TenantId

    @property
    def origin(self) -> str:
        """Origin of the tenant's log."""
        return f"{self.log_origin}/{self.tenant_id}"

    @property
    def tree_head(self) -> Checkpoint:
        """The checkpoint, its signature not verified.

        Raises:
            SignatureError: it is malformed.
        """
        return read_checkpoint(self.checkpoint)

    @property
    def seqs(self) -> list[int]:
        """Seqs of the entries, in the receipt's order."""
        return [entry.row.seq for entry in self.entries]

    @property
    def last_seq(self) -> int:
        """Seq of the last entry, 0 if there is none."""
        return self.entries[-1].row.seq if self.entries else 0


def draft_of(
    *,
    tenant_id: str,
    log_origin: str,
    node_id: str,
    covers: Covers,
    job_id: str,
    checkpoint: str,
    keys: Keyring,
) -> Receipt:
    """A receipt without entries and proofs. ``checkpoint`` is the signed note, ``keys`` are the published keys."""
    published = convert(keys.to_json(), KeyringJson)
    return Receipt(
        anchors=[],
        checkpoint=checkpoint,
        covers=covers,
        entries=[],
        extends=None,
        format_version=FORMAT_VERSIONS[0],
        job_id=job_id,
        keys=published,
        log_origin=log_origin,
        node_id=node_id,
        tenant_id=tenant_id,
    )


class _File(msgspec.Struct, forbid_unknown_fields=True):
    receipt: msgspec.Raw
    statement: msgspec.Raw


_ORDERED: Final = (
    *(Receipt, ProvedEntry, Extended, KeyJson, KeyringJson, BundledAnchor, _File),
    *(Completeness, RunProof, Neighbour, SnapshotEnvelope, SnapshotSignature),
)
assert all([*struct.__struct_fields__] == sorted(struct.__struct_fields__) for struct in _ORDERED)


def seal(receipt: Receipt, signer: Signer) -> bytes:
    """The file of ``receipt``, signed.

    Raises:
        ReceiptInvalidError: it breaks an invariant.
        ReceiptTooLargeError: it is longer than a receipt may be.
        SigningUnavailableError: the signer cannot be reached.
    """
    data = msgspec.json.encode(receipt)
    file = msgspec.json.encode(_File(msgspec.Raw(data), msgspec.Raw(manifest.seal(_statement(receipt, data), signer))))
    if len(file) > FILE_BYTES_MAX:
        raise ReceiptTooLargeError(f"the receipt would be longer than {FILE_BYTES_MAX >> 20} MiB")
    read(file)
    return file


def read(file: bytes) -> tuple[Receipt, Envelope]:
    """The receipt in a file and the envelope of its statement; form, encoding and statement are checked, no signature
    is verified.

    Raises:
        ReceiptInvalidError: it is not a receipt, or contradicts itself.
    """
    if len(file) > FILE_BYTES_MAX:
        raise ReceiptInvalidError(f"a receipt is at most {FILE_BYTES_MAX} bytes long, this file is longer")
    with reported_as(
        ReceiptInvalidError,
        "it is no receipt, or one of another version",
        *(msgspec.MsgspecError, UnicodeError, RecursionError),
    ):
        found = decode(file, _File)
        receipt = decode(found.receipt, Receipt)
    data = msgspec.json.encode(receipt)
    if msgspec.json.encode(_File(msgspec.Raw(data), found.statement)) != file:
        raise ReceiptInvalidError("the file is not canonical JSON")
    opened = manifest.open_envelope(bytes(found.statement), "the statement", ReceiptInvalidError)
    if _statement(receipt, data) != opened.payload:
        raise ReceiptInvalidError("the statement is not about this receipt: something was changed since it was signed")
    _check(receipt)
    return receipt, opened


def _statement(receipt: Receipt, data: bytes) -> bytes:
    """The bytes that are signed for ``receipt``, whose encoding is ``data``."""
    predicate = {name: getattr(receipt, name) for name in STATED}
    name, digest = f"{receipt.tenant_id}/{receipt.job_id}", sha256(data).hexdigest()
    return manifest.encode(name, digest, PREDICATE_TYPE, predicate)


def _check(receipt: Receipt) -> None:
    """Reject a receipt that contradicts itself."""
    seqs, is_of_entry, is_of_none = receipt.seqs, receipt.covers == ENTRY, receipt.covers == ABSENT
    is_whole = not isinstance(receipt.completeness, UnsetType)
    is_ascending = all(seq < following for seq, following in pairwise(seqs))
    refuse(
        ReceiptInvalidError,
        (not is_ascending, "the entries do not stand in the order of their seq, each once"),
        (is_of_entry and len(seqs) != 1, f"a receipt for one entry holds {len(seqs)}"),
        (bool(seqs) == is_of_none, f"a receipt that covers {receipt.covers!r} holds {len(seqs)} entries"),
        (receipt.format_version != FORMAT_VERSIONS[is_whole], "format_version and completeness disagree"),
        (is_whole and is_of_entry, "a receipt for one entry speaks of others"),
        (is_of_none and not is_whole, "a receipt for a job without entries proves nothing"),
    )
    with reported_as(ReceiptInvalidError, "the receipt's checkpoint is none", SignatureError):
        own = receipt.tree_head
    refuse(
        ReceiptInvalidError,
        (own.origin != receipt.origin, f"the checkpoint is of log {own.origin[:200]!r}, not of {receipt.origin!r}"),
        (own.size < receipt.last_seq, f"the checkpoint covers {own.size} entries, and seq {receipt.last_seq} is here"),
    )
    for entry in receipt.entries:
        if (entry.row.tenant_id, entry.row.job_id) != (receipt.tenant_id, receipt.job_id):
            raise ReceiptInvalidError(f"seq {entry.row.seq} is of another tenant or job")


class IndexProof(NamedTuple):
    """The proof of a job by the index of jobs that a snapshot signed."""

    size: int
    """Entries that the index covers; the checkpoint covers all of them."""
    envelope: str
    """Of the snapshot, as JSON."""
    runs: list[RunProof]


class Material(NamedTuple):
    """The input of a receipt, all of one state of the ledger."""

    draft: Receipt
    """The receipt without entries and proofs."""
    rows: Sequence[Row]
    """The entries, by seq; none if the receipt is for a job without. The checkpoint covers all."""
    said: Sequence[StoredAnchor]
    """The statements of external witnesses about the log."""
    extends: int | None = None
    """Size of an earlier tree that the receipt proves the checkpoint to extend; at most the checkpoint's size."""
    indexed: IndexProof | None = None
    """Proof that there are no other entries."""

    @property
    def tiles(self) -> set[tuple[int, int]]:
        """The tiles that ``make`` asks for."""
        size = self.draft.tree_head.size
        first_sizes = [each.size for each in self.said] + ([] if self.extends is None else [self.extends])
        first_sizes += [] if self.indexed is None else [self.indexed.size]
        return set().union(
            *(tiles.consistency_tiles(first, size) for first in first_sizes),
            *(tiles.inclusion_tiles(positions.leaf_index_of(positions.Seq(row[SEQ])), size) for row in self.rows),
        )


def make(material: Material, get_tile: tiles.GetTile, signer: Signer) -> bytes:
    """The file of a receipt, signed.

    Raises:
        BrokenRangeError: rows do not match their links.
        ProofError: rows or tiles are not those that the checkpoint covers.
        ReceiptInvalidError: the rows are not the job's, each once; or as ``seal``.
        ReceiptTooLargeError: there is too much for one receipt.
        SigningUnavailableError: the signer cannot be reached.
    """
    draft, earlier, indexed = material.draft, material.extends, material.indexed
    signed, findings = draft.tree_head, Findings()
    check_apart(draft.tenant_id, material.rows, findings)
    if (found := findings.first_break()) is not None:
        raise BrokenRangeError(found)

    def consistency(first: int) -> list[bytes]:
        return tiles.consistency_proof(first, signed.size, get_tile)

    entries = []
    for row in material.rows:
        at = positions.leaf_index_of(positions.Seq(row[SEQ]))
        hashes = tiles.inclusion_proof(at, signed.size, get_tile)
        verify_inclusion(at, signed.size, leaf_hash(bytes.fromhex(row[CHAIN_LINK])), hashes, signed.root)
        entries.append(ProvedEntry(_in_hex(hashes), EntryObject.of(draft.tenant_id, row)))
    receipt = msgspec.structs.replace(
        draft,
        anchors=[each.bundled(consistency(each.size)) for each in material.said],
        entries=entries,
        extends=None if earlier is None else Extended(_in_hex(consistency(earlier)), earlier),
    )
    if indexed is not None:
        with reported_as(ReceiptInvalidError, "the snapshot is not one that a receipt holds", msgspec.MsgspecError):
            snapshot = decode(indexed.envelope.encode(), SnapshotEnvelope)
        proved = Completeness(_in_hex(consistency(indexed.size)), indexed.runs, snapshot)
        receipt = msgspec.structs.replace(receipt, completeness=proved, format_version=FORMAT_VERSIONS[1])
    return seal(receipt, signer)


def _in_hex(hashes: Sequence[bytes]) -> list[str]:
    return [each.hex() for each in hashes]
