"""What the entries of a verified bundle add up to, for a report: jobs by status, what was erased, who sent and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ledger.chain.conflict import held_event
from ledger.facts.events import ACTOR, EVENTS_BY_ACTION, VERDICTS, CommitmentAction, SystemAction
from ledger.machines import jobs
from ledger.machines.job_fold import JobFold
from ledger.verification import ENTRY_COLUMNS, FOLD_COLUMNS
from signing.bundle.reader import BundleReader

JOBS_MAX: Final = 200_000
"""A bundle with more jobs is reported without their number by status: each is held until its last entry was read."""
ACTORS_MAX: Final = 1000
"""Names that are counted each, those that come first; of all others it says how often they stand there."""

_PLACES: Final = tuple(map(ENTRY_COLUMNS.index, FOLD_COLUMNS))


class Actors(NamedTuple):
    """How many entries each actor stands in: by name, most first; those of names beyond ``ACTORS_MAX``, of private
    names, and those that do not say."""

    named: dict[str, int]
    others: int
    private: int
    unnamed: int


class Counts(NamedTuple):
    """``jobs`` by status, None where there are more than ``JOBS_MAX``; ``erasures`` are SUBJECT_ERASED entries, which
    destroyed ``erased_keys`` keys; who sent the events, and who did the reads of payloads that PAYLOADS_READ entries
    tell of."""

    jobs: dict[str, int] | None
    erasures: int
    erased_keys: int
    senders: Actors
    readers: Actors
    proposals: dict[str, int]
    """``accepted`` and ``rejected`` ones, imported ones among them."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return self._asdict() | {"senders": self.senders._asdict(), "readers": self.readers._asdict()}


class _ActorCount:
    def __init__(self) -> None:
        self._named: Counter[str] = Counter()
        self._others = self._private = self._unnamed = 0

    def add(self, payload: Mapping[str, Any]) -> None:
        actor = payload.get(ACTOR)
        if actor is None:
            self._unnamed += 1
        elif not isinstance(actor, str):
            self._private += 1
        elif actor in self._named or len(self._named) < ACTORS_MAX:
            self._named[actor] += 1
        else:
            self._others += 1

    def outcome(self) -> Actors:
        named = sorted(self._named.items(), key=lambda each: (-each[1], each[0]))
        return Actors(dict(named), self._others, self._private, self._unnamed)


def _told(action: str, job_id: str, text: str) -> str:
    """The action of an entry; of a CONFLICT entry that of the event which it holds."""
    held = held_event(jobs.payload_of(text), job_id) if action == SystemAction.CONFLICT else None
    return action if held is None else held.event.action


def counts_of(reader: BundleReader) -> Counts:
    """The counts of an open bundle whose rows were verified.

    Raises:
        BundleInvalidError: it is another by now.
    """
    folds: dict[str, JobFold] = {}
    erased: Counter[str] = Counter()
    erasures, is_counted = 0, True
    senders, readers = _ActorCount(), _ActorCount()
    proposals = {"accepted": 0, "rejected": 0}
    for rows in reader.entry_batches():
        for row in rows:
            job_id, seq, _, _, _, action, _, text = foldable = [row[place] for place in _PLACES]
            if action == SystemAction.SUBJECT_ERASED:
                erasures += 1
                erased.update(jobs.payload_of(text).get("key_ids", ()))
            elif action == SystemAction.PAYLOADS_READ:
                readers.add(jobs.payload_of(text))
            elif (told := _told(action, job_id, text)) in VERDICTS:
                proposals["accepted" if told == CommitmentAction.PROPOSE_ACCEPTED else "rejected"] += 1
            said = jobs.said_of_row(*foldable)
            if said is None:
                continue
            if said[0] in EVENTS_BY_ACTION:
                senders.add(said[1])
            if is_counted:
                folds.setdefault(job_id, JobFold(job_id)).add(*said, seq)
                is_counted = len(folds) <= JOBS_MAX
    by_status = None
    if is_counted:
        by_status = dict(sorted(Counter(jobs.status(fold.state()) for fold in folds.values()).items()))
    return Counts(by_status, erasures, len(erased), senders.outcome(), readers.outcome(), proposals)
