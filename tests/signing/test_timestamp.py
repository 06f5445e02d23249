"""A time stamp counts when it is of these bytes, answers this request and leads to the CA; all else is refused."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ledger.errors import ConfigurationError, SignatureError
from signing.anchors import (
    RESPONSE_BYTES_MAX,
    load_authorities,
    make_request,
    open_timestamp,
    with_sorted_certificates,
)
from tests.app.timestamp_authority import Authority

NOTE = b"log.example/acme\n3\nAAAA\n\n\xe2\x80\x94 log.example/acme BBBB\n"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tsa") / "one")


@pytest.fixture(scope="module")
def response(authority: Authority) -> bytes:
    return authority.stamp(make_request(NOTE)[0])


def test_a_stamp_on_the_note_tells_its_time(authority: Authority, response: bytes) -> None:
    time = open_timestamp(response, NOTE, load_authorities(authority.ca_file))
    assert abs(datetime.now(UTC) - time) < timedelta(minutes=5)
    assert time == open_timestamp(response, NOTE, None)
    assert authority.vouches_for(NOTE, response)


def test_a_stamp_on_other_bytes_or_for_another_request_is_refused(authority: Authority, response: bytes) -> None:
    roots = load_authorities(authority.ca_file)
    with pytest.raises(SignatureError, match="other bytes"):
        open_timestamp(response, NOTE + b"x", roots)
    request, nonce = make_request(NOTE)
    assert open_timestamp(authority.stamp(request), NOTE, roots, nonce)
    with pytest.raises(SignatureError, match="another request"):
        open_timestamp(response, NOTE, roots, nonce)


def test_certificates_inside_a_stamp_are_not_trusted(tmp_path: Path, response: bytes) -> None:
    other = Authority(tmp_path / "other")
    with pytest.raises(SignatureError, match="does not hold"):
        open_timestamp(response, NOTE, load_authorities(other.ca_file))
    with pytest.raises(SignatureError, match="does not hold"):
        open_timestamp(response, NOTE, ())


def test_whatever_bytes_come_they_are_refused_as_such(authority: Authority, response: bytes) -> None:
    roots = load_authorities(authority.ca_file)
    rng = random.Random(20)
    rejection = bytes.fromhex("30053003020102")
    for bad in (b"", b"\x00", b"garbage", rejection, response[:-1], bytes(RESPONSE_BYTES_MAX + 1)):
        with pytest.raises(SignatureError):
            open_timestamp(bad, NOTE, roots)
    for _ in range(400):
        changed = bytearray(response)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        try:
            time = open_timestamp(bytes(changed), NOTE, roots)
        except SignatureError:
            continue
        assert time == open_timestamp(response, NOTE, None), "only what nothing signs may have been changed"


def test_a_stamp_that_brings_its_chain_in_any_order_counts(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "two", with_chain=True)
    request, nonce = make_request(NOTE)
    response = authority.stamp(request)
    assert authority.vouches_for(NOTE, response)
    in_order = with_sorted_certificates(response)
    assert (in_order == response, len(in_order)) == (False, len(response))
    roots = load_authorities(authority.ca_file)
    time = open_timestamp(response, NOTE, roots, nonce)
    assert time == open_timestamp(in_order, NOTE, roots) == open_timestamp(response, NOTE, None)
    with pytest.raises(SignatureError, match="does not hold"):
        open_timestamp(response, NOTE, load_authorities(Authority(tmp_path / "other").ca_file))


def test_what_is_no_stamp_with_certificates_is_left_as_it_is(response: bytes) -> None:
    rng = random.Random(21)
    for length in range(len(response)):
        assert len(with_sorted_certificates(response[:length])) == length
    for _ in range(2_000):
        changed = bytearray(response)
        changed[rng.randrange(80)] = rng.randrange(256)
        found = with_sorted_certificates(bytes(changed))
        assert sorted(found) == sorted(changed)


def test_a_file_without_certificates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    for path in (tmp_path / "empty.pem", tmp_path / "missing.pem", tmp_path):
        with pytest.raises(ConfigurationError):
            load_authorities(path)
