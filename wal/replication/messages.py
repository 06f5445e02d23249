"""The messages between proposers and safekeepers, and their form on the wire.

A frame::

    length u32 | crc32 u32 | kind u8 | head length u32 | head | body

``length`` is the number of bytes after it, ``crc32`` (zlib) covers those after itself. ``head`` is the fields of the
message in MessagePack, in order; ``body`` is WAL batches, encoded as in a segment, if the message carries any.

A request gets one answer, in order; but one Ack may answer several Appends. A request that a rule forbids is answered
with Refusal; then nothing of it was kept.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal
from zlib import crc32

import msgspec

from ledger.errors import InvalidInputError, refuse, reported_as
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn
from wal.control import EpochStart
from wal.format import LSN_LIMIT
from wal.replication.configuration import NO_MEMBERS, Configuration

PROTOCOL_VERSION = 1
HEAD_BYTES_MAX = 1 << 16
"""No message has a longer head."""
FRAME_BYTES_MAX = (64 << 20) + HEAD_BYTES_MAX
"""No frame is longer: one batch of the largest size, and its head."""
NAME_CHARACTERS_MAX = 64
_Epoch = Annotated[Epoch, msgspec.Meta(ge=0, le=LSN_LIMIT)]
_Lsn = Annotated[Lsn, msgspec.Meta(ge=0, le=LSN_LIMIT)]
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]
_Id = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
"""32 hex digits, or empty."""
_PREFIX = struct.Struct(">II")
_HEAD = struct.Struct(">BI")
PREFIX_BYTES = _PREFIX.size


class Position(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The end of a log: the epoch of its last record, and that record's LSN. The log with the higher one is better."""

    epoch: _Epoch
    lsn: _Lsn


EMPTY = Position(NO_EPOCH, BEFORE_FIRST)
"""The end of an empty log."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


class OfEpoch(Message, frozen=True, array_like=True):
    """Base of messages about one epoch of a log, which is their first field."""

    epoch: _Epoch


class Greet(Message, frozen=True, array_like=True):
    """A proposer starts a conversation about one log. ``wal_id`` is empty if the proposer has no copy; ``run`` is
    random, 32 hex digits, and constant for the life of the proposer."""

    node_id: _Name
    wal_id: _Id
    run: _Id
    version: int = PROTOCOL_VERSION


class Greeting(Message, frozen=True, array_like=True):
    """The id of the member, and what its log holds. ``wal_id`` is empty if the member has no copy."""

    member_id: _Id
    region: _Name
    wal_id: _Id
    promised_epoch: _Epoch
    tail: Position
    committed_lsn: _Lsn
    configuration: Configuration


class Prepare(OfEpoch, frozen=True, array_like=True):
    """A run of a proposer wants to write the log of this id in ``epoch``."""

    wal_id: _Id
    configuration: Configuration


class Promise(OfEpoch, frozen=True, array_like=True):
    """The member accepts nothing of a lower epoch any more. It reports the log's first LSN, end and history."""

    first_lsn: _Lsn
    tail: Position
    committed_lsn: _Lsn
    history: tuple[EpochStart, ...]
    configuration: Configuration


class Elected(OfEpoch, frozen=True, array_like=True):
    """A majority promised. ``history`` is that of the elected log and ends with ``epoch``; ``first_lsn`` is the oldest
    record that the proposer can still send."""

    first_lsn: _Lsn
    history: tuple[EpochStart, ...]


class Ready(OfEpoch, frozen=True, array_like=True):
    """The history is applied, durably; the log continues after ``tail``."""

    tail: Position


class Append(OfEpoch, frozen=True, array_like=True):
    """Batches after ``previous``, all written in ``written_in``. The proposer knows that all up to
    ``committed_lsn`` is committed, and that the log up to ``settled_lsn`` is no longer needed. Without batches it only
    reports these two."""

    previous: Position
    written_in: _Epoch
    committed_lsn: _Lsn
    settled_lsn: _Lsn = BEFORE_FIRST


class Ack(OfEpoch, frozen=True, array_like=True):
    """All up to ``durable_lsn`` is synced."""

    durable_lsn: _Lsn


class Fetch(Message, frozen=True, array_like=True):
    """Requests the records from ``from_lsn`` on, about ``bytes_max`` bytes of them."""

    from_lsn: _Lsn
    bytes_max: int


class Batches(Message, frozen=True, array_like=True):
    """Batches of one epoch after ``previous``; none at the end of the log."""

    previous: Position
    written_in: _Epoch


class Configure(OfEpoch, frozen=True, array_like=True):
    """From now on these are the members."""

    configuration: Configuration


class Configured(Configure, frozen=True, array_like=True):
    """The list is stored, durably."""


class Refusal(Message, frozen=True, array_like=True):
    """Nothing of the request was done. ``reason`` is a ``Reason``; ``promised_epoch`` is the epoch that
    the member follows."""

    reason: str
    detail: str
    promised_epoch: _Epoch


class Status(Message, frozen=True, array_like=True):
    """Requests the state of the logs of all nodes after ``after_node_id``; belongs to no log."""

    after_node_id: _Name = ""


class WalStatus(msgspec.Struct, frozen=True, array_like=True):
    """The state of one log. ``state`` is ``open``, ``closed``, ``failed`` with the reason in ``detail``, or ``busy``
    while it is recovered or its disk does not answer; then nothing else is reported. The positions of a log that is not
    open are those of its control file, which are lower bounds.

    ``tail`` is the end of the received log, ``lastReplicatedLsn``. ``archived_lsn`` is 0 if nothing is archived.
    ``archive_fault`` is the reason why archiving fails now; empty if it does not. ``scrubbed_s`` is the end of the last
    complete scrub of the log, in seconds since 1970; 0 before the first.
    """

    node_id: str
    state: str
    detail: str = ""
    wal_id: str = ""
    member_id: str = ""
    promised_epoch: Epoch = NO_EPOCH
    first_lsn: Lsn = Lsn(1)
    tail: Position = EMPTY
    durable_lsn: Lsn = BEFORE_FIRST
    committed_lsn: Lsn = BEFORE_FIRST
    settled_lsn: Lsn = BEFORE_FIRST
    archived_lsn: Lsn = BEFORE_FIRST
    disk_bytes: int = 0
    configuration: Configuration = NO_MEMBERS
    archive_fault: str = ""
    scrubbed_s: int = 0


class StatusReport(Message, frozen=True, array_like=True):
    """Logs in the order of their nodes; with ``more`` there are others after the last."""

    region: str
    wals: tuple[WalStatus, ...]
    more: bool


Reason = Literal[
    "fenced",
    "not-elected",
    "does-not-fit",
    "damaged",
    "other-wal",
    "other-members",
    "committed",
    "not-here",
    "unreadable",
    "forbidden",
    "unavailable",
]
"""Why a member refuses:

fenced          another proposer was promised a higher epoch, or the same
not-elected     the history of this epoch was not applied yet
does-not-fit    the batch does not follow the end of the log
damaged         a check of the received bytes failed
other-wal       the log kept here is another one
other-members   a newer list of members is known here
committed       it would undo records known to be committed
not-here        the requested records are not held
unreadable      the message cannot be read, or does not fit the conversation
forbidden       the certificate does not name this log
unavailable     the log cannot be kept or read just now: disk, or too many logs
"""

_KINDS: tuple[type[Message], ...] = (
    Greet,
    Greeting,
    Prepare,
    Promise,
    Elected,
    Ready,
    Append,
    Ack,
    Fetch,
    Batches,
    Configure,
    Configured,
    Refusal,
    Status,
    StatusReport,
)
"""The place of a message in this list, counted from 1, is its kind on the wire: never reorder the list."""
_KIND_OF = {message: kind for kind, message in enumerate(_KINDS, 1)}
_DECODERS = {kind: msgspec.msgpack.Decoder(message) for message, kind in _KIND_OF.items()}
_encode = msgspec.msgpack.Encoder().encode


class Frame(msgspec.Struct, frozen=True):
    """A message and its batches."""

    message: Message
    body: bytes | memoryview = b""


def encode(frame: Frame) -> tuple[bytes, bytes | memoryview]:
    """Prefix and head of the frame, and its body, which is not copied."""
    head = _encode(frame.message)
    inner = _HEAD.pack(_KIND_OF[type(frame.message)], len(head)) + head
    return _PREFIX.pack(4 + len(inner) + len(frame.body), crc32(frame.body, crc32(inner))) + inner, frame.body


def length_of(prefix: bytes | memoryview) -> int:
    """Bytes of the whole frame that begins with these ``PREFIX_BYTES``.

    Raises:
        InvalidInputError: it is longer than any frame, or shorter.
    """
    length, _ = _PREFIX.unpack_from(prefix)
    if not 4 + _HEAD.size <= length <= FRAME_BYTES_MAX:
        raise InvalidInputError(f"a frame of {length} bytes is out of bounds")
    return 4 + int(length)


def decode(data: bytes | memoryview) -> Frame:
    """Decode ``data``, which is exactly one frame. The frame's body is a view of ``data``.

    Raises:
        InvalidInputError: a check failed; the text has the reason.
    """
    view = memoryview(data)
    _, crc = _PREFIX.unpack_from(view)
    kind, head_bytes = _HEAD.unpack_from(view, PREFIX_BYTES)
    at = PREFIX_BYTES + _HEAD.size
    is_known = kind in _DECODERS and head_bytes <= min(HEAD_BYTES_MAX, len(view) - at)
    refuse(
        InvalidInputError,
        (crc32(view[PREFIX_BYTES:]) != crc, "the CRC of the frame does not match"),
        (not is_known, f"a frame of kind {kind} is not known, or its head is not within it"),
    )
    with reported_as(InvalidInputError, f"a {_KINDS[kind - 1].__name__} cannot be read", msgspec.MsgspecError):
        return Frame(_DECODERS[kind].decode(view[at : at + head_bytes]), view[at + head_bytes :])
