"""The states of jobs folded from a part of a chain, so that parts folded in different places can be merged.

Merging is that of :mod:`ledger.machines.job_fold`, in the order of the parts: the outcome is the fold of all entries in
chain order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ledger.canonical import NESTING_MAX
from ledger.machines import jobs
from ledger.machines.job_fold import JobFold
from ledger.machines.job_state import JobState

_DECODER: Final = msgspec.msgpack.Decoder(JobState)


class JobParts:
    """Folds entries as they come, those up to ``upto_seq``, into the states of their jobs; all of them are held."""

    def __init__(self, upto_seq: int = 2**63 - 1) -> None:
        self._upto_seq = upto_seq
        self._folds: dict[str, JobFold] = {}

    def __len__(self) -> int:
        return len(self._folds)

    def add(self, columns: Sequence[Sequence[Any]]) -> None:
        """The next entries, by ``ENTRY_COLUMNS``; those that say nothing of a job are passed over."""
        seqs, _, physical, logical, nodes, job_ids, actions, _, _, _, digests, texts, _ = columns
        folds = self._folds
        for job_id, seq, ms, count, node, action, digest, text in zip(
            job_ids, seqs, physical, logical, nodes, actions, digests, texts, strict=True
        ):
            said = jobs.said_of_row(job_id, seq, ms, count, node, action, digest, text)
            if said is not None and seq <= self._upto_seq:
                fold = folds.get(job_id)
                if fold is None:
                    fold = folds[job_id] = JobFold(job_id)
                fold.add(*said, seq)

    def take(self) -> list[JobState]:
        """The states so far, which are held no more."""
        states = [fold.state() for fold in self._folds.values()]
        self._folds.clear()
        return states


def merged(parts: Sequence[JobState]) -> JobState | None:
    """The state of one job, from its parts in chain order; None of none."""
    if not parts:
        return None
    fold = JobFold(parts[0].job_id, parts[0])
    for part in parts[1:]:
        fold.join(part)
    return fold.state()


def encode(state: JobState) -> bytes:
    """As MessagePack, whatever edited payloads left in it."""
    try:
        return msgspec.msgpack.encode(state)
    except (RecursionError, OverflowError):
        return msgspec.msgpack.encode(_shallow(state, NESTING_MAX + len(("state", "created", "spec"))))


def decode(data: bytes) -> JobState:
    """What ``encode`` gave: a state that has the same encoded form, or like the original none."""
    return _DECODER.decode(data)


def _shallow(value: Any, room: int) -> Any:
    """``value`` without what lies so deep that it has no canonical form anyway."""
    if isinstance(value, dict):
        return {name: _shallow(part, room - 1) for name, part in value.items()} if room else {}
    if isinstance(value, list | tuple):
        return [_shallow(part, room - 1) for part in value] if room else []
    return value
