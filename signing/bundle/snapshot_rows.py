"""Snapshots of a bundle as lines: one object of canonical JSON (RFC 8785) and a newline each, with one spelling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from ledger import canonical
from ledger.errors import BundleInvalidError, InvalidInputError, LedgerError, SignatureError
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS
from signing.strict import parse_json

FROM_SEQ, TO_SEQ, SNAPSHOT_HLC, ENVELOPE = map(
    SNAPSHOT_COLUMNS.index, ("from_seq", "to_seq", "snapshot_hlc", "dsse_envelope")
)
"""Where these columns stand in a row of ``SNAPSHOT_COLUMNS``."""

_FIELDS: Final = frozenset((*SNAPSHOT_COLUMNS, "tenant_id"))
_INTEGERS: Final = ("from_seq", "to_seq", "entry_count")


def encode_snapshot(tenant_id: str, row: Sequence[Any]) -> bytes:
    """The line of one snapshot, in the order of ``SNAPSHOT_COLUMNS``; the envelope becomes an object.

    Raises:
        SignatureError: the stored envelope is not JSON with one reading.
    """
    named = dict(zip(SNAPSHOT_COLUMNS, row, strict=True))
    named["dsse_envelope"] = parse_json(named["dsse_envelope"], "the envelope of a snapshot")
    return canonical.encode({**named, "tenant_id": tenant_id}) + b"\n"


def encode_as_stored(tenant_id: str, row: Sequence[Any]) -> bytes:
    """The line of one snapshot of a broken chain, whatever its columns have become: what has no canonical form is
    text."""
    try:
        return encode_snapshot(tenant_id, row)
    except (LedgerError, TypeError, ValueError):
        stored = {
            name: None if value is None else str(value) for name, value in zip(SNAPSHOT_COLUMNS, row, strict=True)
        }
        return msgspec.json.encode({"tenant_id": tenant_id, **stored}) + b"\n"


def decode_snapshot(line: bytes, tenant_id: str) -> tuple[Any, ...]:
    """The snapshot in a line without its newline, in the order of ``SNAPSHOT_COLUMNS``; the envelope is text.

    Raises:
        BundleInvalidError: not the canonical line of a snapshot of this tenant.
    """
    try:
        value = parse_json(line, "a row")
        if not isinstance(value, dict) or value.keys() != _FIELDS or canonical.encode(value) != line:
            raise BundleInvalidError("a row of a snapshot is not of its form in canonical JSON")
    except (SignatureError, InvalidInputError) as error:
        raise BundleInvalidError(f"a row is not one of a snapshot: {error}") from error
    if value["tenant_id"] != tenant_id:
        raise BundleInvalidError("a snapshot belongs to another tenant")
    for name in SNAPSHOT_COLUMNS:
        kind: type = int if name in _INTEGERS else dict if name == "dsse_envelope" else str
        if type(value[name]) is not kind or (kind is int and value[name] < 1):
            raise BundleInvalidError(f"{name} of a snapshot is malformed")
    value["dsse_envelope"] = canonical.encode(value["dsse_envelope"]).decode()
    return tuple(value[name] for name in SNAPSHOT_COLUMNS)


def check_ascending(snapshots: Iterable[Sequence[Any]], after_seq: int, to_seq: int) -> int:
    """Refuse snapshots that do not stand in order behind ``after_seq``, or reach beyond ``to_seq``.

    Returns:
        ``from_seq`` of the last one, ``after_seq`` when there is none.

    Raises:
        BundleInvalidError: they do not.
    """
    for row in snapshots:
        first_seq, last_seq = row[FROM_SEQ], row[TO_SEQ]
        if not after_seq < first_seq <= last_seq <= to_seq:
            raise BundleInvalidError(f"the snapshot of {first_seq}..{last_seq} is out of order or outside the range")
        after_seq = first_seq
    return after_seq
