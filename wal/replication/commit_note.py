"""How far a member knows its log to be committed, in the file ``committed`` beside the log.

Format, big-endian::

    wal_id 16 B | committed_lsn u64 | crc32 u32 over both

It is written over and over without a sync, so no answer waits for it, and outlives the process that is killed. The
control file has the position durably some seconds later (``kept_logs``). One that is damaged, or of another WAL, says
nothing.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from zlib import crc32

from ledger.positions import BEFORE_FIRST, Lsn
from wal.format import WAL_ID_BYTES

NOTE_NAME = "committed"
_POSITION = struct.Struct(f">{WAL_ID_BYTES}sQ")
_CRC = struct.Struct(">I")
_BYTES = _POSITION.size + _CRC.size


class CommitNote:
    """The note in ``folder`` on the WAL of this id, which MUST be closed again. ``lsn`` is what it says.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, folder: Path, wal_id: str) -> None:
        self._wal_id = bytes.fromhex(wal_id)
        self._descriptor = os.open(folder / NOTE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.lsn = self._read()

    def write(self, lsn: Lsn) -> None:
        """Let it say ``lsn``, which MUST be durable in the log.

        Raises:
            OSError: it cannot be written.
        """
        if lsn > self.lsn:
            data = _POSITION.pack(self._wal_id, lsn)
            os.pwrite(self._descriptor, data + _CRC.pack(crc32(data)), 0)
            self.lsn = lsn

    @property
    def wal_id(self) -> bytes:
        return self._wal_id

    @property
    def descriptor(self) -> int:
        """Of the file, for who writes the same, and sets ``lsn`` then."""
        return self._descriptor

    def close(self) -> None:
        os.close(self._descriptor)

    def _read(self) -> Lsn:
        data = os.pread(self._descriptor, _BYTES, 0)
        if len(data) < _BYTES or _CRC.unpack_from(data, _POSITION.size)[0] != crc32(data[: _POSITION.size]):
            return BEFORE_FIRST
        wal_id, lsn = _POSITION.unpack_from(data)
        return Lsn(lsn) if wal_id == self._wal_id else BEFORE_FIRST
