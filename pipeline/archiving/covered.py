"""The snapshots of a range against the links of its entries, one window after another, as verification compares them.

What an archive holds was never signed by its run alone: each snapshot that goes into it was opened with a key that is
held, its row, its roots and its digest compared. Memory holds the snapshots that end within ``WINDOW_ROWS`` entries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import pyarrow as pa

from ledger.merkle import Frontier, leaf_hash
from ledger.verification.snapshot_check import OpenedRow, Recomputed, SnapshotChecker, SnapshotRow, open_row
from ledger.verification.verdict import Break, Findings
from pipeline.archive.layout import FileName
from pipeline.archiving.postgres import Ledger
from pipeline.arrow import lists_of, rows_of
from pipeline.keys import keyring_of
from signing.snapshot import open_snapshot

WINDOW_ROWS: Final = 16_384
"""Entries at a time; a snapshot that covers more is a window of its own."""

_LINK: Final = re.compile(r"[0-9a-f]{64}")


class UnjudgedBreak(Break):
    """Nothing is wrong but that no held key signed it."""


class Ground(NamedTuple):
    """What the snapshots of a range stand on."""

    frontier: tuple[str, ...]
    """Of the tree over all entries before the range, in hex."""
    previous_snapshot: str | None
    """Digest of the snapshot that ends right before the range; None when the range is the first."""
    keys: str | None
    """The keys that may have signed, as ``pipeline.keys.sent`` gives them."""


class Covered:
    """Follows the snapshots of one range alongside the links of its entries."""

    def __init__(self, ledger: Ledger, name: FileName, ground: Ground, findings: Findings) -> None:
        self._ledger, self._name, self._findings = ledger, name, findings
        before = name.from_seq - 1
        self.frontier = Frontier.restore(before, [bytes.fromhex(each) for each in ground.frontier])
        self.last: OpenedRow | None = None
        """The snapshot that was opened last."""
        self._open_row = partial(
            open_row, open_snapshot=partial(open_snapshot, keyring=keyring_of(ground.keys)), findings=findings
        )
        follows = None if ground.previous_snapshot is None else (before, ground.previous_snapshot)
        self._checker = SnapshotChecker(
            name.tenant_id, findings, self._opened, is_from_start=before == 0, follows=follows
        )
        self._range, self._from_link = Frontier(), ""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The snapshots that cover the range, each window checked before it is given; ends where they do not hold."""
        tenant_id, seq, to_seq, _ = self._name
        while seq <= to_seq and self._findings.first_break() is None:
            end = self._ledger.snapshot_end(tenant_id, seq, min(seq + WINDOW_ROWS - 1, to_seq))
            end = self._ledger.next_snapshot_end(tenant_id, seq) if end is None else end
            if end is None or end > to_seq:
                self._findings.add("snapshot-chain", seq, f"the snapshots end at {seq - 1} and not at {to_seq}")
                return
            batches = list(self._ledger.snapshots(tenant_id, seq, end))
            for batch in batches:
                self._checker.add(list(rows_of(batch)))
            self._pass(seq, end)
            if end == to_seq:
                self._checker.finish()
            if self._findings.first_break() is None:
                yield from batches
            seq = end + 1

    def _opened(self, row: SnapshotRow) -> OpenedRow:
        self.last = self._open_row(row)
        return self.last

    def _pass(self, from_seq: int, to_seq: int) -> None:
        """Take the entries of a window past the snapshots that cover them."""
        next_seq = from_seq
        for batch in self._ledger.entries(self._name.tenant_id, from_seq, to_seq, ("seq", "chain_link", "t_hlc")):
            seqs, links, hlcs = lists_of(batch)
            for seq, link in zip(seqs, links, strict=True):
                if seq != next_seq:
                    self._findings.add("gap", next_seq, f"seq {seq} stands where {next_seq} must follow")
                    return
                if not isinstance(link, str) or _LINK.fullmatch(link) is None:
                    self._findings.add("link", seq, "the stored link is none")
                    return
                next_seq += 1
            self._take(seqs[0], links, hlcs)
        if next_seq <= to_seq:
            missing = f"entries from seq {next_seq} on are missing, and a snapshot covers them"
            self._findings.add("gap", next_seq, missing)

    def _take(self, first_seq: int, links: Sequence[str], hlcs: Sequence[Any]) -> None:
        seq, last_seq = first_seq, first_seq + len(links) - 1
        while seq <= last_seq:
            cut = self._checker.cut(seq)
            end = last_seq if cut is None else min(cut, last_seq)
            if self._checker.begins_at(seq):
                self._range, self._from_link = Frontier(), links[seq - first_seq]
            taken = links[seq - first_seq : end + 1 - first_seq]
            leaf_hashes = [leaf_hash(bytes.fromhex(link)) for link in taken]
            self.frontier.extend(leaf_hashes)
            self._range.extend(leaf_hashes)
            covered = self._checker.ends_at(end)
            if covered is not None:
                self._checker.compare(self._recomputed(covered, links[end - first_seq], hlcs[end - first_seq]))
            seq = end + 1

    def _recomputed(self, covered: tuple[int, int], to_link: str, hlc: Any) -> Recomputed:
        from_seq, to_seq = covered
        return Recomputed(
            from_chain_link=self._from_link,
            to_chain_link=to_link,
            snapshot_hlc=hlc,
            entry_count=to_seq - from_seq + 1,
            merkle_root=self._range.root().hex(),
            tree_root=self.frontier.root().hex(),
        )


def worst(findings: Findings) -> Break | None:
    """The break to tell: of keys that nobody here can judge only where there is nothing else."""
    first = findings.first_break()
    if first is None or findings.verdicts()["signatures"] != "unknown_key":
        return first
    others = [each for each in findings.found().breaks if each.kind != "snapshot-signature"]
    return min(others, key=lambda each: each.seq, default=UnjudgedBreak(*first))
