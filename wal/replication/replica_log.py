"""One copy of a log as the rules see it, in files or on the disk of a simulation; and the check of received batches.

After an OSError or WalError of a method that writes, the copy MUST NOT be used any more, but opened again.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol
from zlib import crc32

from ledger.errors import InvalidInputError
from ledger.hlc import node_hash
from ledger.positions import Epoch, Lsn
from wal import native
from wal.control import Control
from wal.format import BATCH_RECORD_BYTES, HLC_AT, FormatError, check_record, decode_batch
from wal.history import History
from wal.replication.configuration import Configuration
from wal.replication.messages import Position


class Chunk(NamedTuple):
    """Batches as they stand in a segment, all of one epoch, behind ``previous``; none at the end of the log."""

    previous: Position
    written_in: Epoch
    last_lsn: Lsn
    batches: bytes


class ReplicaLog(Protocol):
    """One copy of one log. ``tail`` and ``history`` count what was appended, synced or not."""

    @property
    def control(self) -> Control:
        """What the control file says; ``history`` and positions in it may lag behind."""

    @property
    def configuration(self) -> Configuration:
        """The list of members, as stored."""

    @property
    def first_lsn(self) -> Lsn:
        """The oldest record held, or the first to come."""

    @property
    def tail(self) -> Position:
        """Where the log ends; epoch 0 where it holds no record."""

    @property
    def history(self) -> History:
        """Which epoch wrote from where on."""

    def store(self, control: Control) -> None:
        """Make it the control file, with history and durable position as they are; durable when this returns."""

    def configure(self, configuration: Configuration) -> None:
        """Store the list of members; durable when this returns."""

    def append(self, written_in: Epoch, batches: bytes | memoryview) -> None:
        """Write batches of one epoch behind the tail: sound, and fitting. Durable only after ``sync``."""

    def sync(self) -> None:
        """Make all that was appended durable."""

    def truncate(self, last_lsn: Lsn) -> None:
        """End with ``last_lsn``, durably; what stood above is kept aside."""

    def begin_at(self, first_lsn: Lsn, history: History) -> None:
        """Set all records aside, durably; the next to come is ``first_lsn``. ``history`` is that of the records before
        it, which are nowhere any more; it is forgotten by a log that is opened again before one has come."""

    def read(self, from_lsn: Lsn, upto_lsn: Lsn, bytes_max: int) -> Chunk:
        """Records from ``from_lsn`` on up to ``upto_lsn``, which are durable: at least one where there is one, and no
        more than about ``bytes_max``.

        Raises:
            WalError: it is older than the log.
            WalCorruptError: the log is damaged there.
        """


def check_batches(data: bytes | memoryview, first_lsn: Lsn, node_id: str) -> Lsn:
    """The last LSN of the batches that ``data`` is, which begin with ``first_lsn``: every CRC, length and LSN checked.

    Raises:
        InvalidInputError: says what is wrong, and where.
    """
    checked = native.check_batches(data, first_lsn, node_hash(node_id))
    return check_each(data, first_lsn, node_id) if checked is None else Lsn(checked)


def check_each(data: bytes | memoryview, first_lsn: Lsn, node_id: str) -> Lsn:
    """``check_batches``, record by record in Python."""
    whole = bytes(data)
    at, lsn = 0, first_lsn
    while at < len(whole):
        try:
            batch = decode_batch(whole, at, len(whole))
            if batch.first_lsn != lsn:
                raise FormatError(f"a batch begins with LSN {batch.first_lsn} where {lsn} should be")
            body_at = at + BATCH_RECORD_BYTES
            end = body_at + batch.body_bytes
            if end > len(whole):
                raise FormatError("the batch is cut short")
            if crc32(memoryview(whole)[body_at:end]) != batch.body_crc32:
                raise FormatError("the CRC of the batch does not match")
            last_at = at = body_at
            while lsn <= batch.last_lsn:
                last_at = at
                at += check_record(whole, at, lsn=lsn, node_id=node_id, available=end - at)
                lsn = Lsn(lsn + 1)
            if at != end or whole[last_at + HLC_AT.start : last_at + HLC_AT.stop] != batch.hlc:
                raise FormatError("the BATCH record disagrees with its records")
        except FormatError as error:
            raise InvalidInputError(f"byte {at}: {error}") from error
    return Lsn(lsn - 1)
