"""The control file: identity of the WAL, positions known to have been reached, the promise of a quorum member, and the
history of the log.

Format, big-endian::

    magic 8 B "TALLYCTL" | version u16 = 2 | node_id length u16 | node_id 64 B, zero-padded | wal_id 16 B
    | epoch u64 | highest HLC: physical u64, logical u32
    | durable_lsn u64 | chained_lsn u64 | signed_lsn u64
    | committed_lsn u64 | promised_epoch u64 | promised_run 16 B | member_id 16 B | generation u64
    | count u32 | count times: epoch u64, first_lsn u64
    | crc32 u32 over all before it

Version 1 ends with the CRC after ``signed_lsn``. It is still read: ``committed_lsn`` is then ``chained_lsn``, and the
history comes from the segments. Only version 2 is written.

The file is replaced as a whole: temporary file, fsync, rename, fsync of the folder.

Invariants::

    durable_lsn >= committed_lsn >= chained_lsn >= signed_lsn >= 0
    every position in it was reached before it was written: it may lag, it never leads
    epochs and first LSNs of the history rise

The history of a log has the first LSN of each epoch that wrote into it. An epoch ends before the first LSN of the next
one; the last epoch ends with the log. An epoch that left no record is not in the history. The history is as short as
the log: a start drops the epochs that ended before the record in front of the oldest.

If two logs of one WAL agree on an epoch's first LSN, they agree on all of its records that both hold: only one proposer
writes in an epoch, and it appends to a copy only after its history was applied there. Two logs diverge where their
histories diverge.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ledger.errors import WalCorruptError, WalError, refuse
from ledger.hlc import Hlc
from ledger.positions import BEFORE_FIRST, NO_EPOCH, Epoch, Lsn, before
from wal.format import NODE_ID_BYTES_MAX, WAL_ID_BYTES
from wal.segment import read_file, store_file

CONTROL_NAME = "control"
CONTROL_MAGIC = b"TALLYCTL"
CONTROL_VERSION = 2
NOBODY = "00" * WAL_ID_BYTES
"""Id of no member, and of no proposer."""

_FIELDS = struct.Struct(f">8sHH{NODE_ID_BYTES_MAX}s{WAL_ID_BYTES}sQQIQQQ")
_MEMBER = struct.Struct(f">QQ{WAL_ID_BYTES}s{WAL_ID_BYTES}sQI")
_EPOCH_START = struct.Struct(">QQ")
_CRC_BYTES = 4
_HISTORY_AT = _FIELDS.size + _MEMBER.size


class EpochStart(NamedTuple):
    """An epoch, and the LSN of its first record."""

    epoch: Epoch
    first_lsn: Lsn


History = tuple[EpochStart, ...]


class Control(NamedTuple):
    """The content of the control file. ``highest_hlc`` is of ``node_id``; ids are 32 hex digits.

    ``history`` is empty only if it is not known, as in version 1. ``promised_epoch`` is the highest epoch that this
    member promised to follow, and ``promised_run`` the run of the proposer that has the promise. ``member_id`` is the
    id of this member in the quorum, whose list has changed ``generation`` times. A node without members has none of
    the four.
    """

    wal_id: str
    node_id: str
    epoch: Epoch
    highest_hlc: Hlc
    durable_lsn: Lsn = BEFORE_FIRST
    chained_lsn: Lsn = BEFORE_FIRST
    signed_lsn: Lsn = BEFORE_FIRST
    committed_lsn: Lsn = BEFORE_FIRST
    promised_epoch: Epoch = NO_EPOCH
    promised_run: str = NOBODY
    member_id: str = NOBODY
    generation: int = 0
    history: History = ()


def store(folder: Path, control: Control) -> None:
    """Write ``control`` as the control file of ``folder``; durable when this returns.

    Raises:
        OSError: the old control file is still whole.
    """
    assert control.durable_lsn >= control.committed_lsn >= control.chained_lsn >= control.signed_lsn >= 0
    assert history_rises(control.history)
    node = control.node_id.encode()
    data = _FIELDS.pack(
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
    data += _MEMBER.pack(
        control.committed_lsn,
        control.promised_epoch,
        bytes.fromhex(control.promised_run),
        bytes.fromhex(control.member_id),
        control.generation,
        len(control.history),
    )
    data += b"".join(_EPOCH_START.pack(*start) for start in control.history)
    store_file(folder / CONTROL_NAME, data + crc32(data).to_bytes(_CRC_BYTES, "big"))


def load(folder: Path) -> Control | None:
    """The control file of ``folder``; None when it does not exist.

    Raises:
        WalCorruptError: the file is damaged.
        WalError: the path cannot be read, for example because it is a folder.
    """
    path = folder / CONTROL_NAME
    try:
        data = read_file(path)
    except FileNotFoundError:
        return None
    except (OSError, WalCorruptError) as error:
        reason = error.damage if isinstance(error, WalCorruptError) else error
        raise WalError(
            f"the control file {path} cannot be read: {reason}. Put the file of this WAL back there"
        ) from error
    if len(data) < _FIELDS.size + _CRC_BYTES:
        raise _corrupt(f"it is {len(data)} bytes long, {_FIELDS.size + _CRC_BYTES} at least were written")
    magic, version, node_bytes, node, wal_id, epoch, physical_ms, logical, durable, chained, signed = (
        _FIELDS.unpack_from(data)
    )
    is_control = magic == CONTROL_MAGIC and version in (1, CONTROL_VERSION)
    committed, promised_epoch, promised_run, member_id, generation, epochs = (
        _MEMBER.unpack_from(data, _FIELDS.size)
        if version == CONTROL_VERSION and len(data) >= _HISTORY_AT + _CRC_BYTES
        else (chained, NO_EPOCH, bytes(WAL_ID_BYTES), bytes(WAL_ID_BYTES), 0, 0)
    )
    node_id = node[:node_bytes].decode(errors="replace")
    end = _FIELDS.size if version == 1 else _HISTORY_AT + epochs * _EPOCH_START.size
    refuse(
        _corrupt,
        (not is_control, f"it is not a control file of version 1 or {CONTROL_VERSION}"),
        (len(data) != end + _CRC_BYTES, f"it is {len(data)} bytes long, not {end + _CRC_BYTES}"),
        (data[end:] != crc32(data[:end]).to_bytes(_CRC_BYTES, "big"), "its CRC does not match"),
        ("\N{REPLACEMENT CHARACTER}" in node_id, "its node id is no UTF-8"),
    )
    return Control(
        wal_id=wal_id.hex(),
        node_id=node_id,
        epoch=epoch,
        highest_hlc=Hlc(physical_ms, logical, node_id),
        durable_lsn=durable,
        chained_lsn=chained,
        signed_lsn=signed,
        committed_lsn=committed,
        promised_epoch=promised_epoch,
        promised_run=promised_run.hex(),
        member_id=member_id.hex(),
        generation=generation,
        history=tuple(map(EpochStart._make, _EPOCH_START.iter_unpack(data[_HISTORY_AT:end]))),
    )


def _corrupt(reason: str) -> WalCorruptError:
    return WalCorruptError(CONTROL_NAME, 0, f"the control file cannot be trusted: {reason}")


def history_rises(history: History) -> bool:
    """Whether its epochs and LSNs rise."""
    return all(a.epoch < b.epoch and a.first_lsn < b.first_lsn for a, b in pairwise(history))


def begin_epoch(history: History, epoch: Epoch, first_lsn: Lsn) -> History:
    """The history once ``epoch`` writes from ``first_lsn`` on; entries at or above ``first_lsn`` are dropped."""
    assert all(start.epoch < epoch for start in history)
    return (*history_up_to(history, Lsn(first_lsn - 1)), EpochStart(epoch, first_lsn))


def history_up_to(history: History, last_lsn: Lsn) -> History:
    """The history of a log that ends with ``last_lsn``."""
    return tuple(start for start in history if start.first_lsn <= last_lsn)


def history_since(history: History, first_lsn: Lsn) -> History:
    """The history of a log whose oldest record is ``first_lsn``."""
    ended = [earlier for earlier, later in pairwise(history) if later.first_lsn <= first_lsn]
    return history[len(ended) :]


def epoch_of(history: History, lsn: Lsn) -> Epoch | None:
    """The epoch that wrote ``lsn``; None if the history does not reach back to it."""
    for epoch, first_lsn in reversed(history):
        if first_lsn <= lsn:
            return epoch
    return None


def last_common(history: History, last_lsn: Lsn, other: History) -> Lsn:
    """The last LSN that two logs have in common; 0 when they share no record. The first log has this ``history`` and
    ends with ``last_lsn``; the second has the history ``other``, without an end.

    A history may begin late: the oldest records of its first epoch may be gone.
    """
    if not (common := sorted({*history} & {*other})):
        return BEFORE_FIRST
    following = [start.first_lsn for start in (*history, *other) if start.epoch > common[-1].epoch]
    return min([last_lsn, *map(before, following)])
