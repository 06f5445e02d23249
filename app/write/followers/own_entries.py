"""Which of the entries that bear this node's name it made: a row put into the table under its name is not signed.

Whoever may write to the database can append a row that holds together: the link is a hash, and no secret goes into it.
What the database cannot give is what this node knows by itself::

    chained since its start    the seqs, in memory, until a checkpoint beside the WAL covers them
    chained before its start   the WAL, which keeps every record until it is signed: by HLC, job, action and digest

An entry with an ``origin`` was imported, and is no claim that this node made it here. Of the entries of other nodes
nothing is known here. An older entry than the WAL reaches back to is believed only in a chain that this node keeps no
checkpoint of: then it never signed it, or its checkpoints were given up.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import sys
import threading
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from app.write.followers.signed_chain import not_signed
from ledger.chain import record
from ledger.errors import ChainBrokenError
from ledger.facts.events import ACTIONS, VERDICTS, CommitmentAction, SystemAction
from ledger.machines.promises import proposed_payload
from ledger.positions import Lsn
from ledger.verification.entry_check import ENTRY_COLUMNS, EntryRow
from wal import reader as wal_reader
from wal.segment import list_segments

_SEQ, _T_HLC, _PHYSICAL, _NODE, _JOB, _ACTION, _DIGEST, _PAYLOAD, _ORIGIN = map(
    ENTRY_COLUMNS.index,
    ("seq", "t_hlc", "hlc_physical", "hlc_node", "job_id", "action", "payload_digest", "payload", "origin"),
)
_MARK_BYTES = 16


@dataclass(eq=False)
class OwnEntries:
    """What one node knows of the entries it made itself. Belongs to one event loop."""

    wal_folder: Path
    node_id: str
    last_lsn: Lsn
    """The last record in the WAL when this process started, 0 when it had none."""
    head_seqs: Mapping[str, int]
    """Where each chain ended then; chains that are missing here had not begun."""
    quarantined: Sequence[str]
    """Chains that this process does not extend, whose end it does not know."""
    believes_earlier: bool
    """Whether every entry from before this start is believed, because the operator accepted that records of the WAL
    are lost."""

    def __post_init__(self) -> None:
        self._in_wal = _WalRecords(self.wal_folder, self.node_id, self.last_lsn)
        self._runs: dict[str, list[tuple[int, int]]] = {}
        """By tenant, first and last seq of each run of entries chained since the start, in order."""
        self._newest: dict[str, int] = {}

    def chained(self, tenant_id: str, first_seq: int, last_seq: int) -> None:
        """This node chained these entries, which follow one another."""
        runs = self._runs.setdefault(tenant_id, [])
        if runs and runs[-1][1] + 1 == first_seq:
            runs[-1] = (runs[-1][0], last_seq)
        else:
            insort(runs, (first_seq, last_seq))
        self._newest[tenant_id] = max(self._newest.get(tenant_id, 0), last_seq)

    def forget(self, tenant_id: str, upto_seq: int) -> None:
        """A checkpoint beside the WAL covers the chain up to ``upto_seq``."""
        runs = self._runs.get(tenant_id)
        if runs and runs[0][1] <= upto_seq:
            self._runs[tenant_id] = [run for run in runs if run[1] > upto_seq]

    async def vouched(self, tenant_id: str, rows: Sequence[EntryRow], *, is_kept: bool) -> int:
        """How many of ``rows``, from the first on, may be signed as far as this node's own name goes. Behind them comes
        an entry that this process may have chained without knowing so yet: its commit has not been answered.

        ``is_kept`` says whether a checkpoint of the chain is kept beside the WAL.

        Raises:
            ChainBrokenError: names the first entry of this node that it did not make.
        """
        earlier: list[EntryRow] = []
        count = len(rows)
        for at, row in enumerate(rows):
            if row[_NODE] != self.node_id or row[_ORIGIN] is not None:
                continue
            if self._is_earlier(tenant_id, row[_SEQ]):
                earlier.append(row)
            elif row[_SEQ] > self._newest.get(tenant_id, 0):
                count = at
                break
            elif not self._is_chained(tenant_id, row[_SEQ]):
                raise _forged(tenant_id, row, "which this process, running since before, did not chain")
        if earlier and not self.believes_earlier:
            forged = await asyncio.to_thread(self._in_wal.first_missing, tenant_id, earlier, is_kept)
            if forged is not None:
                raise _forged(tenant_id, forged, "of which its WAL holds no record")
        return count

    def _is_earlier(self, tenant_id: str, seq: int) -> bool:
        return tenant_id in self.quarantined or seq <= self.head_seqs.get(tenant_id, 0)

    def _is_chained(self, tenant_id: str, seq: int) -> bool:
        runs = self._runs.get(tenant_id, ())
        at = bisect_right(runs, seq, key=lambda run: run[0])
        return at > 0 and seq <= runs[at - 1][1]


def _forged(tenant_id: str, row: EntryRow, why: str) -> ChainBrokenError:
    what = f"seq {row[_SEQ]} ({row[_ACTION]} of job {row[_JOB]}) bears the name of this node, {why}"
    return not_signed(
        tenant_id,
        f"{what}: somebody put it there",
        ". Mend the chain from a backup; if records of this node's WAL were lost, start once with --accept-lost-wal",
    )


class _WalRecords:
    """The records of one WAL up to ``last_lsn``, read as far back as is asked for, and then known by their marks."""

    def __init__(self, folder: Path, node_id: str, last_lsn: Lsn) -> None:
        self._folder = folder
        self._node_id = node_id
        self._last_lsn = last_lsn
        self._lock = threading.Lock()
        self._marks: set[bytes] = set()
        """Of every record from ``_from_lsn`` to ``_last_lsn``: about 100 bytes each."""
        self._from_lsn = last_lsn + 1
        self._first_ms: int | None = None
        """HLC of the first record that the WAL holds, None when not known."""

    def first_missing(self, tenant_id: str, rows: Sequence[EntryRow], is_kept: bool) -> EntryRow | None:
        """The first row that stands for no record; blocks on the disk.

        Raises:
            WalError: the WAL cannot be read.
        """
        marks = [_mark_of(tenant_id, row) for row in rows]
        with self._lock:
            if not self._marks.issuperset(marks):
                self._read_back_to(min(map(_physical_ms, rows)))
        for row, mark in zip(rows, marks, strict=True):
            reaches_back = self._first_ms is not None and self._first_ms <= _physical_ms(row)
            if mark not in self._marks and (is_kept or reaches_back):
                return row
        return None

    def _read_back_to(self, oldest_ms: int) -> None:
        """Read the records from the segment on that may hold HLCs of ``oldest_ms``: WAL order is HLC order."""
        bases = [each.base_lsn for each in list_segments(self._folder) if each.base_lsn <= self._last_lsn]
        if not bases:
            return
        self._first_ms = self._begins_ms(bases[0])
        from_lsn = self._from_lsn
        for base_lsn in reversed(bases):
            if base_lsn < from_lsn:
                from_lsn = base_lsn
                if self._begins_ms(base_lsn) < oldest_ms:
                    break
        for each in wal_reader.read(self._folder, Lsn(from_lsn), self._node_id, Lsn(self._from_lsn - 1)):
            event = record.decode(each.payload)
            digest = hashlib.sha256(event.payload).hexdigest()
            self._marks.add(_mark(event.tenant_id, each.hlc.text(), event.job_id, ACTIONS[each.type], digest))
        self._from_lsn = from_lsn

    def _begins_ms(self, base_lsn: Lsn) -> int:
        """Physical HLC of the first record of the segment that begins with ``base_lsn``."""
        return next(wal_reader.read(self._folder, Lsn(base_lsn), self._node_id, Lsn(self._last_lsn))).hlc.physical_ms


def _physical_ms(row: EntryRow) -> int:
    """The row's physical HLC; of what somebody put in its place, a time that the WAL reaches back to for sure."""
    return row[_PHYSICAL] if isinstance(row[_PHYSICAL], int) else sys.maxsize


def _mark(*parts: object) -> bytes:
    """Of tenant, HLC, job, action and payload digest."""
    text = "\0".join(map(str, parts))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:_MARK_BYTES]


def _mark_of(tenant_id: str, row: EntryRow) -> bytes:
    """The mark of the record that the row stands for; a REFUSED entry stands for the record that it keeps, and a
    verdict for the proposal."""
    job_id, action, digest = row[_JOB], row[_ACTION], row[_DIGEST]
    if action == SystemAction.REFUSED:
        try:
            kept = orjson.loads(row[_PAYLOAD])
            action = ACTIONS[kept["record_type"]]
            job_id = base64.b64decode(kept["job_id"]).decode()
            digest = hashlib.sha256(base64.b64decode(kept["payload"])).hexdigest()
        except (ValueError, TypeError, KeyError):
            return b""
    elif action in VERDICTS:
        try:
            action, digest = CommitmentAction.PROPOSED, hashlib.sha256(proposed_payload(row[_PAYLOAD])).hexdigest()
        except (ValueError, TypeError):
            return b""
    return _mark(tenant_id, row[_T_HLC], job_id, action, digest)
