"""Archives: chained, signed ranges of a ledger as Parquet files under signed manifests, each written once.

This module holds names, bounds and manifests. The format is described in docs/formats/archive.md. In short::

    entries/tenant_id=acme/month=2026-11/<from>-<to>.parquet     entries from..to, 20 digits each
    snapshots/tenant_id=acme/<from>-<to>.parquet                 the snapshots that cover from..to without gap
    manifests/acme/<from>-<to>.dsse.json                         signed: what the range from..to is made of
    plans/acme/<from>.json                                       what a run that begins at from was to write

Invariants, of one tenant::

    manifests cover 1..n without gap; each names the digest of the one before
    the entry files of a manifest cover its range without gap; none crosses a multiple of FILE_ROWS_MAX or a month
    the month of an entry is that of the highest hlc_physical up to it, so months never go back
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from datetime import date, timedelta
from functools import partial
from hashlib import sha256
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ledger.chain.form import Count, Hash, Seq
from ledger.errors import (
    ArchiveInvalidError,
    ArchiveSignatureError,
    ArchiveUnavailableError,
    InvalidInputError,
    ProofError,
    refuse,
    reported_as,
)
from ledger.merkle import Frontier, verify_consistency
from ledger.names import is_readable_tenant
from ledger.verification.tree_check import StoredTree
from ledger.verification.verdict import Head
from objects.store import ArchiveStore
from signing.anchors import ANCHORS_MAX, BundledAnchor
from signing.envelope import Envelope
from signing.keys import Keyring
from signing.manifest import CONSISTENCY_HASHES_MAX, RangeManifest

FORMAT_VERSION: Final = 2
"""Of manifests without ``anchors``; version 1 has no ``extends``."""
ANCHORED_VERSION: Final = 3
"""Of manifests with ``anchors``."""

FILE_ROWS_MAX: Final = 262_144
"""An entry file ends at the next multiple of this, at the latest."""
GROUP_ROWS: Final = 8_192
"""Row groups end at multiples of this, so that a reader can fetch a range without its neighbours."""
GROUP_BYTES_MAX: Final = 32 << 20
"""A row group ends with the entry whose payload, or origin, takes it over this many bytes."""
FILE_STORED_BYTES: Final = 128 << 20
"""An entry file ends before its payloads take more than this in the database, unless it has one row."""
FILE_BYTES_MAX: Final = 1 << 30
"""Largest file of an archive; a file is uploaded whole."""
FILES_MAX: Final = 4_096
"""Most files of one manifest."""
RANGE_ROWS_MAX: Final = 64 * FILE_ROWS_MAX
"""Most entries that a run puts under one manifest, unless a single snapshot has more."""
RANGE_FILES: Final = 256
"""Most files that a run puts under one manifest, unless a single snapshot needs more."""
RANGE_SNAPSHOTS: Final = 4_096
"""Most snapshots that a run puts under one manifest. They stay in memory until their entries are read."""
MANIFEST_BYTES_MAX: Final = 4 << 20
PLAN_BYTES_MAX: Final = 2 << 20
CHECKPOINT_CHARACTERS_MAX: Final = 1 << 20
FRONTIER_HASHES_MAX: Final = 64
SEQ_DIGITS: Final = 20

MANIFESTS: Final = "manifests"

assert FILE_ROWS_MAX % GROUP_ROWS == 0
assert RANGE_FILES < FILES_MAX

_EPOCH: Final = date(1970, 1, 1)
_DAY_MS: Final = 86_400_000
_DAYS_A_CYCLE: Final = 146_097
"""Of 400 years, after which the calendar repeats: ``date`` ends with the year 9999, times do not."""
_FILE = re.compile(
    r"(entries|snapshots)/tenant_id=([a-z0-9_-]{1,64})/(?:month=([0-9]{4,9}-[0-9]{2})/)?"
    rf"([0-9]{{{SEQ_DIGITS}}})-([0-9]{{{SEQ_DIGITS}}})\.parquet"
)
_MANIFEST = re.compile(rf"([0-9]{{{SEQ_DIGITS}}})-([0-9]{{{SEQ_DIGITS}}})\.dsse\.json")


class FileName(NamedTuple):
    """The parsed name of a file. ``month`` is None for a file of snapshots."""

    tenant_id: str
    from_seq: int
    to_seq: int
    month: str | None

    def path(self) -> str:
        """The name of the file in the archive."""
        kind = "snapshots" if self.month is None else "entries"
        month = "" if self.month is None else f"month={self.month}/"
        return f"{kind}/tenant_id={self.tenant_id}/{month}{_span(self.from_seq, self.to_seq)}.parquet"

    def is_over(self) -> bool:
        """Whether the range is empty or crosses a multiple of ``FILE_ROWS_MAX``."""
        return not self.from_seq <= self.to_seq <= -(-self.from_seq // FILE_ROWS_MAX) * FILE_ROWS_MAX

    @classmethod
    def parse(cls, path: str) -> FileName:
        """The parts of ``path``.

        Raises:
            ArchiveInvalidError: ``path`` is no name of an archive file.
        """
        if (found := _FILE.fullmatch(path)) is None or (found[1] == "entries") != (found[3] is not None):
            raise ArchiveInvalidError(f"{path[:200]!r} is no name of a file of an archive")
        name = cls(found[2], int(found[4]), int(found[5]), found[3])
        if not is_readable_tenant(name.tenant_id):
            raise ArchiveInvalidError(f"{name.tenant_id[:200]!r} can be no tenant")
        return name


def end_of_files(tenant_id: str, from_seq: int, names: Iterable[FileName]) -> int:
    """The last seq of consecutive entry files that start at ``from_seq``.

    Raises:
        ArchiveInvalidError: a file does not follow its predecessor, or has an earlier month.
    """
    end_seq, month = from_seq - 1, ""
    for name in names:
        if (name.tenant_id, name.from_seq) != (tenant_id, end_seq + 1) or name.month is None or name.is_over():
            raise ArchiveInvalidError(f"{name.path()[:200]} is listed where a file of seq {end_seq + 1} on must be")
        if month_order(name.month) < month_order(month):
            raise ArchiveInvalidError(f"{name.path()} is of an earlier month than the file before it")
        end_seq, month = name.to_seq, name.month
    return end_seq


def manifest_path(tenant_id: str, from_seq: int, to_seq: int) -> str:
    """Path of the manifest of a range."""
    return f"{manifests_of(tenant_id)}/{_span(from_seq, to_seq)}.dsse.json"


def manifests_of(tenant_id: str) -> str:
    """Folder of the manifests of a tenant."""
    return f"{MANIFESTS}/{tenant_id}"


def manifest_range(name: str) -> tuple[int, int]:
    """First and last seq in the name, without folder, of a manifest.

    Raises:
        ArchiveInvalidError: it is no name of a manifest.
    """
    if (found := _MANIFEST.fullmatch(name)) is None:
        raise ArchiveInvalidError(f"{name[:200]!r} stands among the manifests and is no name of one")
    return int(found[1]), int(found[2])


def plan_path(tenant_id: str, from_seq: int) -> str:
    """Path of the plan of a run that starts at ``from_seq``."""
    return f"plans/{tenant_id}/{from_seq:0{SEQ_DIGITS}d}.json"


def month_of(physical_ms: int) -> str:
    """The month, in UTC, of a time in milliseconds since 1970, such as ``2026-11``."""
    return "{:04d}-{:02d}".format(*_year_and_month(physical_ms))


def month_order(month: str) -> tuple[int, str]:
    """Sort key of a month; years beyond 9999 sort correctly."""
    return len(month), month


def month_after(physical_ms: int) -> int:
    """Start of the month after that of ``physical_ms``, in milliseconds since 1970."""
    year, month = _year_and_month(physical_ms)
    year, month = (year, month + 1) if month < 12 else (year + 1, 1)
    cycles, years = divmod(year - _EPOCH.year, 400)
    days = (date(_EPOCH.year + years, month, 1) - _EPOCH).days
    return (cycles * _DAYS_A_CYCLE + days) * _DAY_MS


def _year_and_month(physical_ms: int) -> tuple[int, int]:
    cycles, days = divmod(physical_ms // _DAY_MS, _DAYS_A_CYCLE)
    at = _EPOCH + timedelta(days)
    return at.year + 400 * cycles, at.month


def _span(from_seq: int, to_seq: int) -> str:
    return f"{from_seq:0{SEQ_DIGITS}d}-{to_seq:0{SEQ_DIGITS}d}"


# --- objects ------------------------------------------------------------------------------------------


def put_object(store: ArchiveStore, name: str, data: bytes) -> bool:
    """Write an object and read it back; whether the name was free. If it was not, nothing is written.

    Raises:
        ArchiveUnavailableError: it cannot be written, or is not read back as it was written.
    """
    if not store.create(name, io.BytesIO(data)):
        return False
    if store.read(name, len(data)) != data:
        raise lost(store, name)
    return True


def lost(store: ArchiveStore, name: str) -> ArchiveUnavailableError:
    """The error for an object that is not read back as the storage took it."""
    return ArchiveUnavailableError(
        f"{name} of the archive {store.url} was written, and what is read back is another object or none: the storage "
        "loses what it acknowledged, or somebody changes it meanwhile. Nothing of this range counts as archived"
    )


# --- manifests ------------------------------------------------------------------------------------


PREDICATE_TYPE: Final = "https://tallystick.dev/archive/v1"


class ArchivedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a manifest. ``sha256`` is hex; ``rows`` are entries, or snapshots."""

    name: Annotated[str, Meta(max_length=200)]
    sha256: Hash
    bytes: Annotated[int, Meta(ge=1, le=FILE_BYTES_MAX)]
    rows: Seq

    @property
    def parsed(self) -> FileName:
        """The parts of its name."""
        return FileName.parse(self.name)


class Manifest(RangeManifest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The description of an archived range."""

    PREDICATE_TYPE = PREDICATE_TYPE
    INVALID = ArchiveInvalidError
    FORGED = ArchiveSignatureError

    from_chain_link: Hash
    """Chain link of the first entry."""
    highest_physical_ms: Count
    """Highest hlc_physical of all entries up to the last, those before the range too."""
    snapshot_count: Seq
    frontier: Annotated[tuple[Hash, ...], Meta(min_length=1, max_length=FRONTIER_HASHES_MAX)]
    """Roots of the perfect subtrees of its tree, the largest first. The next range is appended to them."""
    checkpoint: Annotated[str, Meta(max_length=CHECKPOINT_CHARACTERS_MAX)]
    """The newest signed note at the time of writing, of size ``to_seq`` or more."""
    previous_manifest: Hash | None
    """SHA-256 of the payload of the previous manifest."""
    files: Annotated[tuple[ArchivedFile, ...], Meta(min_length=2, max_length=FILES_MAX)]
    extends: Annotated[tuple[Hash, ...], Meta(max_length=CONSISTENCY_HASHES_MAX)] | UnsetType = UNSET
    """Proof that the tree extends that of the manifest before; empty if there is none, absent in version 1."""
    anchors: Annotated[tuple[BundledAnchor, ...], Meta(min_length=1, max_length=ANCHORS_MAX)] | UnsetType = UNSET
    """The cosignatures of witnesses on trees of the log that reach ``to_seq``, up to the checkpoint."""
    format_version: Literal[1, 2, 3] = FORMAT_VERSION

    def digests(self) -> Iterator[str]:
        """Digests of all files."""
        return (file.sha256 for file in self.files)

    def check(self) -> None:
        """Raises ArchiveInvalidError if the manifest contradicts itself."""
        names = [file.parsed for file in self.entry_files]
        odd = [file for file in self.entry_files if file.parsed.to_seq - file.parsed.from_seq + 1 != file.rows]
        snapshots = (FileName(self.tenant_id, self.from_seq, self.to_seq, None), self.snapshot_count)
        refuse(
            ArchiveInvalidError,
            (
                (self.from_seq == 1) != (self.previous_manifest is None),
                "only the manifest that begins at seq 1 has none before it",
            ),
            (
                (self.format_version == 1) != (self.extends is UNSET) or (self.from_seq == 1 and bool(self.extends)),
                "extends is there from version 2 on, and empty in the manifest that begins at seq 1",
            ),
            (
                (self.format_version == ANCHORED_VERSION) != (self.anchors is not UNSET),
                "anchors are there exactly in version 3",
            ),
            (
                self.to_seq - self.from_seq + 1 != self.entry_count,
                "range and entry_count of a manifest do not agree",
            ),
            (self.tree_size != self.to_seq, "tree_size of a manifest is not its to_seq"),
            (
                frontier_of(self).root().hex() != self.tree_root,
                "the frontier of a manifest does not have its tree_root",
            ),
            (
                end_of_files(self.tenant_id, self.from_seq, names) != self.to_seq,
                "the files of a manifest do not cover its range",
            ),
            (bool(odd), "".join(f"{file.name} is said to have {file.rows} rows" for file in odd[:1])),
            (
                (self.snapshot_file.parsed, self.snapshot_file.rows) != snapshots,
                "the last file of a manifest is not that of its snapshots",
            ),
        )

    @property
    def entry_files(self) -> tuple[ArchivedFile, ...]:
        """The files that hold entries."""
        return self.files[:-1]

    @property
    def snapshot_file(self) -> ArchivedFile:
        """The file that holds the snapshots."""
        return self.files[-1]

    def check_extends(self, size: int, root: str) -> None:
        """Raises ArchiveInvalidError if the proof of version 2 does not lead from this tree of the manifest before."""
        if self.extends is UNSET:
            return
        proof = [bytes.fromhex(each) for each in self.extends]
        with reported_as(
            partial(ArchiveInvalidError, seq=self.from_seq),
            f"the tree of the manifest from seq {self.from_seq} on does not extend that of the one before",
            *(ProofError, InvalidInputError),
        ):
            verify_consistency(size, self.tree_size, bytes.fromhex(root), bytes.fromhex(self.tree_root), proof)

    @property
    def last(self) -> Head:
        """The last entry."""
        return Head(self.to_seq, self.to_chain_link, self.last_hlc)

    @property
    def tree(self) -> StoredTree:
        """The tree up to the last entry."""
        return StoredTree(self.tree_size, self.tree_root)


class SealedManifest(NamedTuple):
    """A manifest as read. Its signature may be unverified."""

    manifest: Manifest
    envelope: Envelope
    last_snapshot: str | None = None
    """Digest of the snapshot that ends its range; None unless this process wrote the manifest."""

    @property
    def digest(self) -> str:
        """SHA-256 of its payload, hex; the next manifest names it."""
        return sha256(self.envelope.payload).hexdigest()


def open_manifest(data: bytes, keyring: Keyring | None = None) -> SealedManifest:
    """Parse the manifest in an object. With ``keyring``, a manifest that names one of its keys must have a valid
    signature by that key, checked before parsing.

    Raises:
        ArchiveInvalidError: malformed, contradictory, or of another version.
        ArchiveSignatureError: the signature is invalid.
    """
    if len(data) > MANIFEST_BYTES_MAX:
        raise ArchiveInvalidError(f"a manifest is over {MANIFEST_BYTES_MAX} bytes")
    opened = Manifest.open_envelope(data)
    Manifest.judge(opened, keyring)
    return SealedManifest(Manifest.read(opened.payload), opened)


def frontier_of(manifest: Manifest) -> Frontier:
    """The right edge of the tree at the end of the range.

    Raises:
        ArchiveInvalidError: the number of hashes does not fit a tree of that size.
    """
    with reported_as(ArchiveInvalidError, "the frontier of a manifest is none of its tree", InvalidInputError):
        return Frontier.restore(manifest.tree_size, [bytes.fromhex(each) for each in manifest.frontier])
