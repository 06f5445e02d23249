"""Cursors of lists: where the next page begins. Opaque to clients; inside, unpadded base64url of a JSON array::

    [list, scope, ...position]        ["jobs", "acme/", 1704931200000, 1, "node-7f3a"]

``scope`` binds a cursor to the list it came from: tenant, filter. One from elsewhere is refused, and so is one that was
not written here: another spelling of the same array, or a position that no list has.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import orjson

from ledger.errors import InvalidInputError
from ledger.hlc import Hlc

_INTEGER_MAX = 2**63 - 1
_PATH = ("cursor",)


def encode(name: str, scope: str, *position: int | str) -> str:
    """The cursor of list ``name`` within ``scope`` that stands at ``position``."""
    return _text([name, scope, *position])


def decode_hlc(name: str, scope: str, cursor: str | None) -> tuple[int, int, str] | None:
    """The HLC parts at which ``cursor`` stands; None when there is no cursor.

    Raises:
        InvalidInputError: it is not a cursor of this list.
    """
    if cursor is None:
        return None
    match _decode(name, scope, cursor):
        case [int(physical_ms), int(logical), str(node_id)]:
            try:
                at = Hlc.parse(f"{physical_ms}:{logical}:{node_id}")
            except InvalidInputError:
                raise _foreign() from None
            return at.physical_ms, at.logical, at.node_id
        case _:
            raise _foreign()


def decode_number(name: str, scope: str, cursor: str | None) -> int | None:
    """The number at which ``cursor`` stands; None when there is no cursor.

    Raises:
        InvalidInputError: it is not a cursor of this list.
    """
    if cursor is None:
        return None
    match _decode(name, scope, cursor):
        case [int(number)] if not isinstance(number, bool) and 1 <= number <= _INTEGER_MAX:
            return number
        case _:
            raise _foreign()


def decode_text(name: str, scope: str, cursor: str | None) -> str | None:
    """The text at which ``cursor`` stands; None when there is no cursor.

    Raises:
        InvalidInputError: it is not a cursor of this list.
    """
    if cursor is None:
        return None
    match _decode(name, scope, cursor):
        case [str(text)] if "\0" not in text:  # which PostgreSQL cannot hold
            return text
        case _:
            raise _foreign()


def _text(value: list[Any]) -> str:
    return base64.urlsafe_b64encode(orjson.dumps(value)).rstrip(b"=").decode()


def _decode(name: str, scope: str, cursor: str) -> list[object]:
    try:
        value = orjson.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        raise _foreign() from None
    if not isinstance(value, list) or value[:2] != [name, scope] or _text(value) != cursor:
        raise _foreign()
    return value[2:]


def _foreign() -> InvalidInputError:
    return InvalidInputError("cursor: not a next_cursor of this very list; start without one", _PATH)
