"""Orders of lists of jobs.

A list goes by the creation, the end or the run time of its jobs, in either direction. Jobs of one end or run time go by
creation, so no two have one position::

    created_at     (created_physical, created_logical, created_node)
    ended_at       (ended_ms, created_physical, created_logical, created_node)     jobs that ended
    run_ms         (run_ms,   created_physical, created_logical, created_node)     jobs that ended and ran

A page is a range of positions. The next one begins where it ended, so a job that keeps its position is in one of them.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from ledger.hlc import Hlc
from ledger.machines.job_search import Direction, Sort
from ledger.verification.projection_check import StoredJob

CreatedHlc = tuple[int, int, str]
"""HLC parts of a job's creation."""
Position = tuple[Any, ...]
"""The values of the columns by which a list goes."""

MS_MAX: Final = 2**63 - 1
EVER: Final[CreatedHlc] = (MS_MAX, MS_MAX, "~")
"""Above every HLC: node ids are made of a-z, 0-9 and -."""
OLDEST: Final[CreatedHlc] = (-1, -1, "")


_FIRST: Final = {Sort.CREATED_AT: (), Sort.ENDED_AT: ("ended_ms",), Sort.RUN_MS: ("run_ms",)}


class Order(NamedTuple):
    """An order of a list; by default the newest job is the first."""

    sort: Sort = Sort.CREATED_AT
    direction: Direction = Direction.DESC

    @property
    def is_by_creation(self) -> bool:
        """Whether the list goes by creation alone."""
        return self.sort is Sort.CREATED_AT

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the job table by which the list goes."""
        return (*_FIRST[self.sort], "created_physical", "created_logical", "created_node")

    def within(self, number: int, row: str = "") -> str:
        """The condition in SQL that a row is in a range, whose bounds are parameters from ``number`` on."""
        names, count = [f"{row}{column}" for column in self.columns], len(self.columns)
        below, begin = (
            ", ".join(f"${each}" for each in range(first, first + count)) for first in (number, number + count)
        )
        columns, known = ", ".join(names), "".join(f" AND {row}{column} IS NOT NULL" for column in _FIRST[self.sort])
        return f"({columns}) < ({below}) AND ({columns}) >= ({begin}){known}"

    def position(self, row: StoredJob) -> Position:
        """The position of a listed job."""
        return tuple(getattr(row, column) for column in self.columns)

    def position_of(self, *parts: Any) -> Position:
        """The position with these values.

        Raises:
            ValueError, InvalidInputError: there is none.
        """
        *first, physical, logical, node = parts
        is_time = all(each.__class__ is int and 0 <= each < MS_MAX for each in first)
        if len(parts) != len(self.columns) or not is_time:
            raise ValueError
        return (*first, *Hlc.parse(f"{physical}:{logical}:{node}"))


class ListRange(NamedTuple):
    """The jobs of a list after a position, of those created at ``since`` or later and before ``until``."""

    order: Order = Order()
    since: CreatedHlc | None = None
    until: CreatedHlc | None = None
    after: Position | None = None

    @property
    def created(self) -> tuple[Any, ...]:
        """The bounds of creations: the first that is too late, and the first that is not too early."""
        return *(EVER if self.until is None else self.until), *(OLDEST if self.since is None else self.since)

    @property
    def is_within_creations(self) -> bool:
        """Whether creations are bounded in a list that does not go by them."""
        return not self.order.is_by_creation and (self.since or self.until) is not None

    @property
    def bounds(self) -> tuple[Any, ...]:
        """The parameters of ``Order.within``."""
        count = len(self.order.columns)
        bounds = self.created if self.order.is_by_creation else (MS_MAX, *EVER, -1, *OLDEST)
        below, begin = bounds[:count], bounds[count:]
        if self.after is not None and self.order.direction is Direction.DESC:
            below = min(below, self.after)
        elif self.after is not None:
            # PostgreSQL has no text between these two.
            begin = max(begin, (*self.after[:-1], f"{self.after[-1]}\x01"))
        return *below, *begin


def by(columns: tuple[str, ...], direction: Direction, *, is_reversed: bool = False) -> str:
    """An order in SQL, or its reverse."""
    word = "DESC" if (direction is Direction.DESC) != is_reversed else "ASC"
    return ", ".join(f"{column} {word}" for column in columns)
