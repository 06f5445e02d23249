"""Which files of a folder were taken, in a few bytes however many they were.

A node counts its files: an epoch begins with each of its starts, and numbers within it with 1 (docs/formats/stats.md).
So what was taken of a folder are ranges of numbers by epoch, as an offset of the stream has them::

    {"before": 6, "6": "1-30,32@20261121T134000Z"}     all before epoch 6, and of epoch 6 these, the newest opened then

An epoch is forgotten, and ``before`` raised to stand for it, once no file of it is left in the folder. A file that
turns up where one was taken, or behind ``before``, is never taken; that can be told of each, so none is passed over in
silence.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from ledger.errors import ConfigurationError

_NAME: Final = re.compile(r"(\d{8}T\d{6}Z)-(\d{8,18})-(\d{6,18})\.ndjson", re.ASCII)
_EPOCH: Final = re.compile(r"(\d+-\d+(?:,\d+-\d+)*)@(\d{8}T\d{6}Z)", re.ASCII)
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


class _Epoch:
    """Ranges of numbers, sorted and apart, and when the newest of their files was opened."""

    def __init__(self, ranges: list[tuple[int, int]], newest: str) -> None:
        self.ranges = ranges
        self.newest = newest

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self.ranges, number, key=lambda each: each[0]) - 1
        return at >= 0 and number <= self.ranges[at][1]

    def add(self, name: FileName) -> None:
        self.newest = max(self.newest, name.opened)
        at = bisect_right(self.ranges, name.number, key=lambda each: each[0])
        first = last = name.number
        if at < len(self.ranges) and self.ranges[at][0] == last + 1:
            last = self.ranges.pop(at)[1]
        if at > 0 and self.ranges[at - 1][1] == first - 1:
            at -= 1
            first = self.ranges.pop(at)[0]
        self.ranges.insert(at, (first, last))

    def numbers_beside(self, earlier: Iterable[tuple[int, int]]) -> Iterator[int]:
        """The numbers that are in none of the ``earlier`` ranges."""
        for first, last in self.ranges:
            for known_first, known_last in earlier:
                if known_last >= first and known_first <= last:
                    yield from range(first, known_first)
                    first = known_last + 1
            yield from range(first, last + 1)


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
            if key == _BEFORE and isinstance(said, int):
                self._before = said
                continue
            found = _EPOCH.fullmatch(said) if isinstance(said, str) else None
            if found is None or not key.isdecimal():
                raise ConfigurationError("the checkpoint is not of a form that is known here: write elsewhere")
            ranges = [tuple(map(int, each.split("-"))) for each in found[1].split(",")]
            self._epochs[int(key)] = _Epoch([(first, last) for first, last in ranges], found[2])

    def value(self) -> dict[str, int | str]:
        """The same as an offset has it; of equal ones the same, in the same order."""
        said: dict[str, int | str] = {_BEFORE: self._before}
        for number, epoch in sorted(self._epochs.items()):
            ranges = ",".join(f"{first}-{last}" for first, last in epoch.ranges)
            said[str(number)] = f"{ranges}@{epoch.newest}"
        return said

    def is_new(self, name: FileName) -> bool:
        """Whether the file can still be taken."""
        epoch = self._epochs.get(name.epoch)
        return name.epoch >= self._before if epoch is None else name.number not in epoch

    def is_another(self, name: FileName) -> bool:
        """Whether it cannot, and yet is none of those that were taken."""
        epoch = self._epochs.get(name.epoch)
        return not self.is_new(name) and (epoch is None or name.opened > epoch.newest)

    def add(self, name: FileName) -> None:
        """Take a file that is new."""
        assert self.is_new(name)
        self._epochs.setdefault(name.epoch, _Epoch([], name.opened)).add(name)

    def forget(self, present: Iterable[int]) -> None:
        """Let go of epochs before all that are ``present``, of which there is at least one."""
        oldest = min(present)
        for number in [number for number in self._epochs if number < oldest]:
            del self._epochs[number]
            self._before = max(self._before, number + 1)

    def since(self, earlier: Taken) -> list[tuple[int, int]]:
        """Epoch and number of each file that was taken and was not yet ``earlier``."""
        return [
            (number, file)
            for number, epoch in sorted(self._epochs.items())
            for file in epoch.numbers_beside(earlier._epochs[number].ranges if number in earlier._epochs else ())
        ]
