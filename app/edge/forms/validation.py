"""JSON from callers, one value or one a line, checked strictly; errors name the field.

No object may name a member twice: two readers could read two different values out of it. Parsers silently keep one of
the two, so ``check_unique`` detects dropped members. Outside of strings each member has one colon, and strings keep
their colons when a value is written again. So, unless a colon was written as an escape, the text has as many colons as
the parsed value written again, and more of them when a member was dropped. Only if the numbers differ, or an escape may
hide the difference, is the text parsed a second time.

Lines end with LF or CRLF; empty lines are allowed at the end only. They are checked together, with the outcome that
each has alone::

    1 <= lines <= lines_max        len(line) <= bytes_max
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from app.edge.problems import DETAIL_CHARACTERS_MAX, cut, dotted
from app.runtime.settings.words import nearest, words_of
from ledger import canonical
from ledger.errors import ClockSkewError, InvalidEventError, InvalidInputError, ProblemError
from ledger.facts.problems import PAYLOAD_TOO_LARGE
from ledger.text import first_of

ERRORS_LISTED_MAX: Final = 1000
"""With more faults than this in one body none is listed: listing them would delay other requests."""
LISTED_MAX: Final = 16
"""Fields that are listed if none is similar; the rest is counted."""
_BACKSLASH = ord("\\")


def parse(adapter: TypeAdapter[Any], body: bytes, tags: frozenset[str] = frozenset()) -> Any:
    """The value of the JSON text ``body``; ``tags`` are path parts that chose a model, not written by the caller.

    Raises:
        InvalidInputError: not JSON, not of the adapter's form, or a member twice; ``path`` names the field.
    """
    try:
        value = adapter.validate_json(body)
    except ValidationError as error:
        raise invalid(error, tags, adapter) from None
    check_unique(body, value)
    return value


def invalid(
    error: ValidationError, tags: frozenset[str] = frozenset(), form: TypeAdapter[Any] | None = None
) -> InvalidInputError:
    """The first fault in ``error``, as our own error; ``tags`` are parts of its path that no caller wrote, ``form`` is
    the violated form."""
    if error.error_count() > ERRORS_LISTED_MAX:
        return InvalidInputError(f"{error.error_count()} fields are wrong or unknown")
    items = error.errors(include_url=False, include_input=False)
    first = items[0]
    # A tag is chosen before any field is checked.
    path, message = (
        _wrong_tag(first, error.errors(include_url=False)[0]["input"])
        if first["type"].startswith("union_tag_")
        else first_error(items, form)
    )
    # A tag comes first, or after the field of its value.
    return _wrong(tuple(part for at, part in enumerate(path) if at > 1 or part not in tags), message)


def _wrong_tag(item: Mapping[str, Any], given: object) -> tuple[tuple[str | int, ...], str]:
    name = item["ctx"]["discriminator"].strip("'") if "ctx" in item else "type"
    if item["type"] == "union_tag_not_found":
        # The field may be there, misspelt.
        written = [key for key in given if isinstance(key, str)] if isinstance(given, dict) else []
        if (meant := nearest(name, written)) is not None:
            return (*item["loc"], meant), f"there is no such field; the nearest is {name}, which is required"
        return (*item["loc"], name), "is required"
    return (*item["loc"], name), words_of(item)


def _wrong(path: tuple[str | int, ...], message: str) -> InvalidInputError:
    message = cut(message, DETAIL_CHARACTERS_MAX)
    return InvalidInputError(f"{dotted(path)}: {message}" if path else message, path)


def invalid_parameter(error: RequestValidationError) -> InvalidInputError:
    """The first fault that the framework found in the query, the path or a header."""
    item = error.errors()[0]
    return _wrong(tuple(item["loc"][1:]), words_of(item))


def first_error(items: Sequence[Mapping[str, Any]], form: TypeAdapter[Any] | None) -> tuple[tuple[str | int, ...], str]:
    """Path and text of the first fault in ``items``, errors of pydantic. An unknown field comes before a missing one
    beside it, of which it may be a misspelling. ``form`` is the violated form, None if unknown."""
    first = items[0]
    parent = tuple(first["loc"][:-1])
    beside = [item for item in items if tuple(item["loc"][:-1]) == parent]
    missing = [str(item["loc"][-1]) for item in beside if item["type"] == "missing"]
    unknown = [str(item["loc"][-1]) for item in beside if item["type"] == "extra_forbidden"]
    if first["type"] not in ("missing", "extra_forbidden") or not unknown:
        return tuple(first["loc"]), words_of(first)
    name = next((name for name in unknown if nearest(name, missing)), unknown[0])
    return (*parent, name), _unknown(name, missing, [] if form is None else fields_at(_schema_of(form), parent))


def _unknown(name: str, missing: Sequence[str], known: Sequence[str]) -> str:
    if (near := nearest(name, missing) or nearest(name, known)) is not None:
        required = ", which is required" if near in missing else ""
        return f"there is no such field; the nearest is {near}{required}"
    return "there is no such field" + (f"; there are {first_of(known, LISTED_MAX)}" if known else "")


def fields_at(schema: Mapping[str, Any], path: Sequence[str | int]) -> list[str]:
    """The fields that an object may have at ``path`` of a JSON schema. ``path`` is pydantic's: the tag of a form chosen
    among several is a part."""
    node = schema
    for part in path:
        node = _step(_resolved(node, schema), part)
    return list(_resolved(node, schema).get("properties", ()))


def _step(node: Mapping[str, Any], part: str | int) -> Mapping[str, Any]:
    if part in (forms := node.get("discriminator", {}).get("mapping", {})):
        return {"$ref": forms[part]}
    member = node.get("properties", {}).get(part) or node.get("additionalProperties")
    found = node.get("items") if isinstance(part, int) else member
    return found if isinstance(found, dict) else {}


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(node.get("$ref", "")).rpartition("/")[2]
    return schema["$defs"][name] if name else node


@cache
def _schema_of(form: TypeAdapter[Any]) -> Mapping[str, Any]:
    return form.json_schema()


def is_unique(text: bytes, value: object) -> bool:
    """Whether no object in ``text`` has two members of one name; also false if the cheap check cannot decide.

    ``text`` may be several JSON texts, and ``value`` the list of their values: no text has fewer colons than its value,
    so equal sums mean equal counts in each.
    """
    return text.count(b":") == _colons(value) and not (_BACKSLASH in text and b"\\u003" in text)


def check_unique(text: bytes, value: object) -> None:
    """Return if no object in the JSON ``text`` has two members of one name.

    ``value`` is the parsed value of the whole text.

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
    except TypeError:  # Not a value that can be written; its user finds the fault.
        return -1


class _Members(tuple[tuple[str, object], ...]):
    """The members of one object, as written."""


def _repeated(value: object, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Paths of members whose name is already used in the same object."""
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


_BRACKETS_SAFE = 60
"""A line with fewer brackets cannot be nested too deep."""
_FLAT = bytes.maketrans(b"123456789E", b"000000000e")
_SUSPECTS = (b"0" * 16, b"0e000", rb"\u0000", b"NaN", b"Infinity")
"""A text that holds a value without canonical form contains one of these, once its digits are replaced by 0 (nesting
aside)."""


class LineModel:
    """The form of a line of a request."""

    def __init__(
        self, what: str, adapter: TypeAdapter[Any], lines_max: int, tags: frozenset[str] = frozenset()
    ) -> None:
        """``what`` names the content of a line; ``tags`` are as in ``invalid``."""
        self._what = what
        self._form = adapter
        self._validate = adapter.validator.validate_json
        self._lines_max = lines_max
        self._tags = tags

    def split(self, body: bytes) -> list[bytes]:
        """The lines of ``body``, unchecked.

        Raises:
            InvalidEventError: there is none.
            ProblemError: too many.
        """
        lines = body.split(b"\n", self._lines_max + 1)
        while lines and not lines[-1].strip(b" \t\r"):
            lines.pop()
        if not lines:
            raise InvalidEventError(f"there is no {self._what} in the request", 1)
        if len(lines) > self._lines_max:
            raise ProblemError(PAYLOAD_TOO_LARGE, f"at most {self._lines_max} {self._what}s go into one request")
        return lines

    def check(self, lines: Sequence[bytes], numbers: Sequence[int | None], bytes_max: int) -> list[Any]:
        """The values of ``lines``, which have these numbers; None for a line that is the whole body.

        Lines are checked together, and one by one only if that finds a fault, which is rare.

        Raises:
            InvalidInputError: a line is invalid; names the first one by its number.
        """
        values = self._values_of(lines, numbers, bytes_max)
        text = b"\n".join(lines)
        if is_unique(text, values) and not _is_suspect(text) and max(map(_brackets, lines)) <= _BRACKETS_SAFE:
            return values
        for line, number, value in zip(lines, numbers, values, strict=True):
            with at_line(number):
                check_unique(line, value)
                if _is_suspect(line) or _brackets(line) > _BRACKETS_SAFE:
                    canonical.encode(value)
        return values

    def _values_of(self, lines: Sequence[bytes], numbers: Sequence[int | None], bytes_max: int) -> list[Any]:
        """The values of ``lines``, of the right form; their text is still to be checked."""
        if max(map(len, lines)) <= bytes_max:
            with suppress(ValidationError):
                return list(map(self._validate, lines))
        return [self._value_of(line, number, bytes_max) for line, number in zip(lines, numbers, strict=True)]

    def _value_of(self, line: bytes, number: int | None, bytes_max: int) -> Any:
        with at_line(number):
            if len(line) > bytes_max:
                raise InvalidInputError(f"{len(line)} bytes are too many; {self._what}s may have {bytes_max} each")
            try:
                return self._validate(line)
            except ValidationError as error:
                raise invalid(error, self._tags, self._form) from None


@contextmanager
def at_line(number: int | None) -> Iterator[None]:
    """Add the number of the line, if it has one, to errors raised inside."""
    try:
        yield
    except InvalidInputError as error:
        if number is None:
            raise
        path = dotted(error.path)
        place = f"{path}: " if not str(error).startswith(path) else ""
        raise InvalidEventError(f"line {number}: {place}{error}", number, error.path) from None
    except ClockSkewError as error:
        raise ClockSkewError(str(error) if number is None else f"line {number}: {error}") from None


def _is_suspect(text: bytes) -> bool:
    """Whether ``text`` may hold a value without canonical form, nesting aside; false nearly always, at little cost."""
    flat = text.translate(_FLAT, b"+")
    return any(suspect in flat for suspect in _SUSPECTS)


def _brackets(line: bytes) -> int:
    return line.count(b"{") + line.count(b"[")
