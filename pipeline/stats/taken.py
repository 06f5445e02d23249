"""Which files of a folder were taken, in a few bytes however many they were.

A node counts its files: an epoch begins with each of its starts, and numbers within it with 1 (docs/formats/stats.md).
So what was taken of a folder are ranges of numbers by epoch, as an offset of the stream has them::

    {"before": 6, "6": "1-30@20261121T134000Z/20261121T141000Z,32-32@20261121T141200Z/20261121T141200Z"}

all before epoch 6, and of epoch 6 these ranges, the oldest and the newest of each opened then. An epoch is forgotten,
and ``before`` raised to stand for it, once no file of it is left in the folder. A file that turns up where one was
taken, or behind ``before``, is never taken. It is known for another than the one that was taken when it was opened
before the oldest or after the newest of its range; one that was opened between them is not told apart.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from ledger.errors import ConfigurationError

FILES_AT_ONCE_MAX: Final = 1_000_000
"""Files that one batch may have; no run takes so many."""
NUMBER_MAX: Final = 10**18 - 1
"""Of epochs and files, as names have them."""
_TIME: Final = r"\d{4}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])T(?:[01]\d|2[0-3])[0-5]\d[0-5]\dZ"
_NAME: Final = re.compile(rf"({_TIME})-(\d{{8,18}})-(\d{{6,18}})\.ndjson", re.ASCII)
_RANGE: Final = re.compile(rf"(\d{{1,18}})-(\d{{1,18}})@({_TIME})/({_TIME})", re.ASCII)
_BEFORE: Final = "before"


class FileName(NamedTuple):
    """What the name of a closed file says."""

    epoch: int
    number: int
    opened: str
    """As text, in the order of time."""


def parsed(name: str) -> FileName | None:
    """The parts of ``name``, None where no node gives such a name."""
    found = _NAME.fullmatch(name)
    return None if found is None else FileName(int(found[2]), int(found[3]), found[1])


class _Range(NamedTuple):
    """Numbers from ``first`` to ``last``, and when the oldest and the newest of their files were opened."""

    first: int
    last: int
    oldest: str
    newest: str

    def may_hold(self, name: FileName) -> bool:
        """Whether ``name`` can be one of these files."""
        return self.first <= name.number <= self.last and self.oldest <= name.opened <= self.newest

    def with_next(self, other: _Range) -> _Range:
        """Both as one, of which ``other`` begins where this ends."""
        return _Range(self.first, other.last, min(self.oldest, other.oldest), max(self.newest, other.newest))


class _Epoch:
    """Ranges of numbers, sorted and apart."""

    def __init__(self, ranges: list[_Range]) -> None:
        self.ranges = ranges

    def range_of(self, number: int) -> _Range | None:
        """The one that ``number`` lies in."""
        at = bisect_right(self.ranges, number, key=lambda each: each.first) - 1
        return self.ranges[at] if at >= 0 and number <= self.ranges[at].last else None

    def add(self, name: FileName, others: Sequence[FileName]) -> None:
        """Take ``name``; ``others``, which are told of now, must be told of afterwards too."""
        grown = _Range(name.number, name.number, name.opened, name.opened)
        at = bisect_right(self.ranges, name.number, key=lambda each: each.first)
        if at < len(self.ranges) and self.ranges[at].first == grown.last + 1:
            joined = grown.with_next(self.ranges[at])
            if not any(joined.may_hold(other) for other in others):
                self.ranges.pop(at)
                grown = joined
        if at > 0 and self.ranges[at - 1].last == grown.first - 1:
            joined = self.ranges[at - 1].with_next(grown)
            if not any(joined.may_hold(other) for other in others):
                at -= 1
                self.ranges.pop(at)
                grown = joined
        self.ranges.insert(at, grown)

    def ranges_beside(self, earlier: Iterable[_Range]) -> Iterator[range]:
        """The numbers that are in none of the ``earlier`` ranges."""
        for first, last, _, _ in self.ranges:
            for known in earlier:
                if known.last >= first and known.first <= last:
                    yield range(first, known.first)
                    first = known.last + 1
            yield range(first, last + 1)


class Taken:
    """What was taken of one folder."""

    def __init__(self, value: Mapping[str, int | str] | None = None) -> None:
        """``value`` is that of an offset.

        Raises:
            ConfigurationError: it is not of the form above.
        """
        self._before = 0
        self._epochs: dict[int, _Epoch] = {}
        for key, said in (value or {}).items():
            if key == _BEFORE and type(said) is int and 0 <= said <= NUMBER_MAX + 1:
                self._before = said
            elif isinstance(said, str) and key.isascii() and key.isdecimal() and len(key) <= len(str(NUMBER_MAX)):
                self._epochs[int(key)] = _Epoch(_ranges(said))
            else:
                raise unknown_form()

    def value(self) -> dict[str, int | str]:
        """The same as an offset has it; of equal ones the same, in the same order."""
        said: dict[str, int | str] = {_BEFORE: self._before}
        for number, epoch in sorted(self._epochs.items()):
            said[str(number)] = ",".join(f"{first}-{last}@{old}/{new}" for first, last, old, new in epoch.ranges)
        return said

    def is_new(self, name: FileName) -> bool:
        """Whether the file can still be taken."""
        epoch = self._epochs.get(name.epoch)
        return name.epoch >= self._before if epoch is None else epoch.range_of(name.number) is None

    def is_another(self, name: FileName) -> bool:
        """Whether it cannot, and yet is none of those that were taken."""
        epoch = self._epochs.get(name.epoch)
        if epoch is None:
            return name.epoch < self._before
        taken = epoch.range_of(name.number)
        return taken is not None and not taken.may_hold(name)

    def add(self, name: FileName, others: Sequence[FileName] = ()) -> None:
        """Take a file that is new; ``others`` of its epoch are known to be none that were taken, and remain so."""
        assert self.is_new(name)
        self._epochs.setdefault(name.epoch, _Epoch([])).add(name, others)

    def forget(self, present: Iterable[int]) -> None:
        """Forget epochs before all that are ``present``, of which there is at least one."""
        oldest = min(present)
        for number in [number for number in self._epochs if number < oldest]:
            del self._epochs[number]
            self._before = max(self._before, number + 1)

    def since(self, earlier: Taken) -> list[tuple[int, int]]:
        """Epoch and number of each file that was taken and was not yet ``earlier``.

        Raises:
            ConfigurationError: they are more than ``FILES_AT_ONCE_MAX``.
        """
        beside = [
            (number, files)
            for number, epoch in sorted(self._epochs.items())
            for files in epoch.ranges_beside(earlier._epochs[number].ranges if number in earlier._epochs else ())
        ]
        if sum(len(files) for _, files in beside) > FILES_AT_ONCE_MAX:
            raise unknown_form()
        return [(number, file) for number, files in beside for file in files]

    def missing(self, present: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Epoch, first and last number of what is not ``present`` and was never taken, when later ones of it were.

        Numbers begin with 1 where an earlier epoch was taken, else with the least that is known: what was there
        before anybody read here is nobody's loss.
        """
        here: dict[int, list[int]] = {}
        for epoch, number in present:
            here.setdefault(epoch, []).append(number)
        has_earlier = self._before > 0
        for epoch, taken in sorted(self._epochs.items()):
            known = [(each.first, each.last) for each in taken.ranges]
            known += [(number, number) for number in here.get(epoch, ()) if number < taken.ranges[-1].last]
            known.sort()
            expected = 1 if has_earlier else known[0][0]
            for first, last in known:
                if first > expected:
                    yield epoch, expected, first - 1
                expected = max(expected, last + 1)
            has_earlier = True


def _ranges(text: str) -> list[_Range]:
    ranges = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise unknown_form()
        ranges.append(_Range(int(found[1]), int(found[2]), found[3], found[4]))
    is_sorted = all(one.last < other.first for one, other in pairwise(ranges))
    if not is_sorted or any(each.first > each.last or each.oldest > each.newest for each in ranges):
        raise unknown_form()
    return ranges


def unknown_form() -> ConfigurationError:
    """What is said of a checkpoint that no run here has left."""
    return ConfigurationError("the checkpoint is not of a form that is known here: write elsewhere")
