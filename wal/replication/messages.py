"""What proposers and safekeepers say to each other, and its form on the wire.

A frame::

    length u32 | crc32 u32 | kind u8 | head length u32 | head | body

``length`` counts what is behind it, ``crc32`` (zlib) covers what is behind itself. ``head`` is the fields of the
message in MessagePack, in order; ``body`` is WAL batches as they stand in a segment, in the messages that carry any.

A request gets one answer, in order; but of Appends several may be answered by one Ack. Who is asked for something that
a rule forbids answers Refusal, and has kept nothing of it.
"""

from __future__ import annotations

import struct
from typing import Annotated, ClassVar
from zlib import crc32

import msgspec

from ledger.errors import InvalidInputError
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn
from wal.format import LSN_LIMIT
from wal.history import EpochStart
from wal.replication.configuration import NO_MEMBERS, Configuration

PROTOCOL_VERSION = 1
HEAD_BYTES_MAX = 1 << 16
"""No message has more beside its batches."""
FRAME_BYTES_MAX = (64 << 20) + HEAD_BYTES_MAX
"""No frame is longer: one batch of the largest size, and its head."""
NAME_CHARACTERS_MAX = 64
_Epoch = Annotated[Epoch, msgspec.Meta(ge=0, le=LSN_LIMIT)]
_Lsn = Annotated[Lsn, msgspec.Meta(ge=0, le=LSN_LIMIT)]
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]
_Id = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
"""32 hex digits, or none."""
_PREFIX = struct.Struct(">II")
_HEAD = struct.Struct(">BI")
PREFIX_BYTES = _PREFIX.size


class Position(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Where a log ends: the epoch that wrote its last record, and that record's LSN. The higher is the better log."""

    epoch: _Epoch
    lsn: _Lsn


EMPTY = Position(NO_EPOCH, BEFORE_FIRST)
"""Where a log ends that holds nothing."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all."""

    KIND: ClassVar[int] = 0


class Greet(Message, frozen=True, array_like=True):
    """A proposer begins to speak of one log. ``wal_id`` is empty where it holds none of it; ``run`` is random, 32
    hex digits, and stays for as long as this proposer lives."""

    KIND: ClassVar[int] = 1
    node_id: _Name
    wal_id: _Id
    run: _Id
    version: int = PROTOCOL_VERSION


class Greeting(Message, frozen=True, array_like=True):
    """Who answers, and what he holds. ``wal_id`` is empty while he holds nothing."""

    KIND: ClassVar[int] = 2
    member_id: _Id
    region: _Name
    wal_id: _Id
    promised_epoch: _Epoch
    tail: Position
    committed_lsn: _Lsn
    configuration: Configuration


class Prepare(Message, frozen=True, array_like=True):
    """A run of a proposer wants to write the log of this id in ``epoch``."""

    KIND: ClassVar[int] = 3
    epoch: _Epoch
    wal_id: _Id
    configuration: Configuration


class Promise(Message, frozen=True, array_like=True):
    """Nothing of a lower epoch will be accepted; and what the log holds now: its first LSN, its end, its history."""

    KIND: ClassVar[int] = 4
    epoch: _Epoch
    first_lsn: _Lsn
    tail: Position
    committed_lsn: _Lsn
    history: tuple[EpochStart, ...]
    configuration: Configuration


class Elected(Message, frozen=True, array_like=True):
    """A majority promised. ``history`` is that of the log that counts, ``epoch`` its last; ``first_lsn`` is the oldest
    record that the proposer can still give."""

    KIND: ClassVar[int] = 5
    epoch: _Epoch
    first_lsn: _Lsn
    history: tuple[EpochStart, ...]


class Ready(Message, frozen=True, array_like=True):
    """The history is applied, durably; the log goes on behind ``tail``."""

    KIND: ClassVar[int] = 6
    epoch: _Epoch
    tail: Position


class Append(Message, frozen=True, array_like=True):
    """Batches behind ``previous``, all written in ``written_in``; ``committed_lsn`` is what the proposer knows to be
    committed, ``settled_lsn`` up to where nobody will need it again. Without batches it tells that alone."""

    KIND: ClassVar[int] = 7
    epoch: _Epoch
    previous: Position
    written_in: _Epoch
    committed_lsn: _Lsn
    settled_lsn: _Lsn = BEFORE_FIRST


class Ack(Message, frozen=True, array_like=True):
    """All up to ``durable_lsn`` is synced."""

    KIND: ClassVar[int] = 8
    epoch: _Epoch
    durable_lsn: _Lsn


class Fetch(Message, frozen=True, array_like=True):
    """Asks for the records from ``from_lsn`` on, about ``bytes_max`` of them."""

    KIND: ClassVar[int] = 9
    from_lsn: _Lsn
    bytes_max: int


class Batches(Message, frozen=True, array_like=True):
    """Batches of one epoch behind ``previous``; none at the end of the log."""

    KIND: ClassVar[int] = 10
    previous: Position
    written_in: _Epoch


class Configure(Message, frozen=True, array_like=True):
    """From now on these are the members."""

    KIND: ClassVar[int] = 11
    epoch: _Epoch
    configuration: Configuration


class Configured(Message, frozen=True, array_like=True):
    """The list is stored, durably."""

    KIND: ClassVar[int] = 12
    epoch: _Epoch
    configuration: Configuration


class Refusal(Message, frozen=True, array_like=True):
    """Nothing of what was asked was done. ``reason`` is one of the constants below; ``promised_epoch`` is the epoch
    that is followed."""

    KIND: ClassVar[int] = 13
    reason: str
    detail: str
    promised_epoch: _Epoch


class Status(Message, frozen=True, array_like=True):
    """Asks how the logs kept stand, those of the nodes behind ``after_node_id``: of no log, and by nobody in
    particular."""

    KIND: ClassVar[int] = 14
    after_node_id: _Name = ""


class WalStatus(msgspec.Struct, frozen=True, array_like=True):
    """How one log stands. ``state`` is ``open``, ``closed``, ``busy`` where it is being recovered, or its disk does not
    answer, and nothing else is told, or ``failed``, and then ``detail`` says why. Of
    one that is not open its control file tells, whose positions have been reached at least.

    ``tail`` is what was received, ``lastReplicatedLsn``; ``archived_lsn`` is 0 where nothing is archived, and
    ``archive_fault`` says why archiving fails now, empty while it does not. ``scrubbed_s`` is when all of the log had
    been read again, in seconds since 1970, 0 where it was not yet.
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
    """Logs in the order of their nodes; with ``more`` there are others behind the last."""

    KIND: ClassVar[int] = 15
    region: str
    wals: tuple[WalStatus, ...]
    more: bool


FENCED = "fenced"
"""Another proposer was promised a higher epoch, or the same."""
NOT_ELECTED = "not-elected"
"""The history of this epoch was not applied yet."""
DOES_NOT_FIT = "does-not-fit"
"""The batch is not the one behind the end of the log."""
DAMAGED = "damaged"
"""Bytes are not what they should be."""
OTHER_WAL = "other-wal"
"""The log kept here is another one."""
OTHER_MEMBERS = "other-members"
"""A newer list of members is known here."""
COMMITTED = "committed"
"""It would undo what is known to be committed."""
NOT_HERE = "not-here"
"""The records asked for are not held."""
UNREADABLE = "unreadable"
"""What was said cannot be understood, or not at this point."""
FORBIDDEN = "forbidden"
"""The certificate does not name this log."""
UNAVAILABLE = "unavailable"
"""It cannot be kept or read just now: disk, or too many logs."""

_KINDS: dict[int, type[Message]] = {
    kind.KIND: kind
    for kind in (
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
}
_DECODERS = {number: msgspec.msgpack.Decoder(kind) for number, kind in _KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode


class Frame(msgspec.Struct, frozen=True):
    """A message and the batches it carries."""

    message: Message
    body: bytes | memoryview = b""


def encode(frame: Frame) -> tuple[bytes, bytes | memoryview]:
    """The frame's beginning and its body: the body is not copied."""
    head = _encode(frame.message)
    inner = _HEAD.pack(frame.message.KIND, len(head)) + head
    crc = crc32(frame.body, crc32(inner))
    return _PREFIX.pack(4 + len(inner) + len(frame.body), crc) + inner, frame.body


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
    """The frame that ``data`` is, all of it. Its body is a view of ``data``.

    Raises:
        InvalidInputError: says what is wrong with it.
    """
    view = memoryview(data)
    _, crc = _PREFIX.unpack_from(view)
    if crc32(view[PREFIX_BYTES:]) != crc:
        raise InvalidInputError("the CRC of the frame does not match")
    kind, head_bytes = _HEAD.unpack_from(view, PREFIX_BYTES)
    at = PREFIX_BYTES + _HEAD.size
    if kind not in _DECODERS or head_bytes > min(HEAD_BYTES_MAX, len(view) - at):
        raise InvalidInputError(f"a frame of kind {kind} is not known, or its head is not within it")
    try:
        message = _DECODERS[kind].decode(view[at : at + head_bytes])
    except msgspec.MsgspecError as error:
        raise InvalidInputError(f"a {_KINDS[kind].__name__} cannot be read: {error}") from error
    return Frame(message, view[at + head_bytes :])
