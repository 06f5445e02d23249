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
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from ledger import canonical
from ledger.bundle.rows import SEQ, Row
from ledger.chain import LINK_VERSION
from ledger.chain.conflict import conflict_hlc, held_event
from ledger.errors import BundleInvalidError, ClockSkewError, InvalidInputError
from ledger.hlc import Hlc
from ledger.machines.events import SystemAction

_JOB_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ACTION: Final = re.compile(r"[A-Z_]{1,64}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
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
    """The entries of a verified bundle, rows of ``ENTRY_COLUMNS``, in its order.

    Raises:
        BundleInvalidError: a row cannot stand in a ledger, or has an HLC of the importing node that it never issued.
        ClockSkewError: an entry lies later than ``bounds`` allow.
    """
    for batch in batches:
        for row in batch:
            try:
                yield _incoming(source, row, bounds)
            except InvalidInputError as error:
                raise BundleInvalidError(f"seq {row[SEQ]} cannot be imported: {error}") from error


def _incoming(source: BundleSource, row: Row, bounds: ClockBounds | None) -> Incoming:
    seq, t_hlc, _, _, _, job_id, action, version, prev, link, payload_digest, payload, stored_origin = row
    hlc = Hlc.parse(t_hlc)
    if bounds is not None:
        _check_clock(source, seq, hlc, bounds)
    if not _JOB_ID.fullmatch(job_id):
        raise InvalidInputError(f"{job_id[:200]!r} is not a job id")
    if not _ACTION.fullmatch(action):
        raise InvalidInputError(f"{action[:100]!r} is not an action")
    is_kept = version != LINK_VERSION
    value = _payload(payload, is_canonical=not is_kept)
    if action == SystemAction.CONFLICT:
        _check_conflict(value, job_id, hlc)
    if is_kept:
        if stored_origin is not None:
            raise InvalidInputError(f"link version {version} binds no origin, yet it has one")
        key = MergeKey(0, 0, 0, "", source.log, seq, source.bundle_digest)
        origin, place = None, (seq, link, prev)
    else:
        origin, log, born_seq, born_digest = _origin(source, seq, link, stored_origin)
        key = MergeKey(1, *hlc, log, born_seq, born_digest)
        place = (0, "", None)
    texts = (source.tenant_id, t_hlc, job_id, action, payload_digest, payload, origin)
    return Incoming(key, *texts, version, *place)


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


def _origin(source: BundleSource, seq: int, link: str, stored: str | None) -> tuple[str, str, int, str]:
    """The origin of an entry as text, and its log, seq and bundle."""
    if stored is None:
        fields = {
            "bundle_digest": source.bundle_digest,
            "chain_link": link,
            "log": source.log,
            "node_id": source.node_id,
            "seq": seq,
        }
        return canonical.encode(fields).decode(), source.log, seq, source.bundle_digest
    try:
        value = orjson.loads(stored)
    except ValueError as error:
        raise InvalidInputError(f"its origin is not JSON: {error}") from error
    is_ours = isinstance(value, dict) and value.keys() == _ORIGIN_FIELDS and canonical.encode(value) == stored.encode()
    if not is_ours or not _is_origin(value):
        raise InvalidInputError("its origin is not one")
    return stored, value["log"], value["seq"], value["bundle_digest"]


def _is_origin(value: dict[str, Any]) -> bool:
    texts = [value[name] for name in ("bundle_digest", "chain_link", "log", "node_id")]
    if not all(isinstance(text, str) for text in texts) or type(value["seq"]) is not int:
        return False
    return value["seq"] >= 1 and all(_HASH.fullmatch(text) for text in texts[:2])
