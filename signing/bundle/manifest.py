"""The manifest of a bundle: a signed statement of what range it holds and which bytes make it up.

Spelled and signed as ``signing.range_manifest`` has it, with predicate type ``https://tallystick.dev/bundle/v1``. The
digests that its subject covers are those of the parts.

Invariants::

    entry_count == to_seq - from_seq + 1 == rows of all entry parts      tree_size == to_seq
    snapshot_count == rows of snapshots.ndjson
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ledger import canonical
from ledger.bundle.format import (
    ANCHORS,
    FORMAT_VERSION,
    FORMAT_VERSION_ANCHORED,
    SNAPSHOTS,
    Part,
    check_parts,
    tail_of,
)
from ledger.errors import BundleInvalidError, BundleSignatureError
from signing import envelope
from signing.keys import Signer
from signing.range_manifest import Count, Hash, ManifestForm, RangePredicate, Statement

PREDICATE_TYPE: Final = "https://tallystick.dev/bundle/v1"


class Manifest(NamedTuple):
    """What a bundle says it is. Links, roots and digests are lowercase hex."""

    node_id: str
    """The node that exported it."""
    log_origin: str
    """With ``/`` and the tenant the origin of the tenant's log, as in its checkpoints."""
    tenant_id: str
    from_seq: int
    to_seq: int
    first_hlc: str
    last_hlc: str
    """HLCs of the first and the last entry; neither need be the lowest or highest."""
    to_chain_link: str
    """Chain link of the last entry."""
    entry_count: int
    snapshot_count: int
    tree_size: int
    tree_root: str
    """Root of the tenant's whole tree at ``to_seq``."""
    consistency: tuple[str, ...]
    """Proof that the tree of the checkpoint extends that of ``tree_size``; empty when they have one size."""
    parts: tuple[Part, ...]

    @property
    def origin(self) -> str:
        """Origin of the tenant's log."""
        return f"{self.log_origin}/{self.tenant_id}"

    @property
    def entry_parts(self) -> tuple[Part, ...]:
        """The parts that hold entries."""
        return self.parts[: 1 - len(tail_of([part.name for part in self.parts]))]

    @property
    def has_anchors(self) -> bool:
        """Whether it lists what outsiders said."""
        return ANCHORS in tail_of([part.name for part in self.parts])


class _PartItem(msgspec.Struct, forbid_unknown_fields=True):
    bytes: Count
    name: Annotated[str, Meta(max_length=100)]
    raw_bytes: Count
    rows: Count
    sha256: Hash


class _Predicate(RangePredicate, forbid_unknown_fields=True):
    format_version: Literal[1, 2]
    snapshot_count: Count
    parts: list[_PartItem]


_FORM: Final = ManifestForm(
    Statement[_Predicate],
    PREDICATE_TYPE,
    version=FORMAT_VERSION,
    invalid=BundleInvalidError,
    forged=BundleSignatureError,
)
open_envelope = _FORM.open_envelope
judge = _FORM.judge


def statement(manifest: Manifest) -> bytes:
    """The bytes that are signed for ``manifest``.

    Raises:
        CanonicalError: a field has no canonical form, such as an integer beyond 2^53 - 1.
    """
    predicate = {
        **manifest._asdict(),
        "consistency": list(manifest.consistency),
        "parts": [part._asdict() for part in manifest.parts],
        "format_version": FORMAT_VERSION_ANCHORED if manifest.has_anchors else FORMAT_VERSION,
    }
    return _FORM.statement(predicate, (part.sha256 for part in manifest.parts))


def sign(manifest: Manifest, signer: Signer) -> bytes:
    """The bytes of ``manifest.dsse.json``.

    Raises:
        SigningUnavailableError: the signer cannot be reached.
    """
    return canonical.encode(envelope.sign(statement(manifest), signer))


def read_manifest(payload: bytes) -> Manifest:
    """The manifest that the payload of an envelope is.

    Raises:
        BundleInvalidError: malformed, at odds with itself, or of another version.
    """
    said = _FORM.predicate(payload)
    manifest = Manifest(
        **{name: getattr(said, name) for name in Manifest._fields if name not in ("consistency", "parts")},
        consistency=tuple(said.consistency),
        parts=tuple(Part(item.name, item.sha256, item.bytes, item.raw_bytes, item.rows) for item in said.parts),
    )
    _check_counts(manifest)
    if statement(manifest) != payload:
        raise BundleInvalidError("the manifest's statement is not in canonical form, or its subject is another")
    return manifest


def _check_counts(manifest: Manifest) -> None:
    check_parts(manifest.parts)
    rows = sum(part.rows for part in manifest.entry_parts)
    if not manifest.to_seq - manifest.from_seq + 1 == manifest.entry_count == rows:
        raise BundleInvalidError("range, entry_count and rows of the manifest do not agree")
    snapshot_rows = sum(part.rows for part in manifest.parts if part.name == SNAPSHOTS)
    if manifest.snapshot_count != snapshot_rows:
        raise BundleInvalidError("snapshot_count of the manifest is not the number of rows of its part")
    if manifest.tree_size != manifest.to_seq:
        raise BundleInvalidError("tree_size of the manifest is not its to_seq")
