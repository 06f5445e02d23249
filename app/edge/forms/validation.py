"""JSON that callers send, one value or one a line, checked strictly; and what is wrong with it, in words that name the
field.

No object may name a member twice: two readers could read two different values out of it. Parsers keep one of the two
and say nothing, so ``check_unique`` finds what they dropped. Outside of strings each member has one colon, and strings
keep their colons when a value is written again. So, unless a colon was written as an escape, the text has as many
colons as the parsed value written again, and more of them when a member was dropped. Only if the numbers differ, or an
escape may hide the difference, is the text parsed a second time.

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
"""With more faults than this in one body none is picked out: listing them would hold up everybody else."""
LISTED_MAX: Final = 16
"""Fields that are listed where none is near; of more it is said how many."""
_BACKSLASH = ord("\\")


def parse(adapter: TypeAdapter[Any], body: bytes, tags: frozenset[str] = frozenset()) -> Any:
    """The value of the JSON text ``body``; ``tags`` are path parts that chose a model and no caller wrote.

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
    """The first thing ``error`` found, as our own; ``tags`` are parts of its path that no caller wrote, ``form`` is
    what was not met."""
    if error.error_count() > ERRORS_LISTED_MAX:
        return InvalidInputError(f"{error.error_count()} fields are wrong or unknown")
    items = error.errors(include_url=False, include_input=False)
    first = items[0]
    if first["type"].startswith("union_tag_"):
        # A tag is chosen before any field is looked at.
        path, message = _wrong_tag(first, error.errors(include_url=False)[0]["input"])
    else:
        path, message = first_error(items, form)
    # A tag stands first, or behind the field whose value it is of.
    return _wrong(tuple(part for at, part in enumerate(path) if at > 1 or part not in tags), message)


def _wrong_tag(item: Mapping[str, Any], given: object) -> tuple[tuple[str | int, ...], str]:
    name = item["ctx"]["discriminator"].strip("'") if "ctx" in item else "type"
    if item["type"] == "union_tag_not_found":
        meant = nearest_field(given, name)
        if meant is not None:
            return (*item["loc"], meant), f"there is no such field; the nearest is {name}, which is required"
        return (*item["loc"], name), "is required"
    return (*item["loc"], name), words_of(item)


def _wrong(path: tuple[str | int, ...], message: str) -> InvalidInputError:
    message = cut(message, DETAIL_CHARACTERS_MAX)
    return InvalidInputError(f"{dotted(path)}: {message}" if path else message, path)


def invalid_parameter(error: RequestValidationError) -> InvalidInputError:
    """The first thing that the framework found wrong with the query, the path or a header."""
    item = error.errors()[0]
    return _wrong(tuple(item["loc"][1:]), words_of(item))


def first_error(items: Sequence[Mapping[str, Any]], form: TypeAdapter[Any] | None) -> tuple[tuple[str | int, ...], str]:
    """Where the first thing is that ``items``, errors of pydantic, found wrong, and what. An unknown field comes before
    a missing one beside it, which it may stand for. ``form`` is what was not met, None where it is not known."""
    first = items[0]
    parent = tuple(first["loc"][:-1])
    if first["type"] not in ("missing", "extra_forbidden"):
        return tuple(first["loc"]), words_of(first)
    beside = [item for item in items if tuple(item["loc"][:-1]) == parent]
    missing = [str(item["loc"][-1]) for item in beside if item["type"] == "missing"]
    unknown = [str(item["loc"][-1]) for item in beside if item["type"] == "extra_forbidden"]
    if not unknown:
        return tuple(first["loc"]), words_of(first)
    name = next((name for name in unknown if nearest(name, missing)), unknown[0])
    known = [] if form is None else fields_at(_schema_of(form), parent)
    return (*parent, name), _unknown(name, missing, known)


def nearest_field(given: object, name: str) -> str | None:
    """The member of ``given`` that may stand for the one called ``name``, which it lacks."""
    return nearest(name, [key for key in given if isinstance(key, str)]) if isinstance(given, dict) else None


def _unknown(name: str, missing: Sequence[str], known: Sequence[str]) -> str:
    near = nearest(name, missing) or nearest(name, known)
    if near is not None:
        required = ", which is required" if near in missing else ""
        return f"there is no such field; the nearest is {near}{required}"
    if not known:
        return "there is no such field"
    return f"there is no such field; there are {first_of(known, LISTED_MAX)}"


def fields_at(schema: Mapping[str, Any], path: Sequence[str | int]) -> list[str]:
    """The fields that an object may have at a place of a JSON schema. ``path`` is as pydantic has it: where a form is
    chosen among several, its tag is a part."""
    node = schema
    for part in path:
        node = _step(_resolved(node, schema), part)
    return list(_resolved(node, schema).get("properties", ()))


def _step(node: Mapping[str, Any], part: str | int) -> Mapping[str, Any]:
    forms = node.get("discriminator", {}).get("mapping", {})
    if part in forms:
        return {"$ref": forms[part]}
    if isinstance(part, int):
        found = node.get("items")
    else:
        found = node.get("properties", {}).get(part) or node.get("additionalProperties")
    return found if isinstance(found, dict) else {}


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(node.get("$ref", "")).rpartition("/")[2]
    return schema["$defs"][name] if name else node


@cache
def _schema_of(form: TypeAdapter[Any]) -> Mapping[str, Any]:
    return form.json_schema()


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


_BRACKETS_SAFE = 60
"""A line with fewer cannot be nested too deep."""
_FLAT = bytes.maketrans(b"123456789E", b"000000000e")
_SUSPECTS = (b"0" * 16, b"0e000", rb"\u0000", b"NaN", b"Infinity")
"""What a text contains, its digits made 0, if it holds a value without canonical form (nesting aside)."""


class LineModel:
    """What a line of a request may be."""

    def __init__(
        self, what: str, adapter: TypeAdapter[Any], lines_max: int, tags: frozenset[str] = frozenset()
    ) -> None:
        """``what`` names what is in a line; ``tags`` are as in ``invalid``."""
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
        """What stands in ``lines``, which have these numbers; None for one that is the whole body.

        They are looked at together, which finds nothing nearly always; only if it does, one by one.

        Raises:
            InvalidInputError: a line is wrong; the first that is, with its number.
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
        """What stands in ``lines``, of the right form; their text is still to be checked."""
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
    """Whatever is found wrong within is said with the number of its line, if it has one."""
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
