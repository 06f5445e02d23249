"""The manifest of a bundle: a signed statement of what range it holds and which bytes make it up.

Spelled and signed as ``signing.range_manifest`` has it, with predicate type ``https://tallystick.dev/bundle/v1``. The
digests that its subject covers are those of the parts.

Invariants::

    entry_count == to_seq - from_seq + 1 == rows of all entry parts      tree_size == to_seq
    snapshot_count == rows of snapshots.ndjson
"""

from __future__ import annotations

from typing import Final, Literal

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
from signing.range_manifest import ManifestForm, RangeManifest, Statement
from signing.statement import Count

PREDICATE_TYPE: Final = "https://tallystick.dev/bundle/v1"


class Manifest(RangeManifest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a bundle says it is."""

    format_version: Literal[1, 2]
    snapshot_count: Count
    parts: tuple[Part, ...]

    @property
    def entry_parts(self) -> tuple[Part, ...]:
        """The parts that hold entries."""
        return self.parts[: 1 - len(tail_of([part.name for part in self.parts]))]

    @property
    def has_anchors(self) -> bool:
        """Whether it lists what outsiders said."""
        return ANCHORS in tail_of([part.name for part in self.parts])


def _check(manifest: Manifest) -> None:
    check_parts(manifest.parts)
    if manifest.format_version != (FORMAT_VERSION_ANCHORED if manifest.has_anchors else FORMAT_VERSION):
        raise BundleInvalidError(f"the manifest has parts that no bundle of version {manifest.format_version} has")
    rows = sum(part.rows for part in manifest.entry_parts)
    if not manifest.to_seq - manifest.from_seq + 1 == manifest.entry_count == rows:
        raise BundleInvalidError("range, entry_count and rows of the manifest do not agree")
    snapshot_rows = sum(part.rows for part in manifest.parts if part.name == SNAPSHOTS)
    if manifest.snapshot_count != snapshot_rows:
        raise BundleInvalidError("snapshot_count of the manifest is not the number of rows of its part")
    if manifest.tree_size != manifest.to_seq:
        raise BundleInvalidError("tree_size of the manifest is not its to_seq")


FORM: Final = ManifestForm(
    Statement[Manifest],
    PREDICATE_TYPE,
    digests=lambda manifest: (part.sha256 for part in manifest.parts),
    check=_check,
    invalid=BundleInvalidError,
    forged=BundleSignatureError,
)
