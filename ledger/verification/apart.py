"""Checking entries that need not follow one another, such as those of one job: each by itself, neighbours together.

What an entry names as the link before it is known only where the entry before it is there as well, and at seq 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ledger.verification.entry_check import EntryChecker, EntryRow, is_link
from ledger.verification.verdict import Findings

_SEQ, _PREV_CHAIN_LINK = 0, 8


def check_apart(tenant_id: str, rows: Sequence[EntryRow], findings: Findings) -> bool:
    """Judge rows, by seq, each of which stands there once; whether any has a link of version 1."""
    relied_on_v1, may_be_v1 = False, True
    for run in _runs(rows):
        seq, prev_link = run[0][_SEQ], run[0][_PREV_CHAIN_LINK]
        if seq > 1 and not is_link(prev_link):
            findings.add("prev-link", seq, f"seq {seq} names no link before it", actual=prev_link)
        known = None if seq == 1 else prev_link
        checker = EntryChecker(tenant_id, findings, first_seq=seq, prev_link=known, may_be_v1=may_be_v1)
        checker.check(run)
        may_be_v1, relied_on_v1 = checker.may_be_v1, relied_on_v1 or checker.relied_on_v1
    return relied_on_v1


def _runs(rows: Sequence[EntryRow]) -> Iterator[Sequence[EntryRow]]:
    """``rows``, parted where entries between them are not here."""
    begin = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at][_SEQ] != rows[at - 1][_SEQ] + 1:
            yield rows[begin:at]
            begin = at
