"""What an entry of a verified bundle must be to be merged, what it takes along, and its place in the order of a merge.

Verification says that a bundle is what its signer made; here it is seen whether each row can stand in a ledger,
before anything is stored. An entry takes its first origin along: canonical JSON of where it was chained first::

    {"bundle_digest", "chain_link", "log", "node_id", "seq"}

``log`` is the origin of that tenant's log, as in its checkpoints; ``node_id`` the node that exported it and
``bundle_digest`` the SHA-256 of the bundle in which it first left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import repeat
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from ledger import canonical, native
from ledger.bundle.format import CONFLICT_BYTES_MAX, ORIGIN_BYTES_MAX, PAYLOAD_BYTES_MAX
from ledger.bundle.rows import SEQ, Row
from ledger.chain import LINK_VERSION
from ledger.chain.conflict import conflict_hlc, held_event
from ledger.errors import BundleInvalidError, ClockSkewError, InvalidInputError
from ledger.hlc import LOGICAL_MAX, PHYSICAL_MS_MAX, Hlc
from ledger.machines.events import SystemAction

_JOB_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_JOB_IDS: Final = re.compile(rf"{_JOB_ID.pattern}(?:\n{_JOB_ID.pattern})*+")
_ACTION: Final = re.compile(r"[A-Z_]{1,64}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_CHARACTER_BYTES_MAX: Final = 4
"""Most bytes of one character in UTF-8."""
_ORIGIN_FIELDS: Final = frozenset(("bundle_digest", "chain_link", "log", "node_id", "seq"))


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
        self._nodes: set[str] = set()
        """Node ids that were found in order."""
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
            or not self._nodes.issuperset(nodes)
            or not self._are_times_usual(max(physical_ms), max(logical), nodes)
            or not all(action != SystemAction.CONFLICT and _ACTION.fullmatch(action) for action in {*actions})
            or not _are_job_ids(jobs)
            or max(map(len, payloads)) * _CHARACTER_BYTES_MAX > PAYLOAD_BYTES_MAX
            or not _are_canonical_objects(payloads)
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

    def _are_times_usual(self, physical_ms_max: int, logical_max: int, nodes: Sequence[str]) -> bool:
        if physical_ms_max > PHYSICAL_MS_MAX or logical_max > LOGICAL_MAX:
            return False
        bounds = self._bounds
        return bounds is None or (physical_ms_max <= bounds.latest_ms and bounds.issued.node_id not in nodes)

    def _take_one(self, row: Row) -> Incoming:
        try:
            return self._taken(row)
        except InvalidInputError as error:
            raise BundleInvalidError(f"seq {row[SEQ]} cannot be imported: {error}") from error

    def _taken(self, row: Row) -> Incoming:
        (
            seq,
            t_hlc,
            physical_ms,
            logical,
            node_id,
            job_id,
            action,
            version,
            prev,
            link,
            digest,
            payload,
            stored_origin,
        ) = row
        hlc = Hlc(physical_ms, logical, node_id)
        if node_id not in self._nodes or logical > LOGICAL_MAX or physical_ms > PHYSICAL_MS_MAX:
            hlc = Hlc.parse(t_hlc)
            self._nodes.add(node_id)
        if self._bounds is not None:
            _check_clock(self._source, seq, hlc, self._bounds)
        if not _JOB_ID.fullmatch(job_id):
            raise InvalidInputError(f"{job_id[:200]!r} is not a job id")
        if not _ACTION.fullmatch(action):
            raise InvalidInputError(f"{action[:100]!r} is not an action")
        is_kept = version != LINK_VERSION
        if not is_kept:
            _check_length(action, payload)
        value = _payload(payload, is_canonical=not is_kept)
        if action == SystemAction.CONFLICT:
            _check_conflict(value, job_id, hlc)
        texts = (self._source.tenant_id, t_hlc, job_id, action, digest, payload)
        if is_kept:
            if stored_origin is not None:
                raise InvalidInputError(f"link version {version} binds no origin, yet it has one")
            key = MergeKey(0, 0, 0, "", self._source.log, seq, self._source.bundle_digest)
            return Incoming(key, *texts, None, version, seq, link, prev)
        if stored_origin is None:
            origin = f"{self._before_link}{link}{self._after_link}{seq}}}"
            born = (self._source.log, seq, self._source.bundle_digest)
        else:
            origin, born = stored_origin, _born(stored_origin)
        return Incoming(MergeKey(1, *hlc, *born), *texts, origin, version, 0, "", None)


def _are_job_ids(jobs: Sequence[str]) -> bool:
    """Whether each is a job id: no text that holds a newline is one."""
    lines = "\n".join(jobs)
    return lines.count("\n") == len(jobs) - 1 and _JOB_IDS.fullmatch(lines) is not None


def _are_canonical_objects(payloads: Sequence[str]) -> bool:
    return native.are_canonical_objects(payloads) or all(map(_is_canonical_object, payloads))


def _is_canonical_object(payload: str) -> bool:
    try:
        _payload(payload, is_canonical=True)
    except InvalidInputError:
        return False
    return True


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


def _payload(text: str, *, is_canonical: bool) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except ValueError as error:
        raise InvalidInputError(f"its payload is not JSON: {error}") from error
    if is_canonical and (not isinstance(value, dict) or canonical.encode(value) != text.encode()):
        raise InvalidInputError("its payload is not an object in canonical JSON")
    return value if isinstance(value, dict) else {}


def _check_conflict(payload: dict[str, Any], job_id: str, hlc: Hlc) -> None:
    held = held_event(payload, job_id)
    if held is None or conflict_hlc(held.event) != hlc:
        raise InvalidInputError("it is a CONFLICT entry that does not hold the event it is named for")


def _born(origin: str) -> tuple[str, int, str]:
    """The log that an entry was born in, its seq there, and the bundle in which it first left."""
    try:
        value = orjson.loads(origin)
    except ValueError as error:
        raise InvalidInputError(f"its origin is not JSON: {error}") from error
    is_ours = isinstance(value, dict) and value.keys() == _ORIGIN_FIELDS and canonical.encode(value) == origin.encode()
    if len(origin.encode()) > ORIGIN_BYTES_MAX or not is_ours or not _is_origin(value):
        raise InvalidInputError("its origin is not one")
    return value["log"], value["seq"], value["bundle_digest"]


def _is_origin(value: dict[str, Any]) -> bool:
    texts = [value[name] for name in ("bundle_digest", "chain_link", "log", "node_id")]
    if not all(isinstance(text, str) for text in texts) or type(value["seq"]) is not int:
        return False
    return value["seq"] >= 1 and all(_HASH.fullmatch(text) for text in texts[:2])
