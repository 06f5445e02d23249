"""Checking snapshots against the entries they cover.

For each snapshot, with ``seq`` where a break is reported::

    snapshot-root        its row, its signed claim and the entries agree                   at to_seq
    snapshot-signature   a known key signed it, within the key's validity                  at to_seq
    snapshot-chain       it follows the one before it: range and digest                    at from_seq

A snapshot without an envelope is unsigned. Its row is compared with the entries, and its digest is that of the row
(``unsigned_digest``), which the next signed snapshot names. So an envelope that was removed is found by the snapshot
after it. The tree that a later snapshot signs covers its entries; without one, signatures are ``not_checked``. A
snapshot that lacks one of two signatures that are demanded covers its entries no more than an unsigned one.

The first begins at seq 1. A claim with an invalid signature is ignored: its row is compared instead. A difference is
left undecided if the chain breaks at a lower seq or entries are missing. A claim of another range than its row's is
a break by itself and is not compared with the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import orjson
from msgspec import UNSET, Meta, UnsetType

from ledger import canonical
from ledger.chain.form import Hash, HlcText, NodeId, Seq, TenantId
from ledger.decoding import convert
from ledger.errors import InvalidInputError, SignatureError
from ledger.job_index import RunPlace, covering
from ledger.job_index.builder import Roots
from ledger.verification.verdict import Findings, Head, is_number


class SnapshotClaim(msgspec.Struct, frozen=True):
    """The predicate of one snapshot; other members of it are ignored. Links, roots and digests are lowercase hex.

    Invariants::

        to_seq - from_seq + 1 == entry_count >= 1
        tree_size == to_seq
        from_seq == 1 if previous_snapshot is None else (to_seq of the previous snapshot) + 1
    """

    tenant_id: TenantId
    from_seq: Seq
    to_seq: Seq
    from_chain_link: Hash
    to_chain_link: Hash
    entry_count: Seq
    merkle_root: Hash
    """Root over the links of ``from_seq..to_seq`` alone."""
    tree_size: Seq
    tree_root: Hash
    """Root of the tenant's whole tree at ``tree_size``."""
    snapshot_hlc: HlcText
    """HLC of the last entry."""
    previous_snapshot: Hash | None
    """SHA-256 of the previous snapshot's DSSE payload; the ``unsigned_digest`` of one that is unsigned."""
    node_id: NodeId
    key_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    job_index: list[Hash] | UnsetType = UNSET
    """Roots of the runs of the index of jobs at ``to_seq`` (``ledger.job_index``); left out where there is none."""
    job_index_from: Seq | UnsetType = UNSET
    """The first entry of the index, after entries that left before there was one; left out where it is seq 1."""

    @property
    def index_begin(self) -> int:
        """Leaf index of the first entry of the index of jobs."""
        return 0 if isinstance(self.job_index_from, UnsetType) else self.job_index_from - 1

    @property
    def index_places(self) -> list[RunPlace]:
        """The runs of its index of jobs, as many as ``job_index`` MUST have roots."""
        return [*covering(self.to_seq, self.index_begin)]

    @property
    def index_roots(self) -> dict[RunPlace, bytes]:
        """The roots of its index of jobs, empty if it has none."""
        said = () if isinstance(self.job_index, UnsetType) else self.job_index
        return {place: bytes.fromhex(root) for place, root in zip(self.index_places, said, strict=False)}


SNAPSHOT_COLUMNS: Final = (
    "from_seq",
    "to_seq",
    "snapshot_hlc",
    "from_chain_link",
    "to_chain_link",
    "entry_count",
    "merkle_root",
    "dsse_envelope",
)
"""Columns of one row as readers give it; ``dsse_envelope`` is the stored text, None of an unsigned snapshot."""

SnapshotRow = Sequence[Any]
"""One row in the order of ``SNAPSHOT_COLUMNS``."""

_CLAIMED_IN_ROW: Final = SNAPSHOT_COLUMNS[:-1]


def unsigned_digest(row: SnapshotRow) -> str:
    """The digest of an unsigned snapshot: SHA-256 of the canonical JSON of its columns but the envelope.

    Raises:
        InvalidInputError: an edited column holds a value without canonical form.
    """
    return sha256(canonical.encode(dict(zip(_CLAIMED_IN_ROW, row, strict=False)))).hexdigest()


LACKS_ONE: Final = "lacks_one"


class OpenedSnapshot(NamedTuple):
    """The content of a stored snapshot, and whether a known key signed it.

    ``verdict``: ``ok``; ``broken``, a held key's signature does not hold; ``unknown_key``, no held key
    signed, or one revoked or outside its window; ``lacks_one``, one of two signatures that are demanded;
    ``not_checked``, no ring was given. ``detail`` says why it is not ``ok``; the claim is then what somebody wrote,
    no more.
    """

    claim: SnapshotClaim
    payload_sha256: str
    verdict: str
    detail: str | None


OpenSnapshot = Callable[[str], OpenedSnapshot]
"""Opens an envelope, given as text; raises SignatureError when it is malformed."""


Recomputed = Mapping[str, Any]
"""Values recomputed from the entries of a range, by member of a ``SnapshotClaim``; ``tree_root`` is None if the start
of the tree was not read. ``job_index`` has the roots of the runs that are known."""


class OpenedRow(NamedTuple):
    """One stored snapshot, its envelope opened and its signature judged."""

    stored_from: int
    stored_to: int
    row: list[Any]
    """All of ``SNAPSHOT_COLUMNS`` but the envelope, as stored."""
    claim: SnapshotClaim | None
    """None if it is unusable: not opened, malformed, or with an invalid signature."""
    digest: str | None
    may_count_as_signed: bool
    is_unsigned: bool = False
    """Whether it has no envelope, or lacks a signature that is demanded."""

    @property
    def from_seq(self) -> int:
        """First covered entry: the signed value, else the stored one."""
        return self.stored_from if self.claim is None else self.claim.from_seq

    @property
    def to_seq(self) -> int:
        """Last entry it covers."""
        return self.stored_to if self.claim is None else self.claim.to_seq

    @property
    def name(self) -> str:
        return f"snapshot of {self.from_seq}..{self.to_seq}"


def claim_in(payload: bytes) -> SnapshotClaim | None:
    """The claim in the payload of a snapshot, whoever signed it; None if there is none."""
    try:
        return convert(orjson.loads(payload)["predicate"], SnapshotClaim)
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def has_place(row: SnapshotRow, findings: Findings) -> bool:
    """Whether a row has a valid range; reports one that does not."""
    from_seq, to_seq = row[:2]
    if is_number(from_seq) and is_number(to_seq):
        return True
    seq = next((each for each in (to_seq, from_seq) if is_number(each)), 1)
    findings.add("snapshot-root", seq, f"a snapshot is said to go from {from_seq} to {to_seq}")
    return False


def open_row(row: SnapshotRow, open_snapshot: OpenSnapshot | None, findings: Findings) -> OpenedRow:
    """Open a row with a valid range; reports a signature that is invalid or cannot be judged."""
    from_seq, to_seq, envelope = int(row[0]), int(row[1]), row[-1]
    stored = [*row[:-1]]
    if open_snapshot is None and envelope is not None:
        return OpenedRow(from_seq, to_seq, stored, None, None, True)
    unusable = OpenedRow(from_seq, to_seq, stored, None, None, False)
    try:
        if open_snapshot is None or envelope is None:
            return unusable._replace(digest=unsigned_digest(stored), is_unsigned=True)
        if not isinstance(envelope, str):
            raise SignatureError("its envelope is no text")
        opened = open_snapshot(envelope)
    except (SignatureError, InvalidInputError) as error:
        findings.add("snapshot-signature", to_seq, f"the {unusable.name} is malformed: {error}")
        return unusable
    findings.begin("signatures")
    if opened.verdict == "broken":
        findings.add("snapshot-signature", to_seq, f"{unusable.name}: {opened.detail}")
        return unusable
    claim = opened.claim
    if opened.verdict == "unknown_key":
        findings.add(
            "snapshot-signature", to_seq, f"{unusable.name}: {opened.detail}", actual=claim.key_id, is_key_unknown=True
        )
    elif opened.verdict == "not_checked":
        findings.leave_undecided("signatures")
    lacks_one = opened.verdict == LACKS_ONE
    counts = not lacks_one and opened.verdict != "unknown_key"
    return OpenedRow(from_seq, to_seq, stored, claim, opened.payload_sha256, counts, is_unsigned=lacks_one)


Recompute = Callable[[int, int], Recomputed | None]
"""Recomputes values from entries ``from_seq..to_seq``, None if one is missing."""


class SnapshotJudge:
    """Judges the snapshots of one chain, one after another as they are stored."""

    def __init__(
        self,
        tenant_id: str,
        findings: Findings,
        *,
        first_seq: int = 1,
        expected_snapshot: str | None = None,
        is_index_whole: bool = False,
    ) -> None:
        """``expected_snapshot`` is the digest of the one that ends before ``first_seq``, None when it is not known.
        ``is_index_whole``: snapshots are undecided if a root of their index of jobs is not known."""
        self._is_index_whole = is_index_whole
        self._tenant_id = tenant_id
        self._findings = findings
        self._is_previous_known = first_seq == 1 or expected_snapshot is not None
        self._expected_from = first_seq if self._is_previous_known else None
        self._previous_digest = expected_snapshot
        self._covered_to = first_seq - 1
        self.signed_to: Head | None = None
        self.covered_to: Head | None = None
        """As ``signed_to``, by a snapshot that may be unsigned."""
        self.covered_digest: str | None = None
        """Digest of the snapshot that ends there."""
        self._unsigned_to = 0
        """Where the last unsigned snapshot ends."""

    @property
    def ends_unsigned(self) -> bool:
        """Whether an unsigned snapshot covers entries that no signed one covers."""
        return self._unsigned_to > (0 if self.signed_to is None else self.signed_to.seq)

    def is_next(self, snapshot: OpenedRow) -> bool:
        """Whether it covers entries from the end of the one before it, or its row begins after that end; only such a
        snapshot is compared with its entries."""
        return max(snapshot.stored_from, self._covered_to + 1) == snapshot.from_seq <= snapshot.to_seq

    def judge(self, snapshot: OpenedRow, recompute: Recompute) -> None:
        """Report the breaks of the next snapshot."""
        fits, recomputed = self._follows(snapshot), None
        if snapshot.is_unsigned:
            self._unsigned_to = max(self._unsigned_to, snapshot.to_seq)
        if self.is_next(snapshot):
            self._covered_to = snapshot.to_seq
            if (snapshot.from_seq, snapshot.to_seq) == (snapshot.stored_from, snapshot.stored_to):
                recomputed = recompute(snapshot.from_seq, snapshot.to_seq)
        for problem in _disagreements(snapshot, self._tenant_id):
            self._findings.add("snapshot-root", snapshot.to_seq, *problem)
            fits = False
        if recomputed is None:
            self._findings.leave_undecided("snapshots")
            return
        claimed = {} if snapshot.claim is None else snapshot.claim.index_roots
        if self._is_index_whole and not claimed.keys() <= recomputed.get("job_index", {}).keys():
            self._findings.leave_undecided("snapshots")
        for problem in _differences(snapshot, recomputed):
            fits = False
            if self._findings.chain_broken_by(snapshot.to_seq):
                self._findings.leave_undecided("snapshots")
            else:
                self._findings.add("snapshot-root", snapshot.to_seq, *problem)
        if fits and (snapshot.may_count_as_signed or snapshot.is_unsigned):
            end = Head(snapshot.to_seq, recomputed["to_chain_link"], recomputed["snapshot_hlc"])
            self.covered_to, self.covered_digest = end, snapshot.digest
            self.signed_to = end if snapshot.may_count_as_signed else self.signed_to

    def _follows(self, snapshot: OpenedRow) -> bool:
        expected, previous = self._expected_from, self._previous_digest
        is_previous_known = self._is_previous_known
        self._expected_from = max(snapshot.to_seq + 1, expected or 0)
        self._previous_digest, self._is_previous_known = snapshot.digest, snapshot.digest is not None
        if expected is not None and snapshot.from_seq != expected:
            self._findings.add(
                "snapshot-chain",
                min(expected, snapshot.from_seq),
                f"a snapshot begins at {snapshot.from_seq} where one from {expected} must follow",
                expected=expected,
                actual=snapshot.from_seq,
            )
            return False
        claim = snapshot.claim
        if claim is not None and is_previous_known and claim.previous_snapshot != previous:
            self._findings.add(
                "snapshot-chain",
                snapshot.from_seq,
                f"the snapshot from {snapshot.from_seq} names another one before it than the stored one",
                expected=previous,
                actual=claim.previous_snapshot,
            )
            return False
        return True


_Problem = tuple[str, str | int | None, str | int | None]


def _disagreements(snapshot: OpenedRow, tenant_id: str) -> Iterator[_Problem]:
    """Differences between the stored row and the signed claim, or within the claim."""
    claim = snapshot.claim
    if claim is None:
        return
    if claim.tenant_id != tenant_id:
        yield f"{snapshot.name} was signed for another tenant", tenant_id, claim.tenant_id
    for column, stored in zip(_CLAIMED_IN_ROW, snapshot.row, strict=True):
        if stored != (signed := getattr(claim, column)):
            yield f"{snapshot.name}: column {column} is not what was signed", signed, stored


def _differences(snapshot: OpenedRow, recomputed: Recomputed) -> Iterator[_Problem]:
    """Differences between the claim, or without one the row, and the entries."""
    stored = dict(zip(_CLAIMED_IN_ROW, snapshot.row, strict=True))
    for column, found in recomputed.items():
        if column == "tree_root" and None in (found, snapshot.claim):
            continue  # No row has it, and it is not known where the tree's beginning was not read.
        if column == "job_index":
            yield from _differences_of_index(snapshot, found)
            continue
        said = stored[column] if snapshot.claim is None else getattr(snapshot.claim, column)
        if said != found:
            yield f"{snapshot.name}: {column} is not that of the entries", found, said


def _differences_of_index(snapshot: OpenedRow, known: Roots) -> Iterator[_Problem]:
    """Differences between the claimed index of jobs, if there is one, and the roots that are known."""
    for place, claimed in ({} if snapshot.claim is None else snapshot.claim.index_roots).items():
        if claimed != (root := known.get(place, claimed)):
            run = f"of entries {place.begin + 1} to {place.end}"
            yield f"{snapshot.name}: job_index {run} is not that of the entries", root.hex(), claimed.hex()
