"""The payload of a WAL record that becomes an entry.

Format, all integers big-endian::

    version u8 = 1 | tenant u8 length, bytes | job_id u8 length, bytes | keyed u8 (0, 1 or 2)
    when keyed: route u8 | key u16 length, bytes | line u32 | body_digest 32 bytes
    payload: the rest, RFC 8785 canonical JSON

``keyed`` is 0 without an Idempotency-Key, 1 if the event may be acknowledged once it is durable, 2 if only once it is
chained. An event that loses against another of its key must stay in the chain in case 1 only.

Worked example, tenant ``a``, job ``j``, no key, payload ``{}``::

    01 | 01 61 | 01 6a | 00 | 7b 7d

The type of the record and its HLC are in the WAL header, so they are not repeated here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ledger.errors import InvalidInputError

RECORD_VERSION = 1
_KEY_HEADER = struct.Struct(">BH")
_KEY_TAIL = struct.Struct(">I32s")


class IdempotencyKey(NamedTuple):
    """Identity of a keyed request line: the same key with another ``body_digest`` is another request."""

    route: int
    key: str
    line: int
    body_digest: bytes


class EventRecord(NamedTuple):
    """The content of one WAL record, without its header. ``payload`` is canonical JSON bytes."""

    tenant_id: str
    job_id: str
    payload: bytes
    idempotency: IdempotencyKey | None = None
    answered_early: bool = True
    """Whether it may be acknowledged before it is chained; always true without a key."""


def encode(
    tenant_id: str,
    job_id: str,
    payload: bytes,
    idempotency: IdempotencyKey | None = None,
    answered_early: bool = True,
) -> bytes:
    """The WAL bytes of a record with the parts of ``EventRecord``."""
    if idempotency is None:
        return encode_plain([tenant_id], [job_id], [payload])[0]
    return encode_keyed([tenant_id], [job_id], [payload], [idempotency], answered_early)[0]


def encode_plain(tenant_ids: Sequence[str], job_ids: Sequence[str], payloads: Sequence[bytes]) -> list[bytes]:
    """``encode`` for events without a key."""
    return [
        b"%c%c%b%c%b\x00%b" % (RECORD_VERSION, len(tenant), tenant, len(job), job, payload)
        for tenant, job, payload in zip(map(str.encode, tenant_ids), map(str.encode, job_ids), payloads, strict=True)
    ]


def encode_keyed(
    tenant_ids: Sequence[str],
    job_ids: Sequence[str],
    payloads: Sequence[bytes],
    keys: Sequence[IdempotencyKey],
    answered_early: bool,
) -> list[bytes]:
    """``encode`` for events with keys."""
    flag = 1 if answered_early else 2
    return [
        b"%c%c%b%c%b%c%b%b%b%b"
        % (
            *(RECORD_VERSION, len(tenant), tenant, len(job), job, flag),
            *(_KEY_HEADER.pack(route, len(name)), name, _KEY_TAIL.pack(line, body_digest), payload),
        )
        for tenant, job, payload, (route, key, line, body_digest) in zip(
            map(str.encode, tenant_ids), map(str.encode, job_ids), payloads, keys, strict=True
        )
        for name in (key.encode(),)
    ]


def decode(data: bytes) -> EventRecord:
    """The record that ``data`` holds.

    Raises:
        InvalidInputError: ``data`` is not of this format.
    """
    try:
        if data[0] != RECORD_VERSION:
            raise InvalidInputError(f"record version {data[0]} is not known, only {RECORD_VERSION}")
        at = 2 + data[1]
        tenant_id = data[2:at].decode()
        job_end = at + 1 + data[at]
        job_id = data[at + 1 : job_end].decode()
        keyed = data[job_end]
        if keyed > 2:
            raise InvalidInputError(f"keyed flag {keyed} is none of 0, 1 and 2")
        at = job_end + 1
        if not keyed:
            return EventRecord(tenant_id, job_id, data[at:])
        route, key_length = _KEY_HEADER.unpack_from(data, at)
        at += _KEY_HEADER.size
        key = data[at : at + key_length].decode()
        line, body_digest = _KEY_TAIL.unpack_from(data, at + key_length)
        payload = data[at + key_length + _KEY_TAIL.size :]
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise InvalidInputError(f"record payload is cut short or malformed: {error}") from error
    return EventRecord(tenant_id, job_id, payload, IdempotencyKey(route, key, line, body_digest), keyed == 1)
