"""Times as they are selected. PostgreSQL holds years from 4713 BC to 294276, Python those from 1 to 9999: a column that
somebody changed must not fail whatever else is read beside it."""

from __future__ import annotations

from collections.abc import Iterable

_FIRST, _LAST = "timestamptz '0001-01-02 00:00:00Z'", "timestamptz '9999-12-30 00:00:00Z'"


def told(column: str) -> str:
    """SQL of ``column``, under its own name; NULL where Python cannot tell the time."""
    return f"CASE WHEN {column} BETWEEN {_FIRST} AND {_LAST} THEN {column} END AS {column.rpartition('.')[2]}"


def columns(names: Iterable[str], times: Iterable[str]) -> str:
    """SQL that selects ``names``, those of them that are ``times`` as ``told`` has it."""
    return ", ".join(told(name) if name in times else name for name in names)


def clamped_columns(names: Iterable[str], times: Iterable[str]) -> str:
    """As ``columns``, but a time that Python cannot tell becomes the first or last one that it can: for rows whose
    times are proved by signatures, which then do not hold."""
    return ", ".join(
        f"greatest(least({name}, {_LAST}), {_FIRST}) AS {name}" if name in times else name for name in names
    )
