"""What the entries of a verified bundle add up to, for a report: jobs by status, and what was erased."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, NamedTuple

from ledger.machines import jobs
from ledger.machines.events import SystemAction
from ledger.machines.job_fold import JobFold
from ledger.verification import ENTRY_COLUMNS, FOLD_COLUMNS
from signing.bundle.reader import BundleReader

JOBS_MAX: Final = 200_000
"""A bundle with more jobs is reported without their number by status: each is held until its last entry was read."""

_PLACES: Final = tuple(map(ENTRY_COLUMNS.index, FOLD_COLUMNS))


class Counts(NamedTuple):
    """``jobs`` by status, None where there are more than ``JOBS_MAX``; ``erasures`` are SUBJECT_ERASED entries, which
    destroyed ``erased_keys`` keys."""

    jobs: dict[str, int] | None
    erasures: int
    erased_keys: int

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return self._asdict()


def counts_of(reader: BundleReader) -> Counts:
    """The counts of an open bundle whose rows were verified.

    Raises:
        BundleInvalidError: it is another by now.
    """
    folds: dict[str, JobFold] = {}
    erased: Counter[str] = Counter()
    erasures, is_counted = 0, True
    for rows in reader.entry_batches():
        for row in rows:
            job_id, seq, _, _, _, action, _, text = foldable = [row[place] for place in _PLACES]
            if action == SystemAction.SUBJECT_ERASED:
                erasures += 1
                erased.update(jobs.payload_of(text).get("key_ids", ()))
            if not is_counted:
                continue
            said = jobs.said_of_row(*foldable)
            if said is not None:
                folds.setdefault(job_id, JobFold(job_id)).add(*said, seq)
                is_counted = len(folds) <= JOBS_MAX
    if not is_counted:
        return Counts(None, erasures, len(erased))
    statuses = Counter(jobs.status(fold.state()) for fold in folds.values())
    return Counts(dict(sorted(statuses.items())), erasures, len(erased))
