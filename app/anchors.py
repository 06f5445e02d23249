"""Judging what outsiders said of checkpoints: a stored statement is compared with the chain only when it holds.

A statement is of this log when its checkpoint is one that the log signed under this origin; what stands beside it in
the row is not believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from cryptography import x509

from ledger.errors import SignatureError
from ledger.tree_check import Anchor
from signing import note as notes
from signing.checkpoint import Checkpoint
from signing.cosignature import WitnessKey, cosignatures_of
from signing.timestamp import IS_AVAILABLE, open_timestamp

WITNESS, RFC_3161 = "witness", "rfc3161"

OpenNote = Callable[[str], Checkpoint]
"""The checkpoint in a note that this tenant's log signed; raises SignatureError for any other."""


def judge_cosignature(
    note: str, witness: str, size: int, stated: datetime, witnesses: Iterable[WitnessKey], open_note: OpenNote
) -> Anchor:
    """What the witness of verifier key ``witness``, one of ``witnesses``, said in ``note``.

    ``size`` and ``stated`` are what it is said to have said, for a report on one that does not hold.
    """
    name = witness.partition("+")[0]
    try:
        checkpoint = open_note(note)
        (found,) = cosignatures_of(notes.parse(note), [each for each in witnesses if each.text() == witness])
    except (SignatureError, ValueError) as error:
        detail = f"the cosignature does not hold: {error}"
        return Anchor(WITNESS, name, rfc_3339(stated), size, b"", "invalid", detail)
    return Anchor(WITNESS, name, rfc_3339(found.time), checkpoint.size, checkpoint.root)


def judge_timestamp(
    note: str,
    response: bytes,
    authority: str,
    size: int,
    stated: datetime,
    roots: Sequence[x509.Certificate],
    open_note: OpenNote,
) -> Anchor:
    """What the authority said of ``note``; ``roots`` are the certificates it may be traced to."""
    unjudged = Anchor(RFC_3161, authority, rfc_3339(stated), size, b"", "not_checked")
    if not roots:
        return unjudged._replace(detail="no CA file is given for this authority")
    if not IS_AVAILABLE:
        return unjudged._replace(detail="the package rfc3161-client is not installed")
    try:
        checkpoint = open_note(note)
        time = open_timestamp(response, note.encode(), roots)
    except SignatureError as error:
        return unjudged._replace(status="invalid", detail=str(error))
    return Anchor(RFC_3161, authority, rfc_3339(time), checkpoint.size, checkpoint.root)


def rfc_3339(time: datetime) -> str:
    """``time`` in UTC, ending in Z."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")
