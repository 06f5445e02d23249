"""Search for jobs by the stored content of their entries; no search finds sealed values.

A field is named by a path, ``spec.labels.team``, and has texts. The text of a string is itself, that of a number, a
boolean or null its canonical JSON; an array has the texts of its elements. Objects have none. ``spec.image:a/b:1``
searches for one text.

    ELEMENTS_MAX elements of an array are read        1 <= len(path) <= PATH_PARTS_MAX

Names of members may contain dots: in ``spec.labels.app.kubernetes.io/name`` any of the dots may separate names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from typing import Any, Final, NamedTuple

from ledger import canonical, names
from ledger.errors import CanonicalError, InvalidInputError, refuse
from ledger.machines.jobs import JobState, conflicts, dcs_of, name_of, outcome
from ledger.private_fields import PATH_CHARACTERS_MAX, PATH_PARTS_MAX, PRIVATE_MARK, Path

ELEMENTS_MAX: Final = 64
"""Most elements of an array that are read."""
VALUE_CHARACTERS_MAX: Final = 1024
"""Longest text that can be searched for."""
CONDITIONS_MAX: Final = 8
"""Most conditions on fields in one search."""
SEARCHED: Final = "spec."
"""Prefix of every searchable field."""

DC: Final = "dc"
"""The field for the data centres of a job in an index."""
TRACE: Final = "trace"
"""The field for the id of the trace in which a job was created."""
FIELDS_MAX: Final = 16
"""Most fields by which the jobs of one tenant are indexed."""

_SPAN: Final = re.compile(names.SPAN)
_ESCAPED: Final = re.compile(r'["\\\x00-\x1f]')


class Sort(StrEnum):
    """The member of a listed job by which a list goes."""

    CREATED_AT = "created_at"
    ENDED_AT = "ended_at"
    RUN_MS = "run_ms"


class Direction(StrEnum):
    """Whether the highest is first."""

    DESC = "desc"
    ASC = "asc"


class FieldIs(NamedTuple):
    """One condition: the field has this text."""

    field: str
    text: str

    @property
    def path(self) -> Path:
        """The parts of the field's name."""
        return (*self.field.split("."),)


class JobFilter(NamedTuple):
    """The conditions of a search; a job must meet all of them. Without conditions every job is found."""

    statuses: tuple[str, ...] = ()
    actor: str | None = None
    """The creator's full name."""
    dc: str | None = None
    """A data centre that the job is assigned to, or that has accepted it."""
    fields: tuple[FieldIs, ...] = ()
    error: str | None = None
    """Part of the job's error; ASCII letters match in either case."""
    id_part: str | None = None
    """Part of the job's id or of its name; ASCII letters match in either case."""
    in_conflict: bool = False
    """Whether there is a conflict about the job."""
    name: str | None = None
    """The job's whole name."""

    @property
    def looks_inside(self) -> bool:
        """Whether the job's entries must be read."""
        texts = (self.dc, self.error, self.id_part, self.name)
        return self.in_conflict or bool(self.fields) or any(text is not None for text in texts)

    def fragments(self) -> list[str]:
        """Texts in lower case (ASCII). Every job that is found has each of them in its id or in some entry, in any JSON
        escaping: jobs without them need not be folded."""
        # A name may be words of a command.
        texts = (self.dc, self.error, *(self.id_part or "").split(" "), *(self.name or "").split(" "))
        wanted = (*(each.text for each in self.fields), *(text for text in texts if text))
        return [_lower(max(_ESCAPED.split(text), key=len)) for text in wanted]

    def terms(self, fields: Collection[str]) -> list[int]:
        """The terms of these fields that every job has that is found."""
        wanted = [*self.fields, *([] if self.dc is None else [FieldIs(DC, self.dc)])]
        return [term_of(*each) for each in wanted if each.field in fields]

    def finds(self, state: JobState) -> bool:
        """Whether a job of matching status and creator is found."""
        if self.in_conflict and not conflicts(state):
            return False
        if self.id_part is not None:
            part = _lower(self.id_part)
            if part not in _lower(state.job_id) and part not in _lower(name_of(state) or ""):
                return False
        if self.name is not None and self.name != name_of(state):
            return False
        if self.dc is not None and self.dc not in dcs_of(state):
            return False
        if self.error is not None:
            error = outcome(state).get("error")
            if not isinstance(error, str) or _lower(self.error) not in _lower(error):
                return False
        return all(each.text in texts_of(state, each.path) for each in self.fields)


def field_is(text: str) -> FieldIs:
    """The condition in a text such as ``spec.image:a/b:1``: a field, and the text after the first colon.

    Raises:
        InvalidInputError: the text is no condition.
    """
    field, colon, value = text.partition(":")
    if not colon:
        raise InvalidInputError(f"{text[:100]!r} has no colon; write FIELD:VALUE, such as spec.image:a/b:1")
    check_field(field)
    if len(value) > VALUE_CHARACTERS_MAX:
        raise InvalidInputError(f"the value of {field} has {len(value)} characters; at most {VALUE_CHARACTERS_MAX} do")
    return FieldIs(field, value)


def check_field(field: str) -> None:
    """Return if jobs can be searched by ``field``.

    Raises:
        InvalidInputError: they cannot.
    """
    if field == TRACE:
        return
    parts = field.split(".")
    refuse(
        InvalidInputError,
        (
            not field.startswith(SEARCHED) or not all(parts),
            f"{field[:100]!r} is no field that jobs are searched by: those are members of spec, such as spec.image, "
            f"and {TRACE}",
        ),
        (
            len(field) > PATH_CHARACTERS_MAX or len(parts) > PATH_PARTS_MAX,
            f"{field[:100]!r} is too long: at most {PATH_PARTS_MAX} names and {PATH_CHARACTERS_MAX} characters",
        ),
    )


def check_indexed(field: str) -> None:
    """Return if jobs can be indexed by ``field``: a searchable field, or ``dc``.

    Raises:
        InvalidInputError: they cannot.
    """
    if field != DC:
        check_field(field)


def term_of(field: str, text: str) -> int:
    """The index term for one text of a field: 64 bits of a hash, as a signed integer."""
    return int.from_bytes(hashlib.sha256(f"{field}\0{text}".encode()).digest()[:8], "big", signed=True)


def terms_of(state: JobState, fields: Iterable[str]) -> frozenset[int]:
    """The job's index terms for these fields; none for a job without a creation, which no list has."""
    if state.created is None:
        return frozenset()
    texts = {field: dcs_of(state) if field == DC else texts_of(state, (*field.split("."),)) for field in fields}
    return frozenset(term_of(field, text) for field, of_field in texts.items() for text in of_field)


def texts_of(state: JobState, path: Path) -> frozenset[str]:
    """The texts of a job's field; none for a job without a creation."""
    if state.created is None:
        return frozenset()
    if path == (TRACE,):
        span = state.created.traceparent
        return frozenset([span.split("-")[1]]) if span.__class__ is str and _SPAN.fullmatch(span) else frozenset()
    found = (_text_of(value) for value in _values_at({"spec": state.created.spec}, path))
    return frozenset(text for text in found if text is not None)


def _values_at(value: Any, path: Path) -> Iterator[Any]:
    if not path:
        yield from value[:ELEMENTS_MAX] if isinstance(value, list) else (value,)
    elif isinstance(value, dict) and PRIVATE_MARK not in value:
        for count in range(1, len(path) + 1):
            if (name := ".".join(path[:count])) in value:
                yield from _values_at(value[name], path[count:])


def _text_of(value: Any) -> str | None:
    """The text of one value, None if it has none or is too long to be searched for."""
    if isinstance(value, str):
        return value if len(value) <= VALUE_CHARACTERS_MAX else None
    if isinstance(value, dict | list):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    try:
        return canonical.encode(value).decode()
    except CanonicalError:
        return None


def _lower(text: str) -> str:
    """``text`` with only ASCII letters in lower case, as PostgreSQL does in collation C."""
    return text.encode().lower().decode()
