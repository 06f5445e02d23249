"""Checking batches that came over the wire, all of them before the first byte is kept."""

from __future__ import annotations

from zlib import crc32

from ledger.errors import InvalidInputError
from ledger.hlc import node_hash
from ledger.positions import Lsn
from wal import native
from wal.format import BATCH_RECORD_BYTES, HLC_AT, FormatError, check_record, decode_batch


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
