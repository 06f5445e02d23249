"""Verification of one tenant's ledger: one pure algorithm over a reader, wherever the rows come from.

A chain is checked in ranges (:mod:`ledger.verification.range_check`), whose summaries are folded into the verdict
(:mod:`ledger.verification.range_fold`). One driver has them checked (``driver``), in this process one behind the other
or elsewhere several at once (``checks``); on Spark each is a task.

The reader MUST show one consistent state of the ledger throughout. Rows stream by in batches; what is kept
does not grow with their number. Between batches the event loop gets its turn.

What is checked depends on the range that is asked for. Entries, and the snapshots that lie wholly inside it, always;
the head when the range reaches the end; the stored tree, roots of the whole tree and checkpoints when it begins at
seq 1; the projection when it is the whole chain: verdicts on proposals, and the tables that follow from entries. The
rest is ``not_checked``.
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
