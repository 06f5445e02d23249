"""The manifest of a bundle: a signed statement of what range it holds and which bytes make it up.

Encoded and signed as in ``signing.manifest``, with predicate type ``https://tallystick.dev/bundle/v1``. Its subject
covers the digests of the parts.

Invariants::

    entry_count == to_seq - from_seq + 1 == rows of all entry parts      tree_size == to_seq
    snapshot_count == rows of snapshots.ndjson

Evidence of a broken chain is the unchanged database rows in the container of a bundle. In place of the manifest it ends
with ``evidence.dsse.json``, a DSSE envelope around an in-toto Statement of predicate type
``https://tallystick.dev/bundle-evidence/v1`` (docs/formats/bundle.md). Every reader rejects such a file and reports the
break that it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from ledger.bundle.format import (
    MANIFEST_BYTES_BASE,
    SNAPSHOTS,
    Part,
    check_parts,
    tail_of,
    version_of,
)
from ledger.chain.form import Count
from ledger.decoding import decode
from ledger.errors import BundleInvalidError, BundleSignatureError, refuse
from ledger.verification.verdict import Break
from signing.keys import Signer
from signing.manifest import RangeManifest, encode, open_envelope, range_name, seal

PREDICATE_TYPE: Final = "https://tallystick.dev/bundle/v1"


class Manifest(RangeManifest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The manifest of a bundle."""

    PREDICATE_TYPE = PREDICATE_TYPE
    INVALID = BundleInvalidError
    FORGED = BundleSignatureError

    format_version: Literal[1, 2, 3]
    snapshot_count: Count
    parts: tuple[Part, ...]

    @property
    def entry_parts(self) -> tuple[Part, ...]:
        """The parts that hold entries."""
        return self.parts[: 1 - len(tail_of([part.name for part in self.parts]))]

    def lists(self, name: str) -> bool:
        """Whether it lists a member of this name after the entries."""
        return name in tail_of([part.name for part in self.parts])

    def digests(self) -> Iterator[str]:
        """The digests of the parts."""
        return (part.sha256 for part in self.parts)

    def check(self) -> None:
        """Raises BundleInvalidError if it contradicts itself."""
        check_parts(self.parts)
        version = version_of([part.name for part in self.parts])
        entries = {self.entry_count, self.to_seq - self.from_seq + 1, sum(part.rows for part in self.entry_parts)}
        snapshots = sum(part.rows for part in self.parts if part.name == SNAPSHOTS)
        of_version = f"the manifest has parts that no bundle of version {self.format_version} has"
        refuse(
            BundleInvalidError,
            (self.format_version != version, of_version),
            (len(entries) > 1, "range, entry_count and rows of the manifest do not agree"),
            (self.snapshot_count != snapshots, "snapshot_count of the manifest is not the number of rows of its part"),
            (self.tree_size != self.to_seq, "tree_size of the manifest is not its to_seq"),
        )


EVIDENCE_TYPE: Final = "https://tallystick.dev/bundle-evidence/v1"
BREAKS_MAX: Final = 100
"""Breaks that evidence names; readers report the first."""
_TEXT_MAX: Final = 400
"""Characters of a detail that readers report."""

_Text = Annotated[str, Meta(max_length=MANIFEST_BYTES_BASE)]


class _Named(msgspec.Struct):
    kind: _Text
    seq: int
    detail: _Text


class _Predicate(msgspec.Struct):
    tenant_id: _Text
    breaks: Annotated[list[_Named], Meta(min_length=1)]


class _Statement(msgspec.Struct):
    predicate: _Predicate


def seal_evidence(
    *,
    node_id: str,
    log_origin: str,
    tenant_id: str,
    seqs: tuple[int, int],
    entry_count: int,
    snapshot_count: int,
    breaks: Sequence[Break],
    parts: Sequence[Part],
    signer: Signer,
) -> bytes:
    """The last member: the breaks, at least one, and the digests of all other members. ``seqs`` are those of the first
    and the last row, 0 without rows.

    Raises:
        SigningUnavailableError: the signer cannot be reached.
    """
    digest = sha256(b"".join(bytes.fromhex(part.sha256) for part in parts)).hexdigest()
    predicate: dict[str, Any] = {
        "format_version": 1,
        "node_id": node_id,
        "log_origin": log_origin,
        "tenant_id": tenant_id,
        "from_seq": seqs[0],
        "to_seq": seqs[1],
        "entry_count": entry_count,
        "snapshot_count": snapshot_count,
        "breaks": [{"kind": each.kind, "seq": each.seq, "detail": each.detail} for each in breaks[:BREAKS_MAX]],
        "parts": msgspec.to_builtins(parts),
    }
    return seal(encode(range_name(tenant_id, *seqs), digest, EVIDENCE_TYPE, predicate), signer)


def evidence_refusal(data: bytes) -> BundleInvalidError:
    """Why a file that ends with this member is no bundle. Its signature is not verified: a report of a break needs no
    trust."""
    what = "the file is evidence of a broken chain, and no bundle"
    try:
        payload = open_envelope(data, "the evidence", BundleInvalidError).payload
        said = decode(payload, _Statement).predicate
    except (msgspec.MsgspecError, UnicodeError, BundleInvalidError):
        return BundleInvalidError(f"{what}; which break it is about cannot be read")
    first = said.breaks[0]
    where = f"{first.kind[:_TEXT_MAX]} at seq {first.seq} of tenant {said.tenant_id[:_TEXT_MAX]}"
    return BundleInvalidError(f"{what}: {where}: {first.detail[:_TEXT_MAX]}")
