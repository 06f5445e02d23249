"""Requests of several lines, one JSON object a line: split, and checked together with the outcome that each has alone.

Lines end with LF or CRLF; empty lines are allowed at the end only.

    1 <= lines <= lines_max        len(line) <= bytes_max
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError

from app.edge.forms.validation import check_unique, invalid, is_unique
from app.edge.problems import dotted
from ledger import canonical
from ledger.errors import ClockSkewError, InvalidEventError, InvalidInputError, ProblemError
from ledger.facts.problems import PAYLOAD_TOO_LARGE

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
