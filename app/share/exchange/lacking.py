"""Which entries of a chain another ledger lacks, by the logs from which it has entries already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ledger.chain.form import read_origin
from ledger.errors import InvalidInputError

HAVE_MAX = 64
"""Most logs that a request names as had; the entries of further logs are fetched a second time."""
RANGES_MAX = 16
"""Ranges fetched as bundles of their own. A bundle costs more than a few entries that come along for nothing."""

_had = re.compile("([0-9]{1,18}) ([^ ]+)").fullmatch


class Lacking:
    """Collects ranges of lacking entries."""

    def __init__(self, have: Iterable[str]) -> None:
        """``have``: texts ``seq log``; the other ledger has the entries that were first chained in this log up to seq.

        Raises:
            InvalidInputError: a text is not of that form.
        """
        self._have: dict[str, int] = {}
        for text in have:
            if (match := _had(text)) is None:
                raise InvalidInputError("have: takes `seq log`", ("have",))
            self._have[match[2]] = int(match[1])
        self._ranges: list[tuple[int, int]] = []

    def add(self, entries: Iterable[tuple[int, str | None]]) -> None:
        """The next entries in order: seq, and the stored origin."""
        for seq, origin in entries:
            if origin is not None and self._has(origin):
                continue
            if self._ranges and self._ranges[-1][1] == seq - 1:
                self._ranges[-1] = self._ranges[-1][0], seq
            else:
                self._ranges.append((seq, seq))

    def ranges(self) -> Sequence[tuple[int, int]]:
        """The lacking entries, and the shortest gaps between them if there were more than ``RANGES_MAX`` ranges."""
        found = self._ranges
        if len(found) <= RANGES_MAX:
            return found
        gaps = [after[0] - before[1] for before, after in pairwise(found)]
        widest = sorted(sorted(range(len(gaps)), key=gaps.__getitem__)[-RANGES_MAX + 1 :])
        firsts, lasts = [0, *(at + 1 for at in widest)], [*widest, len(found) - 1]
        return [(found[first][0], found[last][1]) for first, last in zip(firsts, lasts, strict=True)]

    def _has(self, origin: str) -> bool:
        try:
            log, seq, _ = read_origin(origin)
        except InvalidInputError:
            return False
        return seq <= self._have.get(log, 0)
