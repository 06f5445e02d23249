"""Ranges of LSNs, first and last: joined, and taken from each other, however many LSNs they span."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

LsnRange = tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]
"""First and last LSN; the last is below the first when nobody knows how much there was."""


def merged(ranges: Iterable[LsnRange]) -> list[LsnRange]:
    """The same LSNs in as few ranges as can be, in order."""
    result: list[LsnRange] = []
    for first, last in sorted(ranges):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(last, result[-1][1]))
        else:
            result.append((first, last))
    return result


def without(ranges: Iterable[LsnRange], others: Iterable[LsnRange]) -> list[LsnRange]:
    """The LSNs of ``ranges`` that are in none of ``others``, in order."""
    left: list[LsnRange] = []
    taken = [each for each in merged(others) if each[0] <= each[1]]
    for first, last in merged(each for each in ranges if each[0] <= each[1]):
        for taken_first, taken_last in taken:
            if taken_last < first or last < taken_first:
                continue
            if first < taken_first:
                left.append((first, taken_first - 1))
            first = taken_last + 1
        if first <= last:
            left.append((first, last))
    return left
