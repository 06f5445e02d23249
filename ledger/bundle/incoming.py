"""What an entry of a verified bundle must be to be merged, what it takes along, and its place in the order of a merge.

Verification says that a bundle is what its signer made; here it is seen whether each row can stand in a ledger,
before anything is stored. An entry takes its first origin along: canonical JSON of where it was chained first::

    {"bundle_digest", "chain_link", "log", "node_id", "seq"}

``log`` is the origin of that tenant's log, as in its checkpoints; ``node_id`` the node that exported it and
``bundle_digest`` the SHA-256 of the bundle in which it first left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import repeat
from typing import Final, NamedTuple

import msgspec

from ledger import canonical
from ledger.bundle.format import CONFLICT_BYTES_MAX, PAYLOAD_BYTES_MAX
from ledger.bundle.rows import SEQ, Row
from ledger.chain import LINK_VERSION, form
from ledger.errors import BundleInvalidError, ClockSkewError, InvalidInputError
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc

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
        columns = [*zip(*rows, strict=True)]
        seqs, t_hlcs, physical_ms, logical, nodes, jobs, actions, versions, _, links, digests, payloads, origins = (
            columns
        )
        if (
            {*versions} != {LINK_VERSION}
            or {*origins} != {None}
            or not self._are_times_usual(max(physical_ms), nodes)
            or SystemAction.CONFLICT in {*actions}
            or max(map(len, payloads)) * _CHARACTER_BYTES_MAX > PAYLOAD_BYTES_MAX
            or not form.are_well_formed(t_hlcs, jobs, actions, payloads, origins)
        ):
            return None
        source = self._source
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

    def _are_times_usual(self, physical_ms_max: int, nodes: Sequence[str]) -> bool:
        bounds = self._bounds
        return bounds is None or (physical_ms_max <= bounds.latest_ms and bounds.issued.node_id not in nodes)

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
            key = MergeKey(0, 0, 0, "", self._source.log, seq, self._source.bundle_digest)
            return Incoming(key, *texts, None, version, seq, link, prev)
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
