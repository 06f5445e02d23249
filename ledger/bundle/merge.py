"""The rules of a merge: what an incoming entry must be, its place in the order, and what becomes of it.

Verification says that a bundle is what its signer made; here it is checked whether each row can stand in a ledger,
before anything is stored. An entry keeps its first origin, canonical JSON of where it was chained first::

    {"bundle_digest", "chain_link", "log", "node_id", "seq"}

``log`` is the origin of that tenant's log, as in its checkpoints; ``node_id`` the node that exported it and
``bundle_digest`` the SHA-256 of the bundle in which it first left.

An entry is chained, or is a duplicate, or is kept in a CONFLICT entry beside one that has its HLC. That is a function
of the entries, in the order of the merge, and of what the chains hold at their HLCs. It depends on nothing but entries
of the same physical and logical time: a CONFLICT entry has those of the event that it holds. So a merge may be cut
between any two of them and each piece decided by itself.

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

_CHARACTER_BYTES_MAX: Final = 4
"""Most bytes of one character in UTF-8."""


class MergeKey(NamedTuple):
    """Where an entry stands in a merge. ``rank`` is 0 for the beginning of a chain that is kept as it is, in seq order
    whatever its HLCs are, and 1 for all others."""

    rank: int
    physical_ms: int
    logical: int
    hlc_node: str
    log: str
    """The log that the entry was born in, and its seq there."""
    seq: int
    bundle_digest: str


class Incoming(NamedTuple):
    """One entry of a bundle on its way into a chain; ``origin`` is what its row will have."""

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
    """``seq`` and links in the bundle, for an entry that is kept as it is; 0, empty and None for others."""
    chain_link: str
    prev_chain_link: str | None


encode_incoming: Final = msgspec.msgpack.Encoder().encode
"""An entry as bytes, for sorting where memory does not hold them all. Of equal keys the lower bytes come first."""
decode_incoming: Final = msgspec.msgpack.Decoder(Incoming).decode


def set_digest(digests: Iterable[str]) -> str:
    """What a set of bundles is named by, in whatever order they come: SHA-256 over their digests, sorted."""
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
    """What the clock of an importing node allows."""

    latest_ms: int
    """Latest physical time of an entry."""
    issued: Hlc
    """The highest HLC that the node issued."""


def incoming_entries(
    source: BundleSource, batches: Iterable[Sequence[Row]], bounds: ClockBounds | None = None
) -> Iterator[Incoming]:
    """The entries of a verified bundle, as ``EntryTaker`` takes them."""
    taker = EntryTaker(source, bounds)
    for batch in batches:
        yield from taker.take(batch)


class EntryTaker:
    """Takes the rows of one verified bundle, whose HLC columns are those of their ``t_hlc``.

    A batch that is in order throughout is looked at column by column, which is fast; any other row by row, which names
    what is wrong. Both take alike, which a property test says.
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
            BundleInvalidError: a row cannot stand in a ledger, or has an HLC of the importing node that it never
                issued.
            ClockSkewError: an entry lies later than ``bounds`` allow.
        """
        return self._take_in_order(rows) or [self._take_one(row) for row in rows]

    def _take_in_order(self, rows: Sequence[Row]) -> list[Incoming] | None:
        """The entries of rows that were all born in the log of this bundle and are as nearly all are."""
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
        fault = form.fault_of(version, t_hlc, job_id, action, payload, stored_origin)
        if fault is not None:
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
    """Refuse what might not fit into a row of a bundle again: where another event has its HLC, it is escaped twice."""
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
    """What becomes of one batch of entries."""

    placed: list[tuple[Incoming, str | None]] = field(default_factory=list)
    """Entries to be chained, in order; with the payload digest of the one beside which it is kept when that has its
    HLC already."""
    duplicates: int = 0
    conflicts: list[dict[str, Any]] = field(default_factory=list)
    """Every event whose HLC another one has, whether it was in the chain already or is placed now; no verdicts on
    proposals that stand there."""

    def jobs(self) -> set[tuple[str, str]]:
        """(tenant, job id) of each job that something is said of by what is placed."""
        return {(entry.tenant_id, entry.job_id) for entry, _ in self.placed if _is_about_its_job(entry)}


def _is_about_its_job(entry: Incoming) -> bool:
    if entry.action in EVENTS_BY_ACTION:
        return True
    facts = payload_of(entry.payload)
    return said_of_job(entry.action, facts, (0, 0, ""), entry.payload_digest, entry.job_id) is not None


def event_of(entry: Incoming) -> Event:
    """The event of an entry as the chain knows it."""
    return Event(entry.t_hlc, entry.job_id, entry.action, entry.payload_digest)


def events_to_find(entries: Iterable[Incoming]) -> dict[str, list[Event]]:
    """By tenant, the events that decide about ``entries``: themselves, and those that CONFLICT entries hold."""
    wanted: dict[str, list[Event]] = {}
    for entry in entries:
        events = wanted.setdefault(entry.tenant_id, [])
        events.append(event_of(entry))
        held = held_by(entry)
        if held is not None:
            events.append(held)
    return wanted


def decide(entries: Sequence[Incoming], existing: Mapping[str, dict[str, Event]]) -> Decided:
    """What becomes of ``entries``, in the order of the merge; what is placed is added to ``existing``.

    ``existing`` is what stands in each tenant's chain at the HLCs of ``events_to_find``.
    """
    decided = Decided()
    for entry in entries:
        here, event = existing[entry.tenant_id], event_of(entry)
        first = here.get(entry.t_hlc)
        if first is None and entry.action != _CONFLICT:
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


def note_beginning(beginnings: dict[str, str], entry: Incoming) -> None:
    """Note the first link of the chain of an older link version that a bundle begins with ``entry``, by tenant.

    Raises:
        InvalidInputError: it is not the first of its chain, or another such chain of the tenant was noted.
    """
    if entry.seq != 1 or beginnings.setdefault(entry.tenant_id, entry.chain_link) != entry.chain_link:
        raise InvalidInputError(
            f"a chain of link version {entry.link_version} can only be imported from its beginning, and one a tenant"
        )


def check_beginnings(placed: Iterable[tuple[Incoming, str | None]], ends: dict[str, tuple[int, str | None]]) -> None:
    """Refuse the beginning of a chain that cannot be kept as it is, where a chain is already or with two events of one
    HLC. ``ends`` are seq and link of the
    last entry of each tenant's chain, and are moved behind what is placed.

    Raises:
        InvalidInputError: names what prevents it.
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
    """HLC, action and payload that ``entry`` is chained with: its own, or those of the CONFLICT entry that holds it
    beside the one of ``kept_digest``."""
    if kept_digest is None:
        hlc = Hlc.parse(entry.t_hlc) if entry.key.rank == 0 else Hlc(*entry.key[1:4])
        return hlc, entry.action, entry.payload.encode()
    event = event_of(entry)
    return conflict_hlc(event), _CONFLICT, conflict_payload(event, entry.payload, kept_digest)


def _place(entry: Incoming, event: Event, here: ExistingEvents) -> tuple[str | None, str | None]:
    """As ``find_event``; a CONFLICT entry is where the event is that it holds, whatever else it says."""
    held = held_by(entry)
    if held is None:
        return find_event(event, here)
    if entry.t_hlc in here:
        return entry.t_hlc, None
    return (held.t_hlc if here.get(held.t_hlc) == held else None), None


def _judges(entry: Incoming, first: Event) -> bool:
    """Whether ``entry`` is the verdict on ``first``, a proposal as a WAL has it."""
    if entry.action not in VERDICTS or (first.job_id, first.action) != (entry.job_id, CommitmentAction.PROPOSED):
        return False
    return entry.key.rank == 1 and sha256(proposed_payload(entry.payload)).hexdigest() == first.payload_digest


def held_by(entry: Incoming) -> Event | None:
    """The event that a CONFLICT entry holds, None for another entry."""
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
