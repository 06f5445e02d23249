"""No object of a request may name a member twice: two readers could read two different values out of it.

Parsers keep one of the two and say nothing, so this looks for what they dropped. Outside of strings each member has
one colon, and strings keep their colons when a value is written again. So, unless a colon was written as an escape,
the text has as many colons as the parsed value written again, and more of them when a member was dropped. Only if the
numbers differ, or an escape may hide the difference, is the text parsed a second time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import orjson

from ledger.errors import InvalidInputError

_BACKSLASH = ord("\\")


def is_unique(text: bytes, value: object) -> bool:
    """Whether no object in ``text`` has two members of one name; also false when that cannot be told at little cost.

    ``text`` may be several JSON texts, and ``value`` the list of what was parsed out of each: none has fewer colons
    than its value has, so as many in all are as many in each.
    """
    return text.count(b":") == _colons(value) and not (_BACKSLASH in text and b"\\u003" in text)


def check_unique(text: bytes, value: object) -> None:
    """Return if no object in the JSON ``text`` has two members of one name.

    ``value`` is what was parsed out of the text: all of it, and nothing else.

    Raises:
        InvalidInputError: one has; ``path`` is the member's.
    """
    if is_unique(text, value):
        return
    for path in _repeated(json.loads(text, object_pairs_hook=_Members), ()):
        raise InvalidInputError("there are two members of this name", path)


def _colons(value: object) -> int:
    try:
        return orjson.dumps(value).count(b":")
    except TypeError:  # Not a value that can be written; what is wrong with it is found where it is used.
        return -1


class _Members(tuple[tuple[str, object], ...]):
    """The members of one object, as written."""


def _repeated(value: object, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Paths of members whose name came before in the same object."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _repeated(item, (*path, index))
    elif isinstance(value, _Members):
        names: set[str] = set()
        for name, member in value:
            if name in names:
                yield (*path, name)
            names.add(name)
            yield from _repeated(member, (*path, name))
