"""The rules of a merge: which incoming entries are valid, their order, and the decision about each.

Verification proves that a bundle is as its signer made it. This module checks whether a ledger can hold each row,
before any row is stored. An entry keeps its first origin, canonical JSON of the place where it was first chained::

    {"bundle_digest", "chain_link", "log", "node_id", "seq"}

``log`` is the origin of that tenant's log, as in its checkpoints; ``node_id`` the node that exported it, and
``bundle_digest`` the SHA-256 of the bundle that first contained it.

An entry is chained, or is a duplicate, or is kept in a CONFLICT entry because another event has its HLC. The decision
is a function of the entries, in merge order, and of the chains' events at their HLCs. It depends only on entries of the
same physical and logical time; a CONFLICT entry has the time of the event that it holds. So a merge may be cut between
any two such times, and each piece decided by itself.

An entry that was in the chain and left it with a prune is a duplicate too (``Left``).

A proposal and its verdict have one HLC and are no conflict. A proposal that arrives after its verdict is a duplicate. A
verdict that arrives after its proposal is kept in a CONFLICT entry, so that it is not lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import repeat
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from ledger import canonical
from ledger.bundle.format import CONFLICT_BYTES_MAX, PAYLOAD_BYTES_MAX
from ledger.bundle.rows import SEQ, Row
from ledger.chain import LINK_VERSION, form
from ledger.chain.conflict import Event, ExistingEvents, conflict_hlc, conflict_payload, find_event, held_event
from ledger.errors import BundleInvalidError, ClockSkewError, InvalidInputError
from ledger.facts.events import EVENTS_BY_ACTION, VERDICTS, CommitmentAction, SystemAction
from ledger.hlc import Hlc
from ledger.machines.jobs import payload_of, said_of_job
from ledger.machines.promises import proposed_payload

_OWN_ACTIONS: Final = frozenset((*SystemAction, *CommitmentAction))
"""Actions of entries that count only where the ledger itself made them."""
_CHARACTER_BYTES_MAX: Final = 4
"""Most bytes of one character in UTF-8."""


class MergeKey(NamedTuple):
    """The sort key of an entry in a merge. ``rank`` is 0 for the start of a chain that is kept as it is, in seq order
    regardless of its HLCs, and 1 for all other entries."""

    rank: int
    physical_ms: int
    logical: int
    hlc_node: str
    log: str
    """The log that first chained the entry, and its seq there."""
    seq: int
    bundle_digest: str


class Incoming(NamedTuple):
    """One entry of a bundle to be chained; ``origin`` is the value for its row."""

    key: MergeKey
    tenant_id: str
    t_hlc: str
    job_id: str
    action: str
    payload_digest: str
    payload: str
    origin: str | None
    link_version: int
    seq: int
    """``seq`` and links in the bundle if the entry is kept as it is; else 0, empty and None."""
    chain_link: str
    prev_chain_link: str | None


encode_incoming: Final = msgspec.msgpack.Encoder().encode
"""An entry as bytes, for external sorting. Of equal keys the lower bytes come first."""
decode_incoming: Final = msgspec.msgpack.Decoder(Incoming).decode


def set_digest(digests: Iterable[str]) -> str:
    """The name of a set of bundles, independent of their order: SHA-256 over their sorted digests."""
    return sha256("\n".join(sorted(digests)).encode()).hexdigest()


class BundleSource(NamedTuple):
    """The bundle that entries come in."""

    bundle_digest: str
    tenant_id: str
    log: str
    """Origin of the tenant's log, as in its checkpoints."""
    node_id: str
    """The node that exported it."""


class ClockBounds(NamedTuple):
    """Bounds from the clock of an importing node."""

    latest_ms: int
    """Latest physical time of an entry."""
    issued: Hlc
    """The highest HLC that the node issued."""


def incoming_entries(
    source: BundleSource, batches: Iterable[Sequence[Row]], bounds: ClockBounds | None = None
) -> Iterator[Incoming]:
    """The entries of a verified bundle, made by ``EntryTaker``."""
    taker = EntryTaker(source, bounds)
    for batch in batches:
        yield from taker.take(batch)


class EntryTaker:
    """Takes the rows of one verified bundle, whose HLC columns match ``t_hlc``.

    A batch without any fault is checked column by column, which is fast; any other row by row, which names the fault.
    A property test ties the two.
    """

    def __init__(self, source: BundleSource, bounds: ClockBounds | None) -> None:
        self._source = source
        self._bounds = bounds
        digest, log, node = (
            canonical.encode(text).decode() for text in (source.bundle_digest, source.log, source.node_id)
        )
        self._before_link = f'{{"bundle_digest":{digest},"chain_link":"'
        self._after_link = f'","log":{log},"node_id":{node},"seq":'

    def take(self, rows: Sequence[Row]) -> list[Incoming]:
        """The entries in these rows of ``ENTRY_COLUMNS``, at least one.

        Raises:
            BundleInvalidError: no ledger can hold a row, or its HLC names the importing node, which never issued it.
            ClockSkewError: an entry is later than ``bounds`` allow.
        """
        return self._take_in_order(rows) or [self._take_one(row) for row in rows]

    def _take_in_order(self, rows: Sequence[Row]) -> list[Incoming] | None:
        """The entries of rows that the bundle's own log chained and that are of the usual form; else None."""
        source, bounds = self._source, self._bounds
        seqs, t_hlcs, physical_ms, logical, nodes, jobs, actions, versions, _, links, digests, payloads, origins = zip(
            *rows, strict=True
        )
        if (
            {*versions} != {LINK_VERSION}
            or {*origins} != {None}
            or (bounds is not None and (max(physical_ms) > bounds.latest_ms or bounds.issued.node_id in nodes))
            or SystemAction.CONFLICT in {*actions}
            or max(map(len, payloads)) * _CHARACTER_BYTES_MAX > PAYLOAD_BYTES_MAX
            or not form.are_well_formed(t_hlcs, jobs, actions, payloads, origins)
        ):
            return None
        births = repeat(source.log), seqs, repeat(source.bundle_digest)
        return [
            *map(
                Incoming,
                map(MergeKey, repeat(1), physical_ms, logical, nodes, *births),
                repeat(source.tenant_id),
                t_hlcs,
                jobs,
                actions,
                digests,
                payloads,
                [f"{self._before_link}{link}{self._after_link}{seq}}}" for link, seq in zip(links, seqs, strict=True)],
                versions,
                repeat(0),
                repeat(""),
                repeat(None),
            )
        ]

    def _take_one(self, row: Row) -> Incoming:
        try:
            return self._taken(row)
        except InvalidInputError as error:
            raise BundleInvalidError(f"seq {row[SEQ]} cannot be imported: {error}") from error

    def _taken(self, row: Row) -> Incoming:
        seq, t_hlc, _, _, _, job_id, action, version, prev, link, digest, payload, stored_origin = row
        hlc = Hlc.parse(t_hlc)
        if self._bounds is not None:
            _check_clock(self._source, seq, hlc, self._bounds)
        is_kept = version != LINK_VERSION
        if not is_kept:
            _check_length(action, payload)
        elif action in _OWN_ACTIONS:
            # It has no origin, so every reader would take it for an entry of the importing ledger.
            raise InvalidInputError(f"link version {version} has no {action}")
        if (fault := form.fault_of(version, t_hlc, job_id, action, payload, stored_origin)) is not None:
            raise InvalidInputError(fault)
        texts = (self._source.tenant_id, t_hlc, job_id, action, digest, payload)
        if is_kept:
            return Incoming(
                MergeKey(0, 0, 0, "", self._source.log, seq, self._source.bundle_digest),
                *texts,
                None,
                version,
                seq,
                link,
                prev,
            )
        if stored_origin is None:
            origin = f"{self._before_link}{link}{self._after_link}{seq}}}"
            born = (self._source.log, seq, self._source.bundle_digest)
        else:
            origin, born = stored_origin, form.read_origin(stored_origin)
        return Incoming(MergeKey(1, *hlc, *born), *texts, origin, version, 0, "", None)


def _check_length(action: str, payload: str) -> None:
    """Refuse a payload that might not fit into a row of a bundle again: inside a CONFLICT entry it is escaped twice."""
    size = len(payload.encode())
    size_max = CONFLICT_BYTES_MAX if action == SystemAction.CONFLICT else PAYLOAD_BYTES_MAX
    if size > size_max:
        raise InvalidInputError(
            f"its payload has {size} bytes, and {size_max} are the most that can be exported again for sure; export "
            "the ranges before and behind it, and import those"
        )


def _check_clock(source: BundleSource, seq: int, hlc: Hlc, bounds: ClockBounds) -> None:
    latest_ms, issued = bounds
    if hlc.physical_ms > latest_ms:
        raise ClockSkewError(
            f"seq {seq} of tenant {source.tenant_id} has HLC {hlc}, {hlc.physical_ms - latest_ms} ms later than "
            "hlc.max_clock_skew allows now; import it again once time has caught up"
        )
    if hlc.node_id == issued.node_id and hlc > issued:
        raise InvalidInputError(f"it has HLC {hlc}, and this node has issued none beyond {issued}")


_CONFLICT: Final = SystemAction.CONFLICT.value


@dataclass(slots=True)
class Decided:
    """The decisions about one batch of entries."""

    placed: list[tuple[Incoming, str | None]] = field(default_factory=list)
    """Entries to chain, in order; if another event has the entry's HLC already, with that event's payload digest."""
    duplicates: int = 0
    conflicts: list[dict[str, Any]] = field(default_factory=list)
    """Every event whose HLC another event has, already chained or placed now; without verdicts on proposals that are
    chained there."""

    def jobs(self) -> set[tuple[str, str]]:
        """(tenant, job id) of each job that a placed entry is about."""
        return {(entry.tenant_id, entry.job_id) for entry, _ in self.placed if _is_about_its_job(entry)}


def _is_about_its_job(entry: Incoming) -> bool:
    if entry.action in EVENTS_BY_ACTION:
        return True
    facts = payload_of(entry.payload)
    return said_of_job(entry.action, facts, (0, 0, ""), entry.payload_digest, entry.job_id) is not None


def event_of(entry: Incoming) -> Event:
    """The event that the chain has for an entry."""
    return Event(entry.t_hlc, entry.job_id, entry.action, entry.payload_digest)


def events_to_find(entries: Iterable[Incoming]) -> dict[str, list[Event]]:
    """By tenant, the events that decide about ``entries``: the entries themselves, and events in CONFLICT entries."""
    wanted: dict[str, list[Event]] = {}
    for entry in entries:
        events = wanted.setdefault(entry.tenant_id, [])
        events.append(event_of(entry))
        if (held := held_by(entry)) is not None:
            events.append(held)
    return wanted


def decide(entries: Sequence[Incoming], existing: Mapping[str, dict[str, Event]]) -> Decided:
    """Decide about ``entries``, in merge order; placed events are added to ``existing``.

    ``existing`` has, by tenant, the chained events at the HLCs of ``events_to_find``.
    """
    decided = Decided()
    for entry in entries:
        here, event = existing[entry.tenant_id], event_of(entry)
        if (first := here.get(entry.t_hlc)) is None and entry.action != _CONFLICT:
            decided.placed.append((entry, None))
            here[entry.t_hlc] = event
            continue
        stands, kept_digest = _place(entry, event, here)
        if first is not None and stands != entry.t_hlc and entry.action != _CONFLICT and not _judges(entry, first):
            decided.conflicts.append(_conflict(entry, event, first))
        if stands is not None:
            decided.duplicates += 1
            continue
        decided.placed.append((entry, kept_digest))
        t_hlc = entry.t_hlc if kept_digest is None else conflict_hlc(event).text()
        here[t_hlc] = event._replace(t_hlc=t_hlc)
    return decided


class Left(NamedTuple):
    """What tells whether an entry of a merge was in the chain and left it with a prune."""

    floor_seq: int
    """The last entry that left."""
    highest_hlc: Hlc
    """Of all entries that left."""
    log: str
    """The chain's own log."""
    imported: Mapping[str, int]
    """By other logs, up to which seq their entries were imported."""
    was_taken: bool = False
    """Whether a finished import had these entries."""
    is_next: bool = False
    """Whether these entries follow, in a chain that is imported in its order, those that were imported of it."""

    def doubtful(self, entries: Iterable[Incoming], existing: ExistingEvents) -> list[Incoming]:
        """The entries that may have left: no other chained entry has their HLC, and it is not above all that left."""
        return [
            entry
            for entry in entries
            if entry.t_hlc not in existing
            and (entry.key[1:4] if entry.key.rank else Hlc.parse(entry.t_hlc)) <= self.highest_hlc
        ]

    def has_left(self, entry: Incoming, *, is_of_departed_job: bool) -> bool | None:
        """Whether a doubtful entry left; None where that cannot be told. With every entry its job departs, so an entry
        of another job was never here."""
        if entry.key.log == self.log and entry.key.seq <= self.floor_seq:
            return True
        if not is_of_departed_job:
            return False
        if self.was_taken or entry.key.seq <= self.imported.get(entry.key.log, 0):
            return True
        return False if self.is_next else None


def note_beginning(beginnings: dict[str, Incoming], entry: Incoming) -> None:
    """Record by tenant the first entry of a chain of an older link version, or of the next range of it, which starts a
    bundle with ``entry``.

    Raises:
        InvalidInputError: the tenant has another such chain or range.
    """
    if beginnings.setdefault(entry.tenant_id, entry).chain_link != entry.chain_link:
        raise InvalidInputError(
            f"a chain of link version {entry.link_version} can only be imported from its beginning on, one range a "
            "call, and one chain a tenant"
        )


def check_beginnings(placed: Iterable[tuple[Incoming, str | None]], ends: dict[str, tuple[int, str | None]]) -> None:
    """Refuse a start of a chain that cannot be kept as it is: a chain exists already, or two events have one HLC.
    ``ends`` has seq and link of the last entry of each tenant's chain, and is advanced past the placed entries.

    Raises:
        InvalidInputError: names the obstacle.
    """
    for entry, kept_digest in placed:
        seq, link = ends[entry.tenant_id]
        if entry.key.rank == 0 and kept_digest is not None:
            raise InvalidInputError(
                f"seq {entry.seq} of a chain of link version {entry.link_version} has HLC {entry.t_hlc}, as another "
                "event has; such a chain is kept as it is, and takes no CONFLICT entry"
            )
        if entry.key.rank == 0 and (entry.seq, entry.prev_chain_link) != (seq + 1, link):
            raise InvalidInputError(
                f"a chain of link version {entry.link_version} can only be imported as the beginning of an empty "
                f"chain; that of tenant {entry.tenant_id} ends at seq {seq}"
            )
        ends[entry.tenant_id] = (seq + 1, entry.chain_link)


def chained_as(entry: Incoming, kept_digest: str | None) -> tuple[Hlc, str, bytes]:
    """HLC, action and payload with which ``entry`` is chained: its own, or, if another event of ``kept_digest`` has its
    HLC, those of the CONFLICT entry that holds it."""
    if kept_digest is None:
        hlc = Hlc.parse(entry.t_hlc) if entry.key.rank == 0 else Hlc(*entry.key[1:4])
        return hlc, entry.action, entry.payload.encode()
    event = event_of(entry)
    return conflict_hlc(event), _CONFLICT, conflict_payload(event, entry.payload, kept_digest)


def _place(entry: Incoming, event: Event, here: ExistingEvents) -> tuple[str | None, str | None]:
    """As ``find_event``; a CONFLICT entry is found by the event that it holds."""
    if (held := held_by(entry)) is None:
        return find_event(event, here)
    if entry.t_hlc in here:
        return entry.t_hlc, None
    return (held.t_hlc if here.get(held.t_hlc) == held else None), None


def _judges(entry: Incoming, first: Event) -> bool:
    """Whether ``entry`` is the verdict on ``first``, a proposal in its WAL form."""
    if entry.action not in VERDICTS or (first.job_id, first.action) != (entry.job_id, CommitmentAction.PROPOSED):
        return False
    return entry.key.rank == 1 and sha256(proposed_payload(entry.payload)).hexdigest() == first.payload_digest


def held_by(entry: Incoming) -> Event | None:
    """The event that a CONFLICT entry holds, None for any other entry."""
    if entry.action != _CONFLICT:
        return None
    held = held_event(orjson.loads(entry.payload), entry.job_id)
    return None if held is None else held.event


def _conflict(entry: Incoming, event: Event, kept: Event) -> dict[str, Any]:
    return {
        "tenant_id": entry.tenant_id,
        "hlc": event.t_hlc,
        "job_id": event.job_id,
        "action": event.action,
        "digest": event.payload_digest,
        "kept_digest": kept.payload_digest,
        "conflict_hlc": conflict_hlc(event).text(),
    }
