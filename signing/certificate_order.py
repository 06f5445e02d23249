"""The order of certificates in a time stamp: any, as OpenSSL sends them, brought to the one that DER has.

``SignedData.certificates`` (RFC 5652, 5.1) is a SET OF, which DER sorts by bytes (X.690, 11.6). OpenSSL's authority
writes the certificates of its chain in the order of its file. No signature covers them: sorting changes nothing
that is judged; without it the library refuses to read the response. Where the field is::

    TimeStampResp  SEQUENCE { status SEQUENCE, ContentInfo SEQUENCE { OID, [0] { SignedData SEQUENCE {
        version INTEGER, digestAlgorithms SET, encapContentInfo SEQUENCE, certificates [0], ... } } } }
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

_INTEGER, _OID, _SEQUENCE, _SET, _CONTEXT_0 = 0x02, 0x06, 0x30, 0x31, 0xA0
_PATH: Final = (
    (_SEQUENCE,),
    (_SEQUENCE, _SEQUENCE),
    (_OID, _CONTEXT_0),
    (_SEQUENCE,),
    (_INTEGER, _SET, _SEQUENCE, _CONTEXT_0),
)
"""At each level the tags up to the element that is gone into."""


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
