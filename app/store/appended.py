"""Entries appended to chains by one transaction, in memory, before Postgres sees any of it.

Assigns ``seq`` and links, to new events and to imported entries alike. A pure function of the locked heads and the
appended entries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from app.store.chaining import ChainHead, LogRows, Piece, Row
from app.store.notary import LinkRow
from ledger import native
from ledger.chain import Linker, Unlinked
from ledger.hlc import Hlc
from ledger.machines.jobs import ENDING

ROWS_A_PIECE = 200
"""Most rows in one piece; a follower reads a part of them at a time."""


class ChainPosition(NamedTuple):
    """The position of an entry in its chain; links are lowercase hex."""

    seq: int
    chain_link: str
    prev_chain_link: str | None


@dataclass(slots=True)
class AppendedEntries:
    """New entries at the ends of chains."""

    log_rows: LogRows = field(default_factory=LogRows)
    links: dict[str, list[LinkRow]] = field(default_factory=dict)
    """New entries by tenant, in seq order; the last of each is the new head."""
    ended: list[tuple[str, str]] = field(default_factory=list)
    """(tenant, job) of each new entry that may end its job."""

    def heads(self) -> list[tuple[str, int, str, str]]:
        """(tenant, seq, link, HLC) of each chain's new head."""
        return [(tenant, last.seq, last.chain_link, last.t_hlc) for tenant, (*_, last) in self.links.items()]


@dataclass(slots=True)
class _End:
    """The end of one chain while entries are appended: its head, and the entries to link onto it."""

    head: ChainHead
    linker: Linker
    entries: list[Unlinked] = field(default_factory=list)
    kept: list[Row] = field(default_factory=list)
    """The last rows up to the head, which are in no piece yet."""


class ChainAppender:
    """Appends entries to ``appended``, onto ``heads``; ``appended`` is complete after ``finish``.

    ``linkers`` is filled as needed. Entries of one chain are linked together, which costs half of linking them one by
    one.
    """

    def __init__(self, appended: AppendedEntries, heads: Mapping[str, ChainHead], linkers: dict[str, Linker]) -> None:
        self._appended = appended
        self._heads = heads
        self._ends = {
            tenant: _End(head, linkers.get(tenant) or linkers.setdefault(tenant, Linker(tenant)))
            for tenant, head in heads.items()
        }

    def append(
        self,
        tenant_id: str,
        hlc: Hlc,
        job_id: str,
        action: str,
        payload: bytes,
        origin: str | None = None,
    ) -> int:
        """Chain one entry, link version 2; returns its seq."""
        end = self._ends[tenant_id]
        end.entries.append((hlc, job_id, action, payload, origin))
        self._note_end(tenant_id, job_id, action)
        return end.head.seq + len(end.entries)

    def next_seq(self, tenant_id: str) -> int:
        """The seq of the next appended entry."""
        end = self._ends[tenant_id]
        return end.head.seq + len(end.entries) + 1

    def extend(self, tenant_id: str, entries: Sequence[Unlinked]) -> None:
        """Chain several entries of one tenant, as ``append``; the caller adds the jobs that they end to
        ``appended.ended``."""
        self._ends[tenant_id].entries += entries

    def keep(
        self,
        tenant_id: str,
        hlc: Hlc,
        job_id: str,
        action: str,
        version: int,
        place: ChainPosition,
        payload: bytes,
        origin: str | None = None,
    ) -> None:
        """Take over an entry unchanged, at its position; its link MUST have been verified."""
        end = self._ends[tenant_id]
        self._link(tenant_id, end)
        seq, chain_link, prev = place
        assert (seq, prev) == (end.head.seq + 1, end.head.chain_link)
        t_hlc = hlc.text()
        end.kept.append(
            (
                tenant_id,
                seq,
                t_hlc,
                *hlc,
                job_id,
                action,
                version,
                prev,
                chain_link,
                hashlib.sha256(payload).hexdigest(),
                payload.decode(),
                origin,
            )
        )
        self._note_end(tenant_id, job_id, action)
        self._appended.links.setdefault(tenant_id, []).append(LinkRow(seq, t_hlc, chain_link, job_id))
        end.head = ChainHead(seq, chain_link, t_hlc)
        if len(end.kept) == ROWS_A_PIECE:
            self._put(tenant_id, end)

    def finish(self) -> None:
        """Link the appended entries."""
        for tenant_id, end in self._ends.items():
            self._link(tenant_id, end)
            self._put(tenant_id, end)

    def place(self, tenant_id: str, seq: int) -> ChainPosition:
        """The position of the entry to which ``append`` gave this seq; known after ``finish``."""
        links = self._appended.links[tenant_id]
        at = seq - links[0].seq
        return ChainPosition(
            seq, links[at].chain_link, links[at - 1].chain_link if at else self._heads[tenant_id].chain_link
        )

    def _note_end(self, tenant_id: str, job_id: str, action: str) -> None:
        if action in ENDING:
            self._appended.ended.append((tenant_id, job_id))

    def _put(self, tenant_id: str, end: _End) -> None:
        """Make a piece of the rows taken over unchanged."""
        rows, end.kept = end.kept, []
        if rows:
            self._appended.log_rows.pieces.append(Piece(tenant_id, end.head.seq + 1 - len(rows), len(rows), rows))

    def _link(self, tenant_id: str, end: _End) -> None:
        appended, entries, end.entries = self._appended, end.entries, []
        if entries:
            self._put(tenant_id, end)
        for first in range(0, len(entries), ROWS_A_PIECE):
            rows, places = new_rows(end.linker, end.head, entries[first : first + ROWS_A_PIECE])
            appended.log_rows.pieces.append(Piece(tenant_id, places[0].seq, len(places), rows))
            appended.links.setdefault(tenant_id, []).extend(places)
            end.head = head_of(places)


def new_rows(linker: Linker, head: ChainHead, entries: Sequence[Unlinked]) -> tuple[bytes | list[Row], list[LinkRow]]:
    """The linked rows of entries that follow on ``head`` in order, in the form of a ``Piece``."""
    rows: tuple[bytes, list[LinkRow]] | None = native.new_rows(
        linker.tenant_id,
        linker.prefix,
        head.seq + 1,
        head.chain_link,
        bytes.fromhex(head.chain_link or ""),
        entries,
        LinkRow,
    )
    return _new_rows(linker, head, entries) if rows is None else rows


def _new_rows(linker: Linker, head: ChainHead, entries: Sequence[Unlinked]) -> tuple[list[Row], list[LinkRow]]:
    """The same in Python."""
    rows = linker.rows(head.seq + 1, head.chain_link, entries)
    places = [LinkRow(seq, t_hlc, link, job_id) for seq, t_hlc, _, _, _, job_id, *_, link, _, _, _ in rows]
    return [(linker.tenant_id, *row) for row in rows], places


def head_of(links: Sequence[LinkRow]) -> ChainHead:
    """The head after these entries."""
    return ChainHead(links[-1].seq, links[-1].chain_link, links[-1].t_hlc)
