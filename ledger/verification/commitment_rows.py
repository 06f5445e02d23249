"""Rows about commitments as verification reads them: entries that are judged, and the table of what is promised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ledger.facts.events import VERDICTS, CommitmentAction
from ledger.verification.entry_check import EntryRow

COMMITMENT_ACTIONS: Final = frozenset((*map(str, VERDICTS), str(CommitmentAction.CAPACITY_SET)))
"""Actions of the entries that are judged."""

COMMITMENT_COLUMNS: Final = ("seq", "job_id", "action", "payload")
"""Columns of one entry as readers give it to be judged, by seq; of those actions, and not imported."""

PROMISED_COLUMNS: Final = ("seq", "ended_seq", "subject")
"""Columns of one row of the table as readers give it, by seq."""


class CommitmentRow(NamedTuple):
    """One entry in the order of ``COMMITMENT_COLUMNS``."""

    seq: Any
    job_id: Any
    action: Any
    payload: Any


class PromisedRow(NamedTuple):
    """One row of the table in the order of ``PROMISED_COLUMNS``."""

    seq: Any
    ended_seq: Any
    subject: Any


def of_commitments(rows: Sequence[EntryRow]) -> list[CommitmentRow]:
    """Those of these entries that are to be judged."""
    return [
        CommitmentRow(row[0], row[5], row[6], row[11])
        for row in rows
        if type(row[6]) is str and row[6] in COMMITMENT_ACTIONS and row[12] is None
    ]
