"""What outsiders said of a log, as it goes into files that leave: bundles and receipts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from app.store.anchors import CosignatureRow, TimestampRow
from ledger.errors import SignatureError
from signing import checkpoint as checkpoints
from signing.anchors import ANCHORS_MAX, Unproven, cosignature, rfc_3339, timestamp

ANCHORS_A_KIND_MAX = ANCHORS_MAX // 2
"""Witnesses, and authorities, whose statements one file carries."""


def unproven(cosigned: Sequence[CosignatureRow], stamped: Sequence[TimestampRow], size_max: int) -> list[Unproven]:
    """The statements in these rows. One that is of no checkpoint, or of one larger than ``size_max``, is as if it were
    not there: whoever can write to the table can put it there."""
    said = [
        Unproven(_size_of(row.note), partial(cosignature, row.witness, row.note, rfc_3339(row.cosigned_at)))
        for row in cosigned
    ]
    said += [
        Unproven(
            _size_of(row.note), partial(timestamp, row.authority, row.note, row.response, rfc_3339(row.generated_at))
        )
        for row in stamped
    ]
    return [each for each in said if 1 <= each.size <= size_max]


def _size_of(text: str) -> int:
    """Size of the tree in a note; 0 where it is none."""
    try:
        return checkpoints.read(text).size
    except SignatureError:
        return 0
