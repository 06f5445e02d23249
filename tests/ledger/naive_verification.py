"""The rules for entries read one after the other, without a thought for speed: the twin of the entry checker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from ledger.chain.form import fault_of
from ledger.verification.verdict import KINDS
from tests.ledger.ledger_in_memory import link_of


class Judgement(NamedTuple):
    """Breaks by kind, and (seq, kind) of the first."""

    counts: dict[str, int]
    first: tuple[int, str] | None


def judge_entries(tenant_id: str, entries: Sequence[dict[str, Any]]) -> Judgement:
    """All that is wrong with the entries of a chain."""
    breaks: list[tuple[int, int]] = []

    def add(seq: int, kind: str) -> None:
        breaks.append((seq, KINDS.index(kind)))

    rows = sorted(entries, key=lambda row: row["seq"])
    last_seq, before, all_v1 = 0, None, True
    for row in rows:
        seq = row["seq"]
        if seq <= last_seq:
            add(seq, "duplicate-seq")
            continue
        is_after_gap = seq > last_seq + 1
        if is_after_gap:
            add(last_seq + 1, "gap")
        breaks_before = len(breaks)
        if row["payload_digest"] != sha256(row["payload"].encode()).hexdigest():
            add(seq, "payload-digest")
        if row["t_hlc"] != f"{row['hlc_physical']}:{row['hlc_logical']}:{row['hlc_node']}":
            add(seq, "hlc-columns")
        if (row["link_version"] == 1 and not all_v1) or not _has_its_link(tenant_id, row):
            add(seq, "link")
        if len(breaks) == breaks_before and not _has_form(row):
            add(seq, "malformed")
        if not is_after_gap and row["prev_chain_link"] != (before["chain_link"] if before else None):
            add(seq, "prev-link")
        all_v1 = all_v1 and row["link_version"] == 1
        last_seq, before = seq, row
    ordered = sorted(breaks)
    counts = Counter(KINDS[kind] for _, kind in ordered)
    return Judgement(
        {kind: counts[kind] for kind in KINDS if counts[kind]},
        (ordered[0][0], KINDS[ordered[0][1]]) if ordered else None,
    )


def _has_form(row: dict[str, Any]) -> bool:
    columns = ("link_version", "t_hlc", "job_id", "action", "payload", "origin")
    return fault_of(*(row[name] for name in columns)) is None


def _has_its_link(tenant_id: str, row: dict[str, Any]) -> bool:
    prev = row["prev_chain_link"]
    if prev is not None and (len(prev) != 64 or set(prev) - set("0123456789abcdef")) and row["link_version"] != 1:
        return False
    return link_of(tenant_id, row) == row["chain_link"]
