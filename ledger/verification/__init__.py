"""Verification of one tenant's ledger: one pure algorithm over a reader, wherever the rows come from.

A chain is checked in ranges (:mod:`ledger.verification.range_check`), whose summaries are folded into the verdict
(:mod:`ledger.verification.range_fold`). One driver (``driver``) runs the checks, in this process one after the other,
or several at once in other processes (``Checks``); on Spark each range is a task.

The reader MUST show one consistent state of the ledger throughout. Rows are streamed in batches, and memory does not
grow with their number. Between batches the event loop runs.

The requested range determines the checks. Entries, and snapshots wholly inside the range, are always checked; the head
if the range reaches the end; the stored tree, roots of the whole tree and checkpoints if it begins at seq 1; the
projection (verdicts on proposals, and the tables that follow from entries) if it is the whole chain. The rest is
``not_checked``.
"""

from __future__ import annotations

from ledger.verification.driver import Checks, verify
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.projection_check import FOLD_COLUMNS, JOB_COLUMNS
from ledger.verification.reader import COMMITMENT_ACTIONS, COMMITMENT_COLUMNS, PROMISED_COLUMNS, ChainReader
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS, OpenedSnapshot, OpenSnapshot
from ledger.verification.tree_check import StoredTree, TreeHead
from ledger.verification.verdict import ASPECTS, KINDS, Anchor, Break, Head, Verdict

__all__ = [
    "ASPECTS",
    "COMMITMENT_ACTIONS",
    "COMMITMENT_COLUMNS",
    "ENTRY_COLUMNS",
    "FOLD_COLUMNS",
    "JOB_COLUMNS",
    "KINDS",
    "PROMISED_COLUMNS",
    "SNAPSHOT_COLUMNS",
    "Anchor",
    "Break",
    "ChainReader",
    "Checks",
    "Head",
    "OpenSnapshot",
    "OpenedSnapshot",
    "StoredTree",
    "TreeHead",
    "Verdict",
    "verify",
]
