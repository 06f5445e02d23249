"""Canonical JSON: the one sequence of bytes of a JSON value (RFC 8785). These bytes are hashed and stored.

Form: no white space; keys sorted by their UTF-16 code units (RFC 8785 3.2.3); numbers as ECMAScript prints
them (3.2.2.3); strings with the shortest escapes, all else as UTF-8 (3.2.2.2). Example::

    {"b": 1.0, "a": "\\u20ac"}   ->   {"a":"€","b":1}

Beyond the RFC, the ledger refuses U+0000 in any string, which PostgreSQL cannot hold, and more than ``NESTING_MAX``
nested arrays and objects.

    abs(integer) <= INTEGER_MAX = 2^53 - 1      nesting <= NESTING_MAX = 64

Three encoders give the same bytes. The C function encodes values that hold only integers and ASCII strings without
escapes. orjson encodes values on which it provably agrees with the RFC: only built-in types, floats that both print
alike, no character beyond U+FFFF (there the orders of UTF-8 and UTF-16 differ). The ``rfc8785`` library, fifteen times
slower than orjson, encodes all other values.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import orjson
import rfc8785

from ledger import native
from ledger.errors import CanonicalError

INTEGER_MAX = 2**53 - 1
"""Largest magnitude of an integer: beyond it binary64 skips integers (RFC 7493 2.2)."""

NESTING_MAX = 64
"""Depth of nested arrays and objects, the outermost included."""

_ORJSON_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_STRICT_INTEGER
_LEAF_TYPES = frozenset({str, int, bool, type(None)})
_BACKSLASH = 0x5C
_NUL_ESCAPE = b"\\u0000"
_BEYOND_BMP = re.compile(rb"[\xf0-\xf4]")
_SURROGATE = re.compile("[\ud800-\udfff]")

_PRINTED_ALIKE_MIN = 1e-5
"""Fractions from here on are printed without exponent, and alike, by orjson and by ECMAScript."""


def encode(value: object) -> bytes:
    """The canonical bytes of ``value``, made of dict, list, tuple, str, int, float, bool and None.

    Raises:
        CanonicalError: ``value`` has no canonical form here; ``path`` is the place in it. No other error is raised
            for a value that a JSON parser can return.
    """
    plain = native.canonical(value)
    return _encode(value) if plain is None else plain


def read(text: str) -> Any:
    """The value of a JSON text in any spelling. An integer beyond ``INTEGER_MAX`` is read as the float whose canonical
    JSON it is.

    Raises:
        CanonicalError: ``text`` is not JSON, or one of its objects has a name twice.
    """
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise CanonicalError(f"it is not JSON: {error}") from error


def read_exact(text: str) -> Any:
    """The value of a text in canonical form.

    Raises:
        CanonicalError: ``text`` is not the canonical form of a value.
    """
    try:
        value = orjson.loads(text)
        if encode(value) == text.encode():
            return value
    except (ValueError, CanonicalError):
        # orjson reads a float that is printed without a fraction as an integer, which may be too large.
        pass
    value = read(text)
    if encode(value) != text.encode():
        raise CanonicalError("it is not in canonical form")
    return value


def _without_doubles(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) != len(members):
        raise CanonicalError("a name stands twice in one object")
    return found


def _read_integer(digits: str) -> int | float:
    number = float(digits)
    return int(digits) if abs(number) <= INTEGER_MAX else number


def _refuse_constant(name: str) -> NoReturn:
    raise CanonicalError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_doubles, parse_int=_read_integer, parse_constant=_refuse_constant
)


def _encode(value: object) -> bytes:
    if _is_orjson_exact(value, NESTING_MAX):
        try:
            data = orjson.dumps(value, option=_ORJSON_OPTIONS)
        except TypeError:
            return _encode_by_library(value)
        has_nul = _BACKSLASH in data and _NUL_ESCAPE in data
        if not has_nul and (data.isascii() or _BEYOND_BMP.search(data) is None):
            return data
    return _encode_by_library(value)


def _is_orjson_exact(value: object, room: int) -> bool:
    """Whether orjson's bytes for ``value`` are canonical, apart from its strings and integers."""
    kind = type(value)
    if kind is dict:
        items: Any = value.values()  # type: ignore[attr-defined]
    elif kind is list:
        items = value
    else:
        return kind is float and _is_printed_alike(value)  # type: ignore[arg-type]
    if not room:
        return False
    for item in items:
        if type(item) in _LEAF_TYPES:
            continue
        if not _is_orjson_exact(item, room - 1):
            return False
    return True


def _is_printed_alike(number: float) -> bool:
    return _PRINTED_ALIKE_MIN <= abs(number) < math.inf and not number.is_integer()


def _encode_by_library(value: object) -> bytes:
    _refuse_what_has_no_form(value, ())
    return rfc8785.dumps(value)  # type: ignore[arg-type]


def _refuse_what_has_no_form(value: object, path: tuple[str | int, ...]) -> None:
    match value:
        case int() if abs(value) > INTEGER_MAX:
            raise CanonicalError("an integer is beyond 2^53 - 1; send it as a string", path)
        case float() if not math.isfinite(value):
            raise CanonicalError("NaN and infinity have no JSON form", path)
        case None | int() | float():
            pass
        case str():
            _refuse_text(value, path)
        case dict() | list() | tuple():
            if len(path) == NESTING_MAX:
                raise CanonicalError(f"arrays and objects are nested more than {NESTING_MAX} deep", path)
            _refuse_items(value, path)
        case _:
            raise CanonicalError(f"a value of type {type(value).__name__} has no JSON form", path)


def _refuse_items(value: dict[Any, Any] | list[Any] | tuple[Any, ...], path: tuple[str | int, ...]) -> None:
    if not isinstance(value, dict):
        for index, item in enumerate(value):
            _refuse_what_has_no_form(item, (*path, index))
        return
    for key, item in value.items():
        if not isinstance(key, str):
            raise CanonicalError(f"an object key is of type {type(key).__name__}, not a string", path)
        _refuse_text(key, path)
        _refuse_what_has_no_form(item, (*path, key))


def _refuse_text(text: str, path: tuple[str | int, ...]) -> None:
    if "\0" in text:
        raise CanonicalError("a string holds U+0000, which PostgreSQL cannot store", path)
    if _SURROGATE.search(text) is not None:
        raise CanonicalError("a string holds half of a surrogate pair", path)
