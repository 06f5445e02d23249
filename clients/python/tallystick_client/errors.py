"""Exceptions: the ledger's problems by kind, and failures to get an answer of a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tallystick_client.facts import FINAL_KINDS, TRANSIENT_KINDS


class TallystickError(Exception):
    """Root of all errors of this package."""


class UnreachableError(TallystickError):
    """No node answered in time, or only a proxy did. The request may have been recorded."""


class NotTheLedgerError(TallystickError):
    """The server at the address does not answer like Tallystick."""


class SpoolError(TallystickError):
    """A file of the spool cannot be written or read; the text says why."""


class LaggedError(TallystickError):
    """A watch fell behind. ``from_seq`` is the first entry that it missed, ``head_seq`` the newest entry."""

    def __init__(self, from_seq: int, head_seq: int) -> None:
        super().__init__(f"the watch fell behind: it was told nothing from seq {from_seq} on; the head is {head_seq}")
        self.from_seq = from_seq
        self.head_seq = head_seq


class ProblemError(TallystickError):
    """An answer of the ledger other than success (RFC 9457).

    ``kind`` is the last part of its ``type`` (docs/problems.md), ``members`` the whole document, ``location`` the
    address in it, if any.
    """

    def __init__(self, status: int, kind: str, detail: str, members: Mapping[str, Any], location: str | None = None):
        super().__init__(f"{kind} ({status}): {detail}")
        self.status = status
        self.kind = kind
        self.detail = detail
        self.members = members
        self.location = location


class FinalError(ProblemError):
    """The request itself is at fault: a repetition is rejected again."""


class JobNotFoundError(FinalError):
    """There is no such job, or not yet at this node."""


class JobExistsError(FinalError):
    """The job was created with another spec."""


class JobEndedError(FinalError):
    """The job has ended; nothing more happens to it."""


class KeyReusedError(FinalError):
    """The Idempotency-Key, or the job id that it was made of, belongs to another request."""


class ConflictError(ProblemError):
    """The proposal was rejected: ``members["reason"]`` says why, ``members["index"]`` is the entry that records it."""


class InvalidError(FinalError):
    """A field, or a line of a batch, is wrong: ``members`` has ``path`` or ``line``."""


class NotAllowedError(ProblemError):
    """The caller is not authenticated, or may not do this."""


class WriteLostError(FinalError):
    """A write of this session was lost with the disk of a node. The client has forgotten the session."""


class OtherRegionError(FinalError):
    """The ledger leaves events of the job to that of another region; ``location`` is the job's address there."""


class CopiesRemovedError(ProblemError):
    """The event is in the chain, but it can never be shown that it reached the requested level: the holders of its
    copies have removed them. A repetition gets the same answer."""


class TransientError(ProblemError):
    """The same request may succeed later; the client has retried for its patience."""

    retry_after_s = 0.0
    """Seconds by ``Retry-After``."""


_BY_KIND: Mapping[str, type[ProblemError]] = {
    "conflict": ConflictError,
    "event-refused": InvalidError,
    "forbidden": NotAllowedError,
    "idempotency-key-reused": KeyReusedError,
    "idempotency-key-unproven": KeyReusedError,
    "invalid-event": InvalidError,
    "invalid-request": InvalidError,
    "job-ended": JobEndedError,
    "job-exists": JobExistsError,
    "job-not-found": JobNotFoundError,
    "other-region": OtherRegionError,
    "payload-too-large": InvalidError,
    "unauthenticated": NotAllowedError,
    "write-lost": WriteLostError,
}
TRANSIENT_STATUS = frozenset({408, 429, 502, 503, 504})
"""Also sent by proxies, without a problem document."""


def problem(status: int, document: Mapping[str, Any], location: str | None) -> ProblemError:
    """The exception for a problem document."""
    kind = str(document["type"]).rsplit("/", 1)[-1]
    line = f"line {document['line']}: " if "line" in document else ""
    detail = line + str(document.get("detail") or document.get("title") or f"status {status}")
    known = _BY_KIND.get(kind, FinalError if kind in FINAL_KINDS else ProblemError)
    if document.get("reason") == "copies-removed":
        known = CopiesRemovedError
    elif status in TRANSIENT_STATUS or kind in TRANSIENT_KINDS:
        known = TransientError
    return known(status, kind, detail, document, location)
