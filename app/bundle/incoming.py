"""What an entry of a verified bundle must be to be imported, and what it takes along.

Verification says that a bundle is what its signer made; here it is seen whether each row can stand in this ledger,
before anything is stored. An entry takes its first origin along: canonical JSON of where it was chained first::

    {"bundle_digest", "chain_link", "log", "node_id", "seq"}

``log`` is the origin of that tenant's log, as in its checkpoints; ``node_id`` the node that exported it and
``bundle_digest`` the SHA-256 of the bundle in which it first left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from app.bundle.manifest import Manifest
from app.bundle.reader import BundleReader
from app.bundle.rows import SEQ
from app.bundle.sorting import Incoming, MergeKey
from ledger import canonical
from ledger.chain import LINK_VERSION
from ledger.conflict import conflict_hlc, held_event
from ledger.errors import BundleInvalidError, ClockSkewError, InvalidInputError
from ledger.events import SystemAction
from ledger.hlc import Hlc

Row = tuple[Any, ...]

_JOB_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ACTION: Final = re.compile(r"[A-Z_]{1,64}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_ORIGIN_FIELDS: Final = frozenset(("bundle_digest", "chain_link", "log", "node_id", "seq"))


def incoming_entries(reader: BundleReader, latest_ms: int, issued: Hlc) -> Iterator[Incoming]:
    """The entries of a verified bundle, in its order. ``issued`` is the highest HLC that the importing node issued.

    Raises:
        BundleInvalidError: a row cannot stand in a ledger, or has an HLC of the importing node that it never issued.
        ClockSkewError: an entry lies later than ``latest_ms``.
    """
    for batch in reader.entry_batches():
        for row in batch:
            try:
                yield _incoming(reader.manifest, reader.digest, row, latest_ms, issued)
            except InvalidInputError as error:
                raise BundleInvalidError(f"seq {row[SEQ]} cannot be imported: {error}") from error


def _incoming(manifest: Manifest, digest: str, row: Row, latest_ms: int, issued: Hlc) -> Incoming:
    seq, t_hlc, _, _, _, job_id, action, version, prev, link, payload_digest, payload, stored_origin = row
    hlc = Hlc.parse(t_hlc)
    if hlc.physical_ms > latest_ms:
        raise ClockSkewError(
            f"seq {seq} of tenant {manifest.tenant_id} has HLC {t_hlc}, {hlc.physical_ms - latest_ms} ms later than "
            "hlc.max_clock_skew allows now; import it again once time has caught up"
        )
    if hlc.node_id == issued.node_id and hlc > issued:
        raise InvalidInputError(f"it has HLC {t_hlc}, and this node has issued none beyond {issued}")
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
        key = MergeKey(0, 0, 0, "", manifest.origin, seq, digest)
        origin, place = None, (seq, link, prev)
    else:
        origin, log, born_seq, born_digest = _origin(manifest, digest, seq, link, stored_origin)
        key = MergeKey(1, *hlc, log, born_seq, born_digest)
        place = (0, "", None)
    texts = (manifest.tenant_id, t_hlc, job_id, action, payload_digest, payload, origin)
    return Incoming(key, *texts, version, *place)


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


def _origin(manifest: Manifest, digest: str, seq: int, link: str, stored: str | None) -> tuple[str, str, int, str]:
    """The origin of an entry as text, and its log, seq and bundle."""
    if stored is None:
        fields = {
            "bundle_digest": digest,
            "chain_link": link,
            "log": manifest.origin,
            "node_id": manifest.node_id,
            "seq": seq,
        }
        return canonical.encode(fields).decode(), manifest.origin, seq, digest
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
