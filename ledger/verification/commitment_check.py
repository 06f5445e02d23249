"""Judges every proposal of a chain again, and checks the table of commitments.

Entries of commitments go through ``ledger.machines.commitments`` in chain order, as in the appender; the recorded
verdicts must equal the new ones, to the byte. Imported entries are history and MUST be left out. The rows of the table
are also ordered by seq, and the two streams are joined, so memory grows with active commitments, not with history::

    action, rejection == what judging the proposal gives           job_id == what the payload is about
    rows == accepted proposals other than revocations, and capacities, up to the seq that the table has followed
    ended_seq == the revocation of the row's entry, or the node's next capacity, up to that seq

A wrong verdict is reported once. Later verdicts may have been given by a node that trusted it, or before someone
changed it. So from there on two machines run, one with the right verdicts and one with the recorded ones: a later
verdict is right if either machine gives it. Table rows of commitments that a wrong verdict affects are not judged.

If entries left with a prune, judging begins with the commitments that the PRUNED entry carries. Rows of the table about
entries that left are those of what it carries, and of what had ended by then::

    row of an index that is carried          as if its entry was there
    row of another one up to the floor       ended_seq <= floor

Missing or edited entries give other verdicts, so if the chain itself is broken, the result is left undecided.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from ledger import canonical
from ledger.errors import InvalidInputError
from ledger.facts.events import CommitmentAction
from ledger.machines.carried import CarriedCommitments, read_commitments
from ledger.machines.commitment_state import LiveState
from ledger.machines.commitments import Commitments
from ledger.machines.promises import (
    Proposal,
    Rejection,
    Revocation,
    node_subject,
    proposed_payload,
    read_capacity,
    read_proposal,
    rejected_payload,
)
from ledger.machines.retention import Floor
from ledger.verification.projection_check import OnBreak
from ledger.verification.reader import ChainReader, CommitmentRow, PromisedRow, Rows
from ledger.verification.verdict import Findings, Found, is_number


async def judge_commitments(reader: ChainReader, on_break: OnBreak | None = None, floor: Floor | None = None) -> Found:
    """Judge all entries of commitments of a chain, and the rows of the table; ``floor`` is what left before.

    The breaks, with each of which ``on_break`` is called, apply only if the chain itself is whole.
    """
    judge = CommitmentJudge(await reader.followed_seq(), on_break, floor)
    promised = _one_by_one(reader.promised())
    row = await anext(promised, None)
    async for columns in _one_by_one(reader.commitments()):
        entry = CommitmentRow._make(columns)
        if not is_number(entry.seq):
            continue
        while row is not None and (not is_number(row[0]) or row[0] <= entry.seq):
            judge.add_promised(PromisedRow._make(row))
            row = await anext(promised, None)
        judge.add_entry(entry)
    while row is not None:
        judge.add_promised(PromisedRow._make(row))
        row = await anext(promised, None)
    return judge.finish()


async def _one_by_one(batches: Rows) -> AsyncIterator[Sequence[Any]]:
    async for rows in batches:
        for row in rows:
            yield row
        await asyncio.sleep(0)


class _Effect(NamedTuple):
    """The change that an entry makes to the active commitments."""

    subject: str | None = None
    """Subject of the table row for the entry, None if there must be none."""
    ended: int | None = None
    """The index of the commitment that the entry ends."""
    is_sure: bool = True
    """Whether the entry itself is right, so that the table must say the same."""


_NOTHING: Final = _Effect()
_UNSURE: Final = _Effect(is_sure=False)


class CommitmentJudge:
    """Takes entries and table rows, both by seq; of one seq, in either order."""

    def __init__(self, followed_seq: int, on_break: OnBreak | None = None, floor: Floor | None = None) -> None:
        """``followed_seq`` is the seq up to which the table has followed the chain, 0 if there is no table."""
        self._followed_seq = followed_seq
        self._findings = Findings(on_break)
        self._floor_seq = 0 if floor is None else floor.to_seq
        carried = None if floor is None else self._carried(floor)
        self._right = Commitments() if carried is None else carried.machine()
        self._left = {} if carried is None else carried.subjects()
        """The subjects of what is carried, by index, until the row is reached."""
        self._told: Commitments | None = None
        """The machine with the recorded verdicts, from the first wrong one on."""
        self._at = 0
        self._entry: CommitmentRow | None = None
        """The entry of seq ``_at``, and the table rows of that seq."""
        self._rows: list[PromisedRow] = []
        self._ends: dict[int, Any] = {}
        """By index of a commitment or capacity, the end that the table has for it."""
        self._capacities: dict[str, int] = {}
        """By subject, the index of the node's capacity."""
        if carried is not None:
            self._capacities = {node_subject(known.node): known.index for known in carried.state.nodes}

    def _carried(self, floor: Floor) -> CarriedCommitments | None:
        try:
            return read_commitments(floor.commitments, floor.to_seq)
        except InvalidInputError as error:
            self._report(floor.seq, f"PRUNED at seq {floor.seq}: {error}")
            return None

    def add_entry(self, entry: CommitmentRow) -> None:
        """The next entry; its seq is a number. Of several entries of one seq the first is used; one that left is
        not."""
        if entry.seq <= self._floor_seq:
            return
        self._reach(entry.seq)
        if self._entry is None:
            self._entry = entry

    def add_promised(self, row: PromisedRow) -> None:
        """The next row of the table."""
        if not is_number(row.seq):
            self._report(1, f"scheduler.commitments names seq {row.seq!r}")
            return
        self._reach(row.seq)
        self._rows.append(row)

    def finish(self) -> Found:
        """No entry or row follows; returns the result."""
        self._settle()
        self._miss(self._floor_seq)
        for index, ended_seq in self._ends.items():
            if ended_seq is not None:
                self._report_end(index, None, ended_seq)
        self._ends = {}
        return self._findings.found

    def _reach(self, seq: int) -> None:
        if seq != self._at:
            self._settle()
            self._at = seq

    def _settle(self) -> None:
        """The entry and rows of seq ``_at`` are complete: judge them."""
        seq, entry, rows = self._at, self._entry, self._rows
        self._entry, self._rows = None, []
        self._miss(min(seq - 1, self._floor_seq))
        if self._floor_seq and seq <= self._floor_seq:
            self._settle_left(seq, rows)
            return
        effect = _NOTHING if entry is None else self._judge(entry)
        if not effect.is_sure:
            self._ends.pop(effect.ended or 0, None)
            return
        is_followed = seq <= self._followed_seq
        if effect.ended is not None and is_followed and effect.ended in self._ends:
            ended_seq = self._ends.pop(effect.ended)
            if ended_seq != seq:
                self._report_end(effect.ended, seq, ended_seq)
        self._compare(seq, effect.subject if is_followed else None, rows)

    def _settle_left(self, seq: int, rows: Sequence[PromisedRow]) -> None:
        """Compare the rows of an entry that left."""
        subject = self._left.pop(seq, None)
        if self._floor_seq > self._followed_seq:
            self._compare(seq, None, rows)
        elif subject is not None or not all(self._has_ended(row) for row in rows):
            self._compare(seq, subject, rows)

    def _has_ended(self, row: PromisedRow) -> bool:
        return is_number(row.ended_seq) and row.ended_seq <= self._floor_seq

    def _miss(self, to_seq: int) -> None:
        """Report what is carried and in no row, up to a seq."""
        while self._left and (seq := next(iter(self._left))) <= to_seq:
            self._settle_left(seq, ())

    def _compare(self, seq: int, promised: str | None, rows: Sequence[PromisedRow]) -> None:
        """Compare the rows of one seq with the subject that the table must have there, None if it must have none."""
        if promised is None:
            if rows:
                self._report(seq, f"scheduler.commitments names seq {seq}, which promises nothing that was followed")
        elif not rows:
            self._report(seq, f"what seq {seq} promises is not in scheduler.commitments")
        else:
            self._ends[seq] = rows[0].ended_seq
            subject = next((row.subject for row in rows if row.subject != promised), promised)
            if subject != promised or len(rows) > 1:
                self._report(
                    seq,
                    f"scheduler.commitments names seq {seq} {len(rows)} times, or as another's",
                    promised,
                    subject,
                )

    # --- entries ----------------------------------------------------------------------------------

    def _judge(self, entry: CommitmentRow) -> _Effect:
        seq, job_id, action, payload = entry
        try:
            if type(payload) is not str:
                raise InvalidInputError(f"its payload is {payload!r}")
            if action == CommitmentAction.CAPACITY_SET:
                return self._take_capacity(seq, job_id, payload)
            proposal = read_proposal(payload)
            is_right = self._take_verdict(entry, proposal)
        except InvalidInputError as error:
            self._report(seq, f"{action} at seq {seq}: {error}")
            return _UNSURE
        commitment = proposal.commitment
        revoked = commitment.index if isinstance(commitment, Revocation) else None
        if not self._is_about(seq, job_id, commitment.subject) or not is_right:
            return _Effect(ended=revoked, is_sure=False)
        if action != CommitmentAction.PROPOSE_ACCEPTED:
            return _NOTHING
        return _Effect(ended=revoked) if revoked is not None else _Effect(commitment.subject)

    def _take_capacity(self, seq: int, job_id: Any, payload: str) -> _Effect:
        said = read_capacity(payload)
        for machine in (self._right, self._told):
            if machine is not None:
                machine.set_capacity(said)
        subject = node_subject(said.node)
        before = self._capacities.pop(subject, None)
        if not self._is_about(seq, job_id, subject):
            return _Effect(ended=before, is_sure=False)
        self._capacities[subject] = seq
        return _Effect(subject, before)

    def _is_about(self, seq: int, job_id: Any, subject: str) -> bool:
        if job_id != subject:
            self._report(seq, f"the job_id of seq {seq} is not what its payload is about", subject, job_id)
        return bool(job_id == subject)

    def _take_verdict(self, entry: CommitmentRow, proposal: Proposal) -> bool:
        """Judge the proposal and apply the result; returns whether its recorded verdict is right."""
        seq = entry.seq
        due = self._right.judge(proposal)
        is_right = _is_verdict(entry, proposal, due)
        if not is_right and (self._told is None or not _is_verdict(entry, proposal, self._told.judge(proposal))):
            said = "accepted" if entry.action == CommitmentAction.PROPOSE_ACCEPTED else _spelt(proposal.rejection)
            self._report(seq, f"the verdict of seq {seq} is not what judging its proposal gives", _spelt(due), said)
        if not is_right and self._told is None:
            tables: Iterable[Any] = self._right.state
            self._told = Commitments(LiveState(*map(dict, tables)))
        if due is None:
            self._right.apply(seq, proposal)
        if self._told is not None and entry.action == CommitmentAction.PROPOSE_ACCEPTED:
            _believe(self._told, seq, proposal)
        return is_right

    # --- what is wrong ----------------------------------------------------------------------------

    def _report_end(self, index: int, due: int | None, ended_seq: Any) -> None:
        detail = (
            f"scheduler.commitments says that the promise of seq {index} ended, which it did not"
            if due is None
            else f"scheduler.commitments does not say where the promise of seq {index} ended"
        )
        self._report(index, detail, due, ended_seq)

    def _report(self, seq: int, detail: str, expected: str | int | None = None, actual: Any = None) -> None:
        self._findings.add("projection", seq, detail, expected=expected, actual=actual)


def _is_verdict(entry: CommitmentRow, proposal: Proposal, due: Rejection | None) -> bool:
    """Whether the entry is the one that the appender makes of the proposal with the verdict ``due``."""
    if due is None or proposal.rejection != due:
        return due is None and proposal.rejection is None and entry.action == CommitmentAction.PROPOSE_ACCEPTED
    try:
        payload = rejected_payload(proposed_payload(entry.payload), due).decode()
    except (ValueError, TypeError, InvalidInputError):
        return False
    return bool(entry.action == CommitmentAction.PROPOSE_REJECTED and entry.payload == payload)


def _believe(machine: Commitments, seq: int, proposal: Proposal) -> None:
    """Apply a recorded acceptance, as far as possible."""
    commitment = proposal.commitment
    if not isinstance(commitment, Revocation) or commitment.index in machine.state.active:
        machine.apply(seq, proposal)


def _spelt(rejection: Rejection | None) -> str:
    """The verdict as text, the same for equal verdicts."""
    return "accepted" if rejection is None else canonical.encode(msgspec.to_builtins(rejection)).decode()
