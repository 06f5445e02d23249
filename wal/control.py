"""The control file: identity of the WAL and positions known to have been reached.

Format, big-endian::

    magic 8 B "TALLYCTL" | version u16 = 1 | node_id length u16 | node_id 64 B, zero-padded | wal_id 16 B
    | epoch u64 | highest HLC: physical u64, logical u32
    | durable_lsn u64 | chained_lsn u64 | signed_lsn u64 | crc32 u32 over all before it

Replaced as a whole: temporary file, fsync, rename, fsync of the folder.

Invariants::

    durable_lsn >= chained_lsn >= signed_lsn >= 0
    every position in it had been reached when it was written: it may lag, it never leads
"""

from __future__ import annotations

import secrets
import struct
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ledger.errors import WalCorruptError, WalError
from ledger.hlc import Hlc
from ledger.positions import BEFORE_FIRST, Epoch, Lsn
from wal.format import NODE_ID_BYTES_MAX, WAL_ID_BYTES
from wal.segment import store_file

CONTROL_NAME = "control"
CONTROL_MAGIC = b"TALLYCTL"
CONTROL_VERSION = 1

_FIELDS = struct.Struct(f">8sHH{NODE_ID_BYTES_MAX}s{WAL_ID_BYTES}sQQIQQQ")
_CRC = struct.Struct(">I")


class Control(NamedTuple):
    """What the control file says. ``wal_id`` is 32 hex digits; ``highest_hlc`` is of ``node_id``."""

    wal_id: str
    node_id: str
    epoch: Epoch
    highest_hlc: Hlc
    durable_lsn: Lsn = BEFORE_FIRST
    chained_lsn: Lsn = BEFORE_FIRST
    signed_lsn: Lsn = BEFORE_FIRST


def new_wal_id() -> str:
    """A random identity for a new WAL, 32 hex digits."""
    return secrets.token_hex(WAL_ID_BYTES)


def store(folder: Path, control: Control) -> None:
    """Make ``control`` the control file of ``folder``; durable when this returns.

    Raises:
        OSError: the old control file is still whole.
    """
    assert control.durable_lsn >= control.chained_lsn >= control.signed_lsn >= 0
    node = control.node_id.encode()
    fields = _FIELDS.pack(
        CONTROL_MAGIC,
        CONTROL_VERSION,
        len(node),
        node,
        bytes.fromhex(control.wal_id),
        control.epoch,
        control.highest_hlc.physical_ms,
        control.highest_hlc.logical,
        control.durable_lsn,
        control.chained_lsn,
        control.signed_lsn,
    )
    store_file(folder / CONTROL_NAME, fields + _CRC.pack(crc32(fields)))


def load(folder: Path) -> Control | None:
    """The control file of ``folder``; None when there is none.

    Raises:
        WalCorruptError: there is one and it is damaged.
        WalError: what stands in its place cannot be read, such as a folder.
    """
    path = folder / CONTROL_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WalError(
            f"the control file {path} cannot be read: {error}. Put the file of this WAL back there"
        ) from error
    if len(data) != _FIELDS.size + _CRC.size:
        raise _corrupt(f"it is {len(data)} bytes long, not {_FIELDS.size + _CRC.size}")
    if _CRC.unpack_from(data, _FIELDS.size)[0] != crc32(data[: _FIELDS.size]):
        raise _corrupt("its CRC does not match")
    magic, version, node_bytes, node, wal_id, epoch, physical_ms, logical, *lsns = _FIELDS.unpack_from(data)
    if magic != CONTROL_MAGIC or version != CONTROL_VERSION:
        raise _corrupt(f"it is not a control file of version {CONTROL_VERSION}")
    node_id = node[:node_bytes].decode()
    return Control(wal_id.hex(), node_id, epoch, Hlc(physical_ms, logical, node_id), *lsns)


def _corrupt(reason: str) -> WalCorruptError:
    return WalCorruptError(CONTROL_NAME, 0, f"the control file cannot be trusted: {reason}")
