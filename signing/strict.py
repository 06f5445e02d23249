"""Strict parsing of signed text: base64 with one spelling for each value, JSON without duplicate names.

Signed documents are forged where two parsers disagree about the same text, so an ambiguous text is rejected.
"""

from __future__ import annotations

import base64
import json

from ledger.errors import SignatureError, reported_as

JSON_CHARACTERS_MAX = 24 * 2**20
"""Longest JSON text read; the largest envelope fits."""


def decode_base64(text: object, what: str, *, url_safe: bool = False) -> bytes:
    """The bytes that ``text`` spells in RFC 4648 section 4, padding included.

    With ``url_safe`` the alphabet of section 5 is allowed too, but not a mix of both. ``what`` names
    the field in the error.

    Raises:
        SignatureError: ``text`` is not the one spelling of any bytes.
    """
    if not isinstance(text, str) or not text.isascii():
        raise SignatureError(f"{what} is not base64 text")
    altchars = b"-_" if url_safe and ("-" in text or "_" in text) else b"+/"
    with reported_as(SignatureError, f"{what} is not base64", ValueError):
        data = base64.b64decode(text, altchars=altchars, validate=True)
    if base64.b64encode(data, altchars).decode() != text:
        raise SignatureError(f"{what} is not base64: stray bits or characters")
    return data


def parse_json(text: str | bytes, what: str) -> object:
    """The value of a JSON text without NaN, infinities or a name twice in one object.

    Raises:
        SignatureError: not such a text; ``what`` names it.
    """
    if len(text) > JSON_CHARACTERS_MAX:
        raise SignatureError(f"{what} is longer than {JSON_CHARACTERS_MAX} characters")
    with reported_as(SignatureError, f"{what} is not JSON", ValueError, TypeError, RecursionError):
        return json.loads(
            text.decode() if isinstance(text, bytes) else text, object_pairs_hook=_unique, parse_constant=_refuse
        )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return value


def _refuse(token: str) -> object:
    raise ValueError(f"{token} is not a JSON number")
