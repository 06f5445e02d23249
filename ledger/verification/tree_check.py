"""Checking the stored Merkle tree and given checkpoints against the entries.

The tree is grown again from the chain links. Every stored tile of the stored tree is compared with it, where tiles
are stored (:mod:`ledger.verification.tile_check`), and its root. The stored tree may be behind the chain, as far as
without entries, which leaves it not checked; it is never ahead, and its size is never below 0. A break
is reported at the first seq under the first hash that differs (``tree``), and a checkpoint at its size (``rollback``).
What does not fit because the chain below already breaks is left undecided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from ledger.merkle import EMPTY_ROOT
from ledger.verification.tile_check import TileBreak
from ledger.verification.verdict import Anchored, Findings

_EMPTY: Final = EMPTY_ROOT.hex()


class TreeHead(NamedTuple):
    """A tree head that someone kept: ``root`` is 32 raw bytes, ``source`` says who, such as ``node``.

    Only one from outside makes the verdict on checkpoints ``ok``. One that ``is_own``, kept with the entries, counts
    against them when they differ, and says nothing for them: whoever changed those could change it as well.
    """

    size: int
    root: bytes
    source: str
    fault: str | None = None
    """Why it does not open, when it does not: then size and root say nothing."""
    is_own: bool = False

    @property
    def holder(self) -> str:
        """Who keeps it, in words."""
        return self.source or "the ledger itself"


class Anchor(NamedTuple):
    """A tree head that somebody outside vouched for, in a statement that is kept inside.

    Who could cut the chain could remove the statement too; so it counts against the chain, and ``compared_with``
    does not name it. The caller has judged the statement: only one of status ``ok`` is compared (see ``Anchored``).
    """

    kind: str
    by: str
    time: str
    size: int
    root: bytes
    status: str = "ok"
    detail: str | None = None

    def found(self, status: str, detail: str | None = None) -> Anchored:
        """What came of it."""
        return Anchored(self.kind, self.by, self.time, self.size, status, detail)


class StoredTree(NamedTuple):
    """The tenant's row of the stored tree; ``root`` is hex."""

    size: int
    root: str


class TreeChecker:
    """Compares the tree of one chain, grown from its first entry, with what others say of it."""

    def __init__(
        self,
        findings: Findings,
        stored: StoredTree | None,
        checkpoints: Sequence[TreeHead],
        anchors: Sequence[Anchor],
    ) -> None:
        self._findings = findings
        self._stored = stored
        self._checkpoints = sorted((head for head in checkpoints if head.size > 0), key=lambda head: head.size)
        self._unreadable = [head for head in checkpoints if head.fault is not None]
        self._anchors = sorted((each for each in anchors if each.status == "ok"), key=lambda each: each.size)
        self._anchored = [each.found(each.status, each.detail) for each in anchors if each.status != "ok"]
        self._is_tree_compared = False
        self._sources = dict.fromkeys((head.source for head in checkpoints), False)

    def compared_sources(self) -> list[str]:
        """Named sources of the checkpoints that the chain was compared with so far, in the order they were given."""
        return [source for source, is_compared in self._sources.items() if is_compared and source]

    def anchored(self) -> tuple[Anchored, ...]:
        """What came of every anchor, once ``finish`` was called."""
        return tuple(sorted(self._anchored, key=lambda each: (each.kind, each.by, each.to_seq)))

    def compare(self, size: int, root: bytes) -> None:
        """The first ``size`` entries have this root: compare what is known for that size; sizes ascend."""
        if self._stored is not None and self._stored.size == size:
            self._is_tree_compared = True
            if self._stored.root != root.hex():
                self._report("tree", size, "the stored root is not that of the entries", root.hex(), self._stored.root)
        while self._checkpoints and self._checkpoints[0].size == size:
            head = self._checkpoints.pop(0)
            self._name_source(head)
            if head.root != root:
                detail = f"the first {size} entries are not those of the checkpoint held by {head.holder}"
                self._report("rollback", size, detail, head.root.hex() or None, root.hex())
        while self._anchors and self._anchors[0].size == size:
            self._compare_anchor(self._anchors.pop(0), root)

    def finish(self, *, last_seq: int) -> None:
        """No entry follows; ``last_seq`` is that of the last one there is."""
        for head in self._unreadable:
            self._name_source(head)
            detail = f"the checkpoint held by {head.holder} does not open: {head.fault}"
            self._findings.add("rollback", max(last_seq, 1), detail)
        for head in self._checkpoints:
            if head.size > last_seq:
                self._name_source(head)
                detail = f"the checkpoint held by {head.holder} covers {head.size} entries, there are {last_seq}"
                self._findings.add("rollback", last_seq + 1, detail, expected=head.size, actual=last_seq)
            elif not head.is_own:
                self._findings.leave_undecided("checkpoint")
        for anchor in self._anchors:
            detail = f"the {anchor.kind} anchor by {anchor.by} covers {anchor.size} entries, there are {last_seq}"
            if anchor.size > last_seq:
                self._findings.add("rollback", last_seq + 1, detail, expected=anchor.size, actual=last_seq)
                self._anchored.append(anchor.found("broken", detail))
            else:
                self._anchored.append(anchor.found("not_checked", "the entries up to there were not all read"))
        self._anchors.clear()
        if self._stored is not None and self._stored.size == 0 and self._stored.root != _EMPTY:
            detail = "the stored root is not that of a tree without entries"
            self._findings.add("tree", 1, detail, expected=_EMPTY, actual=self._stored.root)
        if not self._is_tree_compared and last_seq > 0:
            self._findings.leave_undecided("tree")

    def _name_source(self, head: TreeHead) -> None:
        if not head.is_own:
            self._findings.begin("checkpoint")
        self._sources[head.source] = True

    def _compare_anchor(self, anchor: Anchor, root: bytes) -> None:
        detail = f"the first {anchor.size} entries are not those of the {anchor.kind} anchor by {anchor.by}"
        if anchor.root == root:
            self._anchored.append(anchor.found("ok"))
        elif self._findings.chain_broken_by(anchor.size):
            self._anchored.append(anchor.found("not_checked", "the chain breaks before"))
        else:
            self._findings.add("rollback", anchor.size, detail, expected=anchor.root.hex(), actual=root.hex())
            self._anchored.append(anchor.found("broken", detail))

    def report_tile(self, found: TileBreak) -> None:
        """A stored tile that is not that of the entries."""
        self._report("tree", *found)

    def _report(self, kind: str, seq: int, detail: str, expected: str | None, actual: str | None) -> None:
        if self._findings.chain_broken_by(seq):
            self._findings.leave_undecided("tree" if kind == "tree" else "checkpoint")
        else:
            self._findings.add(kind, seq, detail, expected=expected, actual=actual)
