"""Time stamps of RFC 3161 over checkpoints: that somebody else saw these bytes at that time.

What is stamped is the SHA-256 of the note, all its bytes, signatures included. What is kept is the whole TimeStampResp,
so that ``openssl ts -verify -data NOTE -in RESPONSE -CAfile CA`` judges it as well.

``SignedData.certificates`` (RFC 5652, 5.1) is a SET OF, which DER sorts by bytes (X.690, 11.6). OpenSSL's authority
writes the certificates of its chain in the order of its file. No signature covers them: sorting changes nothing
that is judged; without it the library refuses to read the response. Where the field is::

    TimeStampResp  SEQUENCE { status SEQUENCE, ContentInfo SEQUENCE { OID, [0] { SignedData SEQUENCE {
        version INTEGER, digestAlgorithms SET, encapContentInfo SEQUENCE, certificates [0], ... } } } }

The library behind this (rfc3161-client) is an extra, ``pip install 'tallystick[anchor]'``; without it nothing can be
stamped or judged, and all else works.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from cryptography import x509

from ledger.errors import ConfigurationError, SignatureError
from signing.files import open_regular

if TYPE_CHECKING:
    from rfc3161_client import TimeStampResponse

RESPONSE_BYTES_MAX = 64 * 1024
"""Longest response read; one with its certificates has some five thousand bytes."""
CA_FILE_BYTES_MAX = 4 << 20
IS_AVAILABLE = find_spec("rfc3161_client") is not None

_SHA256 = x509.ObjectIdentifier("2.16.840.1.101.3.4.2.1")
_GRANTED = 0

_INTEGER, _OID, _SEQUENCE, _SET, _CONTEXT_0 = 0x02, 0x06, 0x30, 0x31, 0xA0
_PATH: Final = (
    (_SEQUENCE,),
    (_SEQUENCE, _SEQUENCE),
    (_OID, _CONTEXT_0),
    (_SEQUENCE,),
    (_INTEGER, _SET, _SEQUENCE, _CONTEXT_0),
)
"""At each level the tags up to the element that is gone into."""


class TimestampRequest(NamedTuple):
    """``body`` is what an authority is sent; the answer repeats ``nonce``."""

    body: bytes
    nonce: int


def require_available() -> None:
    """Raises ConfigurationError when time stamps cannot be made or judged here."""
    if not IS_AVAILABLE:
        raise ConfigurationError("time stamps need the package rfc3161-client: pip install 'tallystick[anchor]'")


def load_authorities(path: Path) -> tuple[x509.Certificate, ...]:
    """The certificates that a chain may end in, from a PEM file.

    Raises:
        ConfigurationError: it cannot be read, or holds no certificate.
    """
    try:
        with open_regular(path) as file:
            return tuple(x509.load_pem_x509_certificates(file.read(CA_FILE_BYTES_MAX)))
    except OSError as error:
        raise ConfigurationError(f"certificates cannot be read from {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} holds no PEM certificate: {error}") from error


def make_request(note: bytes) -> TimestampRequest:
    """A request to stamp ``note``, with a nonce, that asks for the authority's certificates."""
    from rfc3161_client import HashAlgorithm, TimestampRequestBuilder

    request = TimestampRequestBuilder().data(note).hash_algorithm(HashAlgorithm.SHA256).cert_request(cert_request=True)
    built = request.nonce(nonce=True).build()
    assert built.nonce is not None
    return TimestampRequest(built.as_bytes(), built.nonce)


def stated_time(response: bytes, note: bytes, nonce: int | None = None) -> datetime:
    """The time that a response states for ``note``; nobody vouches for it yet.

    Raises:
        SignatureError: malformed, not granted, of other bytes, or with another nonce.
    """
    return _stated(_decoded(response), note, nonce)


def open_timestamp(
    response: bytes, note: bytes, authorities: Sequence[x509.Certificate], nonce: int | None = None
) -> datetime:
    """The time at which ``note`` was stamped, once the signature under it leads to one of ``authorities``.

    Certificates inside the response are not trusted; they need to have been valid at the time stated.

    Raises:
        SignatureError: it does not, or as ``stated_time``.
    """
    from rfc3161_client import VerificationError, VerifierBuilder

    decoded = _decoded(response)
    time = _stated(decoded, note, nonce)
    try:
        verifier = VerifierBuilder(roots=list(authorities)).build()
        verifier.verify(decoded, hashlib.sha256(note).digest())
    except (VerificationError, ValueError) as error:
        raise SignatureError(f"the time stamp does not hold: {error}") from error
    return time


def _decoded(response: bytes) -> TimeStampResponse:
    from rfc3161_client import decode_timestamp_response

    if len(response) > RESPONSE_BYTES_MAX:
        raise SignatureError(f"the time stamp is longer than {RESPONSE_BYTES_MAX} bytes")
    try:
        return decode_timestamp_response(with_sorted_certificates(response))
    except ValueError as error:
        raise SignatureError(f"the time stamp is malformed: {error}") from error


def _stated(response: TimeStampResponse, note: bytes, nonce: int | None) -> datetime:
    if response.status != _GRANTED:
        raise SignatureError(f"the authority did not stamp: status {response.status} {response.status_string}"[:300])
    try:
        info = response.tst_info
        imprint = info.message_imprint
        stated = (imprint.hash_algorithm, imprint.message)
        given_nonce, time = info.nonce, info.gen_time
    except ValueError as error:
        raise SignatureError(f"the time stamp is malformed: {error}") from error
    if stated != (_SHA256, hashlib.sha256(note).digest()):
        raise SignatureError("the time stamp is of other bytes")
    if nonce is not None and given_nonce != nonce:
        raise SignatureError("the time stamp answers another request")
    return time.astimezone(UTC)


class _Element(NamedTuple):
    """One element in DER: its tag, where it begins, its content and its end."""

    tag: int
    begin: int
    content: int
    end: int


def with_sorted_certificates(response: bytes) -> bytes:
    """``response``, as long as it was, its certificates in DER's order; anything that is none is left as it is."""
    begin, end = 0, len(response)
    try:
        for tags in _PATH:
            elements = _elements(response, begin, end)
            found = [next(elements) for _ in tags]
            if tuple(element.tag for element in found) != tags:
                return response
            begin, end = found[-1].content, found[-1].end
        certificates = [response[each.begin : each.end] for each in _elements(response, begin, end)]
    except (ValueError, StopIteration):
        return response
    return response[:begin] + b"".join(sorted(certificates)) + response[end:]


def _elements(data: bytes, at: int, end: int) -> Iterator[_Element]:
    """The elements that fill ``data[at:end]``.

    Raises:
        ValueError: they do not, or one is not in DER.
    """
    while at < end:
        if end - at < 2:
            raise ValueError("an element without a length")
        length, content = data[at + 1], at + 2
        if length >= 0x80:
            digits = length & 0x7F
            if not 1 <= digits <= 4 or content + digits > end:
                raise ValueError("a length that no element here has")
            length, content = int.from_bytes(data[content : content + digits]), content + digits
        if content + length > end:
            raise ValueError("an element that goes on behind its end")
        yield _Element(data[at], at, content, content + length)
        at = content + length
