"""Checking signed snapshots against the entries they cover.

For each snapshot, with ``seq`` where a break is reported::

    snapshot-root        its row, its signed claim and the entries say the same            at to_seq
    snapshot-signature   a key that is held signed it, within the key's time               at to_seq
    snapshot-chain       it follows the one before it: range and digest                    at from_seq

The first begins at seq 1. A claim whose signature does not hold says nothing: its row is compared instead.
What does not fit because the chain below already breaks, or entries are missing, is left undecided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from ledger.errors import SignatureError
from ledger.merkle import Frontier, node_hash
from ledger.snapshot import SnapshotClaim
from ledger.verdict import Findings, Head

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
"""Columns of one row as readers give it; ``dsse_envelope`` is the stored text."""

SnapshotRow = Sequence[Any]
"""One row in the order of ``SNAPSHOT_COLUMNS``."""

_CLAIMED_IN_ROW: Final = SNAPSHOT_COLUMNS[:-1]


class OpenedSnapshot(Protocol):
    """What an envelope holds: a claim that keeps the invariants of one, and ``verdict`` on who made it, one of
    ok, broken, unknown_key and not_checked."""

    @property
    def claim(self) -> SnapshotClaim: ...
    @property
    def payload_sha256(self) -> str: ...
    @property
    def verdict(self) -> str: ...
    @property
    def detail(self) -> str | None: ...


OpenSnapshot = Callable[[str], OpenedSnapshot]
"""Opens an envelope, given as text; raises SignatureError when it is malformed."""


class Recomputed(NamedTuple):
    """What the entries of a range say themselves."""

    from_chain_link: str
    to_chain_link: str
    snapshot_hlc: str
    entry_count: int
    merkle_root: str
    tree_root: str | None
    """None when the tree's beginning was not read."""


class _Snapshot(NamedTuple):
    row: dict[str, Any]
    claim: SnapshotClaim | None
    """None when there is none to go by: not opened, malformed, or the signature does not hold."""
    digest: str | None
    from_seq: int
    to_seq: int
    may_count_as_signed: bool


class RangeTree:
    """The tree over a range of entries alone, made from nodes of a tree that they are appended to.

    A range that begins ``size_before`` leaves into that tree shares with it every perfect subtree up to
    ``2^level`` leaves, where ``2^level`` divides ``size_before``: those need not be hashed again.
    """

    def __init__(self, size_before: int) -> None:
        self.size_before = size_before
        self._level = (size_before & -size_before).bit_length() - 1
        """-1 when the range is the whole tree."""
        self._above = Frontier()
        """Takes the shared nodes of ``level`` for leaves."""

    def grow(self, grown: Sequence[list[bytes]]) -> None:
        """Append what ``Frontier.grow`` gave for the next leaves."""
        if 0 <= self._level < len(grown):
            self._above.grow(grown[self._level])

    def root(self, frontier: Frontier) -> bytes:
        """Root of the range; ``frontier`` is the tree's, with all leaves of the range and no more."""
        if self._level < 0:
            return frontier.root()
        below = (frontier.size & (1 << self._level) - 1).bit_count()
        hashes = frontier.hashes
        hashes = [*self._above.hashes, *hashes[len(hashes) - below :]]
        result = hashes.pop()
        for left in reversed(hashes):
            result = node_hash(left, result)
        return result


class SnapshotChecker:
    """Follows the snapshots of one chain alongside its entries.

    The caller adds rows ordered by ``from_seq`` before it passes the entries they cover, cuts what it
    passes at ``cut``, and says when ``cut`` is reached.
    """

    def __init__(
        self, tenant_id: str, findings: Findings, open_snapshot: OpenSnapshot | None, *, is_from_start: bool
    ) -> None:
        self._tenant_id = tenant_id
        self._findings = findings
        self._open_snapshot = open_snapshot
        self._waiting: deque[SnapshotRow] = deque()
        self._expected_from = 1 if is_from_start else None
        self._previous_digest: str | None = None
        self._is_previous_known = is_from_start
        self._active: _Snapshot | None = None
        self._range = RangeTree(0)
        self._from_link = ""
        self.signed_to: Head | None = None
        self.highest_seq = 0
        """Highest seq that any snapshot seen so far is said to reach."""

    def add(self, rows: Sequence[SnapshotRow]) -> None:
        """Take rows that come next."""
        for row in rows:
            from_seq, to_seq = row[:2]
            if isinstance(from_seq, int) and isinstance(to_seq, int):
                self._waiting.append(row)
                self.highest_seq = max(self.highest_seq, to_seq)
            else:
                seq = next((each for each in (to_seq, from_seq) if isinstance(each, int)), 1)
                detail = f"a snapshot is said to go from {from_seq} to {to_seq}"
                self._findings.add("snapshot-root", seq, detail)

    def last_waiting_from(self) -> int:
        """``from_seq`` of the last row added that was not begun, 0 when there is none."""
        return int(self._waiting[-1][0]) if self._waiting else 0

    def cut(self, seq: int, size: int) -> int | None:
        """The seq after which something begins or ends, given that ``seq`` comes next; begins what begins there.

        ``size`` is that of the tree which the caller grows, without entry ``seq``.
        """
        while self._active is None and self._waiting and self._waiting[0][0] <= seq:
            snapshot = self._open(self._waiting.popleft())
            if snapshot.from_seq == seq <= snapshot.to_seq:
                self._active, self._range, self._from_link = snapshot, RangeTree(size), ""
            else:
                self._judge(snapshot, None)
        if self._active is not None:
            return self._active.to_seq
        return int(self._waiting[0][0]) - 1 if self._waiting else None

    def grow(self, first_link: bytes, grown: Sequence[list[bytes]]) -> None:
        """The next entries, none of them past ``cut``: the link of the first, and what ``Frontier.grow`` gave."""
        if self._active is None:
            return
        if not self._from_link:
            self._from_link = first_link.hex()
        self._range.grow(grown)

    def reached_cut(self, seq: int, link: bytes, hlc: str, frontier: Frontier, tree_root: str | None) -> None:
        """Entry ``seq`` was the last one before the cut, and ``frontier`` has it; ``tree_root`` is of the whole."""
        snapshot = self._active
        if snapshot is None or snapshot.to_seq != seq:
            return
        self._active = None
        recomputed = Recomputed(
            from_chain_link=self._from_link,
            to_chain_link=link.hex(),
            snapshot_hlc=hlc,
            entry_count=frontier.size - self._range.size_before,
            merkle_root=self._range.root(frontier).hex(),
            tree_root=tree_root,
        )
        if self._judge(snapshot, recomputed) and snapshot.may_count_as_signed:
            self.signed_to = Head(seq, link.hex(), hlc)

    def lose_place(self) -> None:
        """Entries are missing here: what the open snapshot covers cannot be recomputed."""
        if self._active is not None:
            snapshot, self._active = self._active, None
            self._judge(snapshot, None)

    def finish(self) -> None:
        """No entry follows: judge what is left as far as that goes."""
        self.lose_place()
        while self._waiting:
            self._judge(self._open(self._waiting.popleft()), None)

    # --- one snapshot -----------------------------------------------------------------------------

    def _open(self, row: SnapshotRow) -> _Snapshot:
        named = dict(zip(SNAPSHOT_COLUMNS, row, strict=True))
        from_seq, to_seq = int(named["from_seq"]), int(named["to_seq"])
        if self._open_snapshot is None:
            return _Snapshot(named, None, None, from_seq, to_seq, True)
        add = self._findings.add
        try:
            if not isinstance(named["dsse_envelope"], str):
                raise SignatureError("it has no envelope")
            opened = self._open_snapshot(named["dsse_envelope"])
        except SignatureError as error:
            add("snapshot-signature", to_seq, f"the snapshot of {from_seq}..{to_seq} is malformed: {error}")
            return _Snapshot(named, None, None, from_seq, to_seq, False)
        if opened.verdict == "broken":
            add("snapshot-signature", to_seq, f"snapshot of {from_seq}..{to_seq}: {opened.detail}")
            return _Snapshot(named, None, None, from_seq, to_seq, False)
        claim = opened.claim
        if opened.verdict == "unknown_key":
            detail = f"snapshot of {from_seq}..{to_seq}: {opened.detail}"
            add("snapshot-signature", to_seq, detail, actual=claim.key_id, is_key_unknown=True)
        elif opened.verdict == "not_checked":
            self._findings.leave_undecided("signatures")
        may_count = opened.verdict != "unknown_key"
        return _Snapshot(named, claim, opened.payload_sha256, claim.from_seq, claim.to_seq, may_count)

    def _judge(self, snapshot: _Snapshot, recomputed: Recomputed | None) -> bool:
        """Report what does not fit; whether all was compared and fits."""
        fits = self._follows(snapshot)
        for problem in _disagreements(snapshot, self._tenant_id):
            self._findings.add("snapshot-root", snapshot.to_seq, *problem)
            fits = False
        if recomputed is None:
            self._findings.leave_undecided("snapshots")
            return False
        for problem in _differences(snapshot, recomputed):
            fits = False
            if self._findings.chain_broken_by(snapshot.to_seq):
                self._findings.leave_undecided("snapshots")
            else:
                self._findings.add("snapshot-root", snapshot.to_seq, *problem)
        return fits

    def _follows(self, snapshot: _Snapshot) -> bool:
        expected, previous = self._expected_from, self._previous_digest
        is_previous_known = self._is_previous_known
        self._expected_from = max(snapshot.to_seq + 1, expected or 0)
        self._previous_digest, self._is_previous_known = snapshot.digest, snapshot.digest is not None
        if expected is not None and snapshot.from_seq != expected:
            detail = f"a snapshot begins at {snapshot.from_seq} where one from {expected} must follow"
            seq = min(expected, snapshot.from_seq)
            self._findings.add("snapshot-chain", seq, detail, expected=expected, actual=snapshot.from_seq)
            return False
        claim = snapshot.claim
        if claim is not None and is_previous_known and claim.previous_snapshot != previous:
            detail = f"the snapshot from {snapshot.from_seq} names another one before it than the stored one"
            self._findings.add(
                "snapshot-chain", snapshot.from_seq, detail, expected=previous, actual=claim.previous_snapshot
            )
            return False
        return True


_Problem = tuple[str, str | int | None, str | int | None]


def _disagreements(snapshot: _Snapshot, tenant_id: str) -> Iterator[_Problem]:
    """Where the stored row and the signed claim, or parts of the claim, say different things."""
    claim, row = snapshot.claim, snapshot.row
    if claim is None:
        return
    name = f"snapshot of {snapshot.from_seq}..{snapshot.to_seq}"
    if claim.tenant_id != tenant_id:
        yield f"{name} was signed for another tenant", tenant_id, claim.tenant_id
    for column in _CLAIMED_IN_ROW:
        signed = getattr(claim, column)
        if row[column] != signed:
            yield f"{name}: column {column} is not what was signed", signed, row[column]


def _differences(snapshot: _Snapshot, recomputed: Recomputed) -> Iterator[_Problem]:
    """Where the claim, or without one the row, does not say what the entries say."""
    name = f"snapshot of {snapshot.from_seq}..{snapshot.to_seq}"
    for column in ("from_chain_link", "to_chain_link", "snapshot_hlc", "entry_count", "merkle_root"):
        said = snapshot.row[column] if snapshot.claim is None else getattr(snapshot.claim, column)
        found = getattr(recomputed, column)
        if said != found:
            yield f"{name}: {column} is not that of the entries", found, said
    if snapshot.claim is not None and recomputed.tree_root not in (None, snapshot.claim.tree_root):
        detail = f"{name}: tree_root is not that of the entries"
        yield detail, recomputed.tree_root, snapshot.claim.tree_root
