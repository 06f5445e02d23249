"""Checking the entries of one chain: each row by itself, and each against the row before it.

Each column of a row is compared with the row's other columns, so that one edit shows as one kind of break::

    payload_digest == SHA-256(payload)                                   else payload-digest
    t_hlc == hlc_physical:hlc_logical:hlc_node                           else hlc-columns
    prev_chain_link == chain_link of the row before, as stored           else prev-link
    chain_link == link over the row's stored columns                     else link
    the row, if these hold, is one that a ledger writes or imports       else malformed

:mod:`ledger.chain.form` has the rules for rows that a ledger writes or imports.
A batch without any fault is checked in C, which is fast; any other row by row, which names the fault. A property test
ties the two. Entries from a connection or a file are checked in packed form, and decoded into rows only if there is a
fault (``PackedEntries``).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol

from ledger import native
from ledger.chain import Linker, form, link_v1
from ledger.errors import InvalidInputError
from ledger.merkle import leaf_hash
from ledger.verification.verdict import Break, Findings

ENTRY_COLUMNS: Final = (
    "seq",
    "t_hlc",
    "hlc_physical",
    "hlc_logical",
    "hlc_node",
    "job_id",
    "action",
    "link_version",
    "prev_chain_link",
    "chain_link",
    "payload_digest",
    "payload",
    "origin",
)
"""Columns of one row as readers give it; ``payload`` and ``origin`` are the stored text."""

_TYPES: Final = {
    **dict.fromkeys(("seq", "hlc_physical", "hlc_logical", "link_version"), (int,)),
    **dict.fromkeys(("t_hlc", "hlc_node", "job_id", "action", "chain_link", "payload_digest", "payload"), (str,)),
    **dict.fromkeys(("prev_chain_link", "origin"), (str, type(None))),
}
"""Types that each column may hold; checked here because someone may have dropped the constraints."""
_KIND_OF_COLUMN: Final = {
    **dict.fromkeys(("t_hlc", "hlc_physical", "hlc_logical", "hlc_node"), "hlc-columns"),
    **dict.fromkeys(("payload", "payload_digest"), "payload-digest"),
    "prev_chain_link": "prev-link",
}
"""By column, the kind of break reported for a value of the wrong type; ``link`` for all others."""

_SEQ, _T_HLC, _JOB_ID, _LINK_VERSION, _PREV_CHAIN_LINK, _CHAIN_LINK = map(
    ENTRY_COLUMNS.index, ("seq", "t_hlc", "job_id", "link_version", "prev_chain_link", "chain_link")
)

EntryRow = Sequence[Any]
"""One row in the order of ``ENTRY_COLUMNS``: a tuple, or a record that unpacks like one."""

_LINK = re.compile(r"[0-9a-f]{64}")


class SignableEntry(NamedTuple):
    """What is checked of an entry that a caller may have signed."""

    seq: Any
    t_hlc: Any
    job_id: Any
    action: Any
    payload: Any
    origin: Any


class Passed(NamedTuple):
    """The result of the C functions for packed entries that are all in order and of version 2."""

    leaves: list[bytes]
    """Hashes of the leaves that hold their links."""
    keys: bytes
    """Key of the job of each (``ledger.job_index``)."""
    marks: list[tuple[int, bytes, str]]
    """Seq, link and ``t_hlc`` of the entries in ``to_mark``."""
    first_prev: str | None
    """The first entry's ``prev_chain_link``."""
    last_raw: bytes
    last_link: str
    last_hlc: str
    commitments: int
    """Number of proposals and capacities that are not imported."""
    said: list[SignableEntry]
    """Entries that a caller may have signed: ``ledger.signed_events.MARK`` is in their payloads. Or all, if asked."""
    at: int
    """Offset of the first entry after ``stop_seq``."""


class Packed(Protocol):
    """Entries in the form in which they were received."""

    def passed(
        self,
        prefix: bytes,
        first_seq: int,
        prev_raw: bytes | None,
        prev_link: str | None,
        stop_seq: int,
        to_mark: Sequence[int],
        sees_all: bool,
    ) -> Passed | None:
        """The result for the entries up to ``stop_seq`` if all are in order and none has version 1; else None.

        Args:
            prefix: the bytes that all their links hash first.
            first_seq: the seq that the first entry must have.
            prev_raw: link of the entry before; None if the first entry's own ``prev_chain_link`` is trusted.
            prev_link: the same as stored.
            stop_seq: the last requested seq.
            to_mark: seqs, ascending.
            sees_all: whether ``said`` has all entries.
        """


class PackedEntries(ABC, Packed, Sequence[tuple[Any, ...]]):
    """Packed entries that are decoded into rows only when a row is accessed."""

    @abstractmethod
    def behind(self, at: int) -> PackedEntries | None:
        """The entries from ``Passed.at`` on, None if there are none."""

    @abstractmethod
    def unpacked(self) -> Sequence[tuple[Any, ...]]:
        """The rows."""

    @cached_property
    def _rows(self) -> Sequence[tuple[Any, ...]]:
        return self.unpacked()

    def __getitem__(self, at: Any) -> Any:
        return self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)


class EntryRun(NamedTuple):
    """Consecutive entries: their raw links, and the stored ``t_hlc`` and ``job_id`` of each."""

    first_seq: int
    links: list[bytes]
    hlcs: list[Any]
    jobs: list[Any]


class DeferredRow(NamedTuple):
    """A row of version 1 with a right link, which is valid only if all rows before it have version 1."""

    seq: int
    chain_link: str
    fault: str | None
    """How it violates the form of an entry."""


class EntryChecker:
    """Walks one chain in seq order, batch by batch; keeps none of the checked rows."""

    def __init__(
        self,
        tenant_id: str,
        findings: Findings,
        *,
        first_seq: int,
        prev_link: str | None,
        is_prev_known: bool = True,
        may_be_v1: bool = True,
        deferred: list[DeferredRow] | None = None,
    ) -> None:
        """``prev_link`` is the link of the row before ``first_seq``, None at the start of a chain.

        ``may_be_v1`` is whether all rows before ``first_seq`` have version 1: only then may more follow. If that is not
        known, ``deferred`` takes the rows that depend on it, for ``report_form``.
        """
        self.entries_checked = 0
        self._linker = Linker(tenant_id)
        self._findings = findings
        self.next_seq = first_seq
        """Seq that must come next."""
        self.last_link = prev_link
        """Stored link of the last checked entry; before the first one, ``prev_link``."""
        self._prev_raw = _raw(prev_link) or b""
        self._is_prev_known = is_prev_known
        self.may_be_v1 = may_be_v1
        """Whether all rows so far have version 1."""
        self._deferred = deferred

    @property
    def last_seq(self) -> int:
        """Seq of the last checked entry."""
        return self.next_seq - 1

    def check(self, rows: Sequence[EntryRow]) -> list[EntryRun]:
        """Check the next rows, at least one; returns them without duplicates, split at gaps."""
        return self._run_when_in_order(rows) or self.check_one_by_one(rows)

    def check_packed(
        self, packed: Packed, stop_seq: int, to_mark: Sequence[int], sees_all: bool = False
    ) -> Passed | None:
        """As ``check``, for packed entries up to ``stop_seq``. None, without a change, if ``check`` must be called."""
        if self.last_link is not None and not self._prev_raw:
            return None  # The entry before has a malformed link, so no entry can follow it in order.
        raw, link = (self._prev_raw, self.last_link) if self._is_prev_known else (None, None)
        passed = packed.passed(self._linker.prefix, self.next_seq, raw, link, stop_seq, to_mark, sees_all)
        if passed is not None and passed.leaves:
            self.entries_checked += len(passed.leaves)
            self.next_seq += len(passed.leaves)
            self.last_link, self._prev_raw, self._is_prev_known = passed.last_link, passed.last_raw, True
            self.may_be_v1 = False
        return passed

    def _run_when_in_order(self, given: Sequence[EntryRow]) -> list[EntryRun] | None:
        """The rows, if C finds that all are in order and of version 2; else None."""
        rows, count = [*map(tuple, given)], len(given)
        links = [row[_CHAIN_LINK] for row in rows]
        if (
            not self._is_prev_known
            or [row[_SEQ] for row in rows] != [*range(self.next_seq, self.next_seq + count)]
            or [row[_PREV_CHAIN_LINK] for row in rows] != [self.last_link, *links[:-1]]
            or native.leaves_of_entries(self._linker.prefix, rows) is None
        ):
            return None
        of_rows = [row[_T_HLC] for row in rows], [row[_JOB_ID] for row in rows]
        run = EntryRun(self.next_seq, [*map(bytes.fromhex, links)], *of_rows)
        self.entries_checked += count
        self.next_seq += count
        self.last_link, self._prev_raw = links[-1], run.links[-1]
        self.may_be_v1 = False
        return [run]

    def check_one_by_one(self, rows: Sequence[EntryRow]) -> list[EntryRun]:
        """As ``check``, in Python alone."""
        self.entries_checked += len(rows)
        runs: list[EntryRun] = []
        for row in rows:
            expected_seq = self.next_seq
            if (link := self._examine(row)) is None:
                continue
            if not runs or row[0] != expected_seq:
                runs.append(EntryRun(row[0], [], [], []))
            runs[-1].links.append(link)
            runs[-1].hlcs.append(row[_T_HLC])
            runs[-1].jobs.append(row[_JOB_ID])
            self.next_seq += 1
        return runs

    def _examine(self, row: EntryRow) -> bytes | None:
        """Report every fault of ``row``; returns its raw link, None if the row has no place in the chain.

        Leaves ``next_seq`` at the seq of the row.
        """
        seq, stored_link = row[0], row[9]
        if seq < self.next_seq:
            report_duplicate(self._findings, self.next_seq, seq)
            return None
        if seq > self.next_seq:
            report_gap(self._findings, self.next_seq, seq)
            self.next_seq, self._is_prev_known = seq, False
        computed = b"" if self._report_wrong_types(row) else self._examine_columns(row)
        self.last_link = stored_link
        leaf = _raw(stored_link)
        self._prev_raw = leaf or b""
        self._is_prev_known = True
        return leaf or computed

    def _report_wrong_types(self, row: EntryRow) -> bool:
        """Report the columns of ``row`` with values of a wrong type, such as NULL; returns whether there are any."""
        seq, found = row[0], columns_of_wrong_type(row)
        for name in found:
            kind = _KIND_OF_COLUMN.get(name, "link")
            value = row[ENTRY_COLUMNS.index(name)]
            what = "NULL" if value is None else f"of type {type(value).__name__}"
            self._findings.add(kind, seq, f"column {name} of seq {seq} is {what}", actual=value)
        return bool(found)

    def _examine_columns(self, row: EntryRow) -> bytes:
        seq, hlc, physical, logical, node, job, action, version, prev, stored, digest, text, origin = row
        add = self._findings.add
        payload_digest = sha256(text.encode()).hexdigest()
        if digest != payload_digest:
            add(
                "payload-digest",
                seq,
                f"the payload of seq {seq} does not have the digest stored with it",
                expected=digest,
                actual=payload_digest,
            )
        parts = f"{physical}:{logical}:{node}"
        if hlc != parts:
            add(
                "hlc-columns",
                seq,
                f"the HLC columns of seq {seq} are not those of its t_hlc",
                expected=hlc,
                actual=parts,
            )
        if self._is_prev_known and prev != self.last_link:
            report_prev_link(self._findings, seq, self.last_link, prev)
        computed, problem = self._link_of(row)
        if problem is None and computed.hex() != stored:
            problem = f"the link of seq {seq} is not that of its columns"
        if problem is not None:
            add("link", seq, problem, expected=computed.hex() or None, actual=stored)
        else:
            is_payload_right = digest == payload_digest and hlc == parts
            deferred = DeferredRow(
                seq, stored, form.fault_of(version, hlc, job, action, text, origin) if is_payload_right else None
            )
            if version == 1 and self.may_be_v1 and self._deferred is not None:
                self._deferred.append(deferred)
            else:
                report_form(self._findings, deferred, is_version_right=version != 1 or self.may_be_v1)
        self.may_be_v1 = self.may_be_v1 and version == 1
        return computed

    def _link_of(self, row: EntryRow) -> tuple[bytes, str | None]:
        """The link over the stored columns, and the reason if there can be none."""
        seq, hlc, _, _, _, job, action, version, prev, _, digest, _, origin = row
        if version == 1:
            return link_v1(hlc, job, action, prev, digest), None
        if version != 2:
            return b"", f"link version {version} of seq {seq} is not known"
        prev_raw = b"" if prev is None else _raw(prev)
        digest_raw = _raw(digest)
        if prev_raw is None or digest_raw is None:
            return b"", f"prev_chain_link or payload_digest of seq {seq} is not 64 lowercase hex digits"
        source = b"" if origin is None else origin.encode()
        try:
            return self._linker.link(seq, hlc, job, action, prev_raw, digest_raw, source), None
        except InvalidInputError as error:
            return b"", str(error)


def columns_of_wrong_type(row: EntryRow) -> list[str]:
    """The columns with a value of a wrong type; if there are any, the row is not compared further."""
    return [name for name, value in zip(ENTRY_COLUMNS, row, strict=True) if type(value) not in _TYPES[name]]


def report_gap(findings: Findings, expected_seq: int, seq: int) -> None:
    """Report missing entries: ``seq`` comes in place of ``expected_seq``."""
    findings.add(
        "gap",
        expected_seq,
        f"{seq - expected_seq} entries are missing: after seq {expected_seq - 1} comes {seq}",
        expected=expected_seq,
        actual=seq,
    )


def report_duplicate(findings: Findings, expected_seq: int, seq: int) -> None:
    """Report that ``seq`` comes in place of ``expected_seq``, after the same or a higher seq."""
    findings.add("duplicate-seq", seq, f"another entry stands at seq {seq}", expected=expected_seq, actual=seq)


def report_form(findings: Findings, row: DeferredRow, *, is_version_right: bool) -> None:
    """Report a row with a right link that has version 1 after a later version, or violates the form of an entry."""
    if not is_version_right:
        findings.add(
            "link", row.seq, f"seq {row.seq} has a version 1 link after a later version began", actual=row.chain_link
        )
    elif row.fault is not None:
        findings.add("malformed", row.seq, f"seq {row.seq} is an entry that no ledger writes: {row.fault}")


def report_prev_link(findings: Findings, seq: int, expected: str | None, actual: str | None) -> None:
    """Report that entry ``seq`` has the previous link ``actual`` instead of ``expected``."""
    findings.add(
        "prev-link",
        seq,
        f"seq {seq} does not name the link of seq {seq - 1} as the one before it",
        expected=expected,
        actual=actual,
    )


def is_link(text: object) -> bool:
    """Whether ``text`` is 64 lowercase hex digits."""
    return isinstance(text, str) and _LINK.fullmatch(text) is not None


def _raw(link: str | None) -> bytes | None:
    """The bytes of ``link``, None if it is not 64 lowercase hex digits."""
    return bytes.fromhex(link) if link is not None and is_link(link) else None


def first_break_in(
    tenant_id: str, rows: Sequence[EntryRow], *, first_seq: int, prev_link: str | None, may_be_v1: bool = True
) -> Break | None:
    """The first break in rows, at least one, that must follow ``prev_link`` from ``first_seq`` on."""
    findings = Findings()
    EntryChecker(tenant_id, findings, first_seq=first_seq, prev_link=prev_link, may_be_v1=may_be_v1).check(rows)
    return findings.first_break()


def leaves_of(tenant_id: str, rows: Sequence[tuple[Any, ...]]) -> list[bytes] | Break:
    """Leaf hashes of rows of ``ENTRY_COLUMNS``, in any order, each recomputed from its row's columns; or the break of
    the first row whose payload digest, HLC or link does not match its columns, or that no ledger writes."""
    leaves = native.leaves_of_entries(Linker(tenant_id).prefix, rows)
    return _leaves_one_by_one(tenant_id, rows) if leaves is None else leaves


def _leaves_one_by_one(tenant_id: str, rows: Sequence[tuple[Any, ...]]) -> list[bytes] | Break:
    leaves: list[bytes] = []
    for row in rows:
        findings = Findings()
        runs = EntryChecker(tenant_id, findings, first_seq=row[0], prev_link=row[8]).check_one_by_one([row])
        if (found := findings.first_break()) is not None:
            return found
        leaves.append(leaf_hash(runs[0].links[0]))
    return leaves


def holds_together(tenant_id: str, row: EntryRow) -> bool:
    """Whether the link, digest and HLC of a row match its columns."""
    return first_break_in(tenant_id, [row], first_seq=row[0], prev_link=row[8]) is None


def check_apart(tenant_id: str, rows: Sequence[EntryRow], findings: Findings) -> bool:
    """Check rows in seq order, without duplicates, that need not be consecutive, such as the entries of one job: each
    by itself, and neighbours against each other. Returns whether any has a link of version 1.

    The previous link of an entry is checked only if the entry before it is given as well, and at seq 1.
    """
    may_be_v1 = True
    for _, neighbours in groupby(enumerate(rows), key=lambda each: each[1][_SEQ] - each[0]):
        run = [row for _, row in neighbours]
        seq, prev_link = run[0][_SEQ], run[0][_PREV_CHAIN_LINK]
        if seq > 1 and not is_link(prev_link):
            findings.add("prev-link", seq, f"seq {seq} names no link before it", actual=prev_link)
        checker = EntryChecker(
            tenant_id, findings, first_seq=seq, prev_link=None if seq == 1 else prev_link, may_be_v1=may_be_v1
        )
        checker.check(run)
        may_be_v1 = checker.may_be_v1
    return any(row[_LINK_VERSION] == 1 for row in rows)
