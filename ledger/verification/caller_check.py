"""Checks what callers signed: the signature in an entry, its times, and that no entry repeats another.

A break has the kind ``caller-signature``, at the seq of the entry. Each entry of a job event is checked by itself, and
one that a CONFLICT entry holds like one of its own::

    signature      its form; a key of a known caller made it over this event of this tenant and job
    times          the HLC lies in the times that the caller gave
    requirement    an event that its caller must sign has one; an imported one need not
    repetition     no earlier entry of the same log has the key, id and index

An imported entry whose key is not known is history of another ledger, which judges it: it is passed over. For the last
check each range collects ``Signed`` of its entries, 24 bytes each, and the fold compares them.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import orjson

from ledger import signed_events
from ledger.chain.conflict import held_event
from ledger.errors import InvalidInputError
from ledger.facts.events import EVENTS_BY_ACTION, SystemAction
from ledger.hlc import Hlc
from ledger.signed_events import MARK, MEMBER, CallerSignature
from ledger.verification.entry_check import SignableEntry
from ledger.verification.verdict import Findings

KIND: Final = "caller-signature"
_SIGNED: Final = struct.Struct(">16sq")
_BUCKETS: Final = 256


class Judged(NamedTuple):
    """``ok``; ``broken``, the caller did not sign this; ``unknown_key``, no known caller has this key, or it does not
    count there and then; ``not_checked``, no callers are known. ``detail`` says why it is not ``ok``."""

    verdict: str
    detail: str = ""


class CallerJudge(Protocol):
    """Knows the callers of a ledger, and what they must sign."""

    @abstractmethod
    def judge(self, tenant_id: str, signature: CallerSignature, message: bytes, hlc: Hlc) -> Judged:
        """Whether the caller of that key signed ``message``, of an event of this tenant and HLC.

        Raises:
            InvalidInputError: the signature is not base64.
        """

    @abstractmethod
    def requires_any(self, tenant_id: str) -> bool:
        """Whether callers of this tenant ever had to sign anything."""

    @abstractmethod
    def is_required(self, tenant_id: str, type_name: str, hlc: Hlc) -> bool:
        """Whether a caller must sign an event of this type at this HLC."""


class NobodyKnown(CallerJudge):
    """Knows no callers."""

    def judge(self, tenant_id: str, signature: CallerSignature, message: bytes, hlc: Hlc) -> Judged:
        """Not checked."""
        return Judged("not_checked")

    def requires_any(self, tenant_id: str) -> bool:
        """Never."""
        return False

    def is_required(self, tenant_id: str, type_name: str, hlc: Hlc) -> bool:
        """Never."""
        return False


NOBODY_KNOWN: Final = NobodyKnown()


class Event(NamedTuple):
    """A job event in an entry."""

    hlc: Hlc
    job_id: str
    type_name: str
    payload: Mapping[str, Any]


def event_in(entry: SignableEntry) -> Event | None:
    """The job event that an entry is, or that it holds as a CONFLICT entry; None if it has none, or is broken in
    itself, which is reported elsewhere."""
    _, t_hlc, job_id, action, text, _ = entry
    payload = _object_in(text)
    if action == SystemAction.CONFLICT and isinstance(job_id, str):
        if (held := held_event(payload, job_id)) is None:
            return None
        t_hlc, action, payload = held.event.t_hlc, held.event.action, _object_in(held.payload)
    if action not in EVENTS_BY_ACTION:
        return None
    try:
        return Event(Hlc.parse(t_hlc), job_id, EVENTS_BY_ACTION[action].name, payload)
    except (InvalidInputError, TypeError):
        return None


class CallerChecker:
    """Checks the entries of one range, in order."""

    def __init__(self, tenant_id: str, findings: Findings, judge: CallerJudge) -> None:
        self._tenant_id = tenant_id
        self._findings = findings
        self._judge = judge
        self.sees_all = judge.requires_any(tenant_id)
        """Whether unsigned entries are checked as well."""
        self.signed = bytearray()
        """``Signed`` of each entry with a signature."""

    def check_rows(self, rows: Iterable[Sequence[Any]]) -> None:
        """Check rows of ``ENTRY_COLUMNS``. Entries of link version 1 are older than signatures."""
        self.check(
            SignableEntry(row[0], row[1], row[5], row[6], row[11], row[12])
            for row in rows
            if row[7] != 1 and (self.sees_all or (type(row[11]) is str and MARK in row[11]))
        )

    def check(self, entries: Iterable[Sequence[Any]]) -> None:
        """Check entries that may be signed, and all if ``sees_all``, each with the members of ``SignableEntry``."""
        for entry in map(SignableEntry._make, entries):
            if (event := event_in(entry)) is not None:
                self._check(entry, event)

    def _check(self, entry: SignableEntry, event: Event) -> None:
        seq, origin = entry.seq, entry.origin
        if MEMBER not in event.payload:
            is_own = origin is None and entry.action != SystemAction.CONFLICT
            if is_own and self._judge.is_required(self._tenant_id, event.type_name, event.hlc):
                self._findings.add(KIND, seq, f"the caller of seq {seq} must sign {event.type_name}, and did not")
            return
        try:
            signature = signed_events.read(event.payload[MEMBER])
            signature.refuse_time(event.hlc.physical_ms)
            signature.raw()
            message = signed_events.signed_message(self._tenant_id, event.job_id, event.payload, signature)
        except InvalidInputError as error:
            self._findings.add(KIND, seq, f"seq {seq} is not as a caller signed it: {error}")
            return
        judged = self._judge.judge(self._tenant_id, signature, message, event.hlc)
        if judged.verdict == "not_checked":
            self._findings.leave_undecided("signatures")
        elif judged.verdict == "broken":
            self._findings.add(KIND, seq, f"seq {seq} is not as its caller signed it: {judged.detail}")
        elif judged.verdict == "unknown_key" and origin is None:
            self._findings.add(KIND, seq, f"the caller of seq {seq}: {judged.detail}", is_key_unknown=True)
        if entry.action != SystemAction.CONFLICT and type(seq) is int:
            log = None if origin is None else _object_in(origin).get("log")
            self.signed += _SIGNED.pack(signed_events.replay_id(signature, log if isinstance(log, str) else None), seq)


class Repetitions:
    """Finds entries that repeat others; holds 24 bytes for each signed entry."""

    def __init__(self) -> None:
        self._buckets: list[bytearray] = [bytearray() for _ in range(_BUCKETS)]

    def add(self, signed: bytes) -> None:
        """Take what a ``CallerChecker`` collected."""
        for at in range(0, len(signed), _SIGNED.size):
            self._buckets[signed[at]] += signed[at : at + _SIGNED.size]

    def report(self, findings: Findings) -> None:
        """Report each entry that repeats an earlier one."""
        for bucket in self._buckets:
            first: dict[bytes, int] = {}
            for replay_id, seq in sorted(_SIGNED.iter_unpack(bucket)):
                if (earlier := first.setdefault(replay_id, seq)) != seq:
                    findings.add(KIND, seq, f"seq {seq} repeats what its caller signed once, for seq {earlier}")


def _object_in(text: Any) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except (ValueError, TypeError):
        return {}
    return value if isinstance(value, dict) else {}
