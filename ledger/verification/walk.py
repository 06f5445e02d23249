"""The walk along the entries of a chain, cut where a snapshot or a root of its tree begins or ends.

It says what is compared with what, and in which order; where the hashes come from is not its business. Verification of
a whole chain grows them from entry to entry (:mod:`ledger.verification`); verification in ranges looks them up in what
the ranges gave (:mod:`ledger.verification.range_fold`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ledger.verification.snapshot_check import Recomputed, SnapshotChecker
from ledger.verification.tree_check import TreeChecker


class Leaves(Protocol):
    """The hashes of the entries that the walk passes. Entries follow one another unless ``begin_tree`` is called."""

    def begin_tree(self, seq: int) -> None:
        """Entries are missing before ``seq``: a new tree begins, of which it is the first leaf."""

    def begin_range(self, seq: int) -> None:
        """A snapshot covers entries from ``seq`` on, which comes next."""

    def pass_to(self, seq: int) -> None:
        """The next entries up to ``seq`` are passed, none of them past a cut."""

    def link(self, seq: int) -> bytes:
        """The raw link of the entry just passed, or of the first that the snapshot covers."""

    def hlc(self, seq: int) -> Any:
        """``t_hlc`` of the entry just passed."""

    def range_root(self, from_seq: int, to_seq: int) -> bytes:
        """Root over the entries from where ``begin_range`` was called up to the one just passed."""

    def tree_root(self, size: int) -> bytes:
        """Root of the tree over all entries up to the one just passed."""


class Walk:
    """Takes entries, run by run, past the checks of snapshots and tree."""

    def __init__(self, snapshots: SnapshotChecker, tree: TreeChecker, leaves: Leaves, first_seq: int) -> None:
        self._snapshots = snapshots
        self._tree = tree
        self._leaves = leaves
        self._next_seq = first_seq
        self._has_all = first_seq == 1
        """Whether no entry is missing so far, from the first on."""
        leaves.begin_tree(first_seq)

    def take(self, first_seq: int, last_seq: int) -> Iterator[None]:
        """The next entries, which follow one another; pauses behind every cut, as what is compared there takes time."""
        if first_seq != self._next_seq:
            self._snapshots.lose_place()
            self._tree.lose_place()
            self._has_all = False
            self._leaves.begin_tree(first_seq)
        seq = first_seq
        while seq <= last_seq:
            cuts = (self._snapshots.cut(seq), self._tree.cut(seq), last_seq)
            end = min(cut for cut in cuts if cut is not None)
            if self._snapshots.begins_at(seq):
                self._leaves.begin_range(seq)
            self._leaves.pass_to(end)
            self._compare(end, is_root_due=self._tree.cut(seq) == end)
            seq = self._next_seq = end + 1
            yield

    def _compare(self, seq: int, *, is_root_due: bool) -> None:
        covered = self._snapshots.ends_at(seq)
        if covered is not None:
            self._snapshots.compare(self._recomputed(*covered))
        if is_root_due:
            self._tree.reached_cut(seq, self._leaves.tree_root(seq))

    def _recomputed(self, from_seq: int, to_seq: int) -> Recomputed:
        leaves = self._leaves
        return Recomputed(
            from_chain_link=leaves.link(from_seq).hex(),
            to_chain_link=leaves.link(to_seq).hex(),
            snapshot_hlc=leaves.hlc(to_seq),
            entry_count=to_seq - from_seq + 1,
            merkle_root=leaves.range_root(from_seq, to_seq).hex(),
            tree_root=leaves.tree_root(to_seq).hex() if self._has_all else None,
        )
