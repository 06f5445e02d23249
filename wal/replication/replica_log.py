"""One copy of a log as the rules see it, in files or on the disk of a simulation.

After an OSError or WalError of a method that writes, the copy MUST NOT be used any more, but opened again.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ledger.positions import Epoch, Lsn
from wal.control import Control
from wal.history import History
from wal.replication.configuration import Configuration
from wal.replication.messages import Position


class Chunk(NamedTuple):
    """Batches as they are in a segment, all of one epoch, behind ``previous``; none at the end of the log."""

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
        """End with ``last_lsn``, durably; what was above is kept in other files."""

    def begin_at(self, first_lsn: Lsn, history: History) -> None:
        """Remove all records from the log, durably, into other files; the next is ``first_lsn``. ``history`` is that of
        the records before it, which no member has any more; a log that is opened again before one has come forgets
        it."""

    def read(self, from_lsn: Lsn, upto_lsn: Lsn, bytes_max: int) -> Chunk:
        """Records from ``from_lsn`` on up to ``upto_lsn``, which are durable: at least one where there is one, and no
        more than about ``bytes_max``.

        Raises:
            WalError: it is older than the log.
            WalCorruptError: the log is damaged there.
        """
