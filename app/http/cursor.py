"""Cursors of lists: where the next page begins. Opaque to clients; inside, unpadded base64url of a JSON array::

    [list, scope, ...position]        ["jobs", "acme/", 1704931200000, 1, "node-7f3a"]

``scope`` binds a cursor to the list it came from: tenant, filter. One from elsewhere is refused.
"""

from __future__ import annotations

import base64
import binascii

import orjson

from ledger.errors import InvalidInputError

_INTEGER_MAX = 2**63 - 1
_PATH = ("cursor",)


def encode(name: str, scope: str, *position: int | str) -> str:
    """The cursor of list ``name`` within ``scope`` that stands at ``position``."""
    return base64.urlsafe_b64encode(orjson.dumps([name, scope, *position])).rstrip(b"=").decode()


def decode_hlc(name: str, scope: str, cursor: str | None) -> tuple[int, int, str] | None:
    """The HLC parts at which ``cursor`` stands; None when there is no cursor.

    Raises:
        InvalidInputError: it is not a cursor of this list.
    """
    if cursor is None:
        return None
    match _decode(name, scope, cursor):
        case [int(physical_ms), int(logical), str(node_id)]:
            return _bounded(physical_ms), _bounded(logical), node_id
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
        case [int(number)]:
            return _bounded(number)
        case _:
            raise _foreign()


def _decode(name: str, scope: str, cursor: str) -> list[object]:
    try:
        value = orjson.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        raise _foreign() from None
    if not isinstance(value, list) or value[:2] != [name, scope]:
        raise _foreign()
    return value[2:]


def _bounded(number: int) -> int:
    if isinstance(number, bool) or not 0 <= number <= _INTEGER_MAX:
        raise _foreign()
    return number


def _foreign() -> InvalidInputError:
    return InvalidInputError("cursor: not a next_cursor of this very list; start without one", _PATH)
