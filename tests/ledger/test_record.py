"""WAL record payloads: what goes in comes out, and damage is refused as such."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.chain.record import EventRecord, IdempotencyKey, decode, encode
from ledger.errors import InvalidInputError

TEXTS = st.text(st.characters(codec="utf-8"), max_size=60)
KEYS = st.builds(
    IdempotencyKey,
    route=st.integers(0, 255),
    key=TEXTS,
    line=st.integers(0, 2**32 - 1),
    body_digest=st.binary(min_size=32, max_size=32),
)
PLAIN = st.builds(EventRecord, tenant_id=TEXTS, job_id=TEXTS, payload=st.binary(max_size=200), idempotency=st.none())
RECORDS = PLAIN.map(lambda record: record._replace(answered_early=True)) | st.builds(
    EventRecord,
    tenant_id=TEXTS,
    job_id=TEXTS,
    payload=st.binary(max_size=200),
    idempotency=KEYS,
    answered_early=st.booleans(),
)
KEYED = EventRecord("acme", "job-1", b'{"a":1}', IdempotencyKey(2, "key", 7, b"\x11" * 32))


def test_the_worked_example_is_laid_out_as_documented() -> None:
    assert encode(*EventRecord("a", "j", b"{}")) == bytes.fromhex("01 01 61 01 6a 00 7b 7d")


def test_a_keyed_record_is_laid_out_as_documented() -> None:
    for answered_early, keyed in ((True, b"\x01"), (False, b"\x02")):
        key = b"\x02\x00\x03key\x00\x00\x00\x07" + b"\x11" * 32
        record = KEYED._replace(answered_early=answered_early)
        assert encode(*record) == b"\x01\x04acme\x05job-1" + keyed + key + b'{"a":1}'


@given(RECORDS)
def test_records_round_trip(record: EventRecord) -> None:
    assert decode(encode(*record)) == record


@given(st.binary(max_size=120))
def test_no_bytes_raise_anything_but_invalid_input(data: bytes) -> None:
    with contextlib.suppress(InvalidInputError):
        decode(data)


@settings(deadline=None)
@given(RECORDS, st.data())
def test_a_flipped_byte_raises_nothing_but_invalid_input(record: EventRecord, data: st.DataObject) -> None:
    damaged = bytearray(encode(*record))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(InvalidInputError):
        decode(bytes(damaged))


@pytest.mark.parametrize("end", range(len(encode(*KEYED)) - len(KEYED.payload)))
def test_a_record_cut_before_its_payload_is_refused(end: int) -> None:
    with pytest.raises(InvalidInputError):
        decode(encode(*KEYED)[:end])


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_refused(version: int) -> None:
    with pytest.raises(InvalidInputError, match=f"version {version}"):
        decode(bytes([version]) + encode(*KEYED)[1:])
