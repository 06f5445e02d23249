"""Hybrid logical clock: timestamps that follow wall time and never go back (Kulkarni et al. 2014).

Forms::

    text   {physical_ms}:{logical}:{node_id}     1704585600000:0:scheduler-prod-01
    bytes  physical_ms u64 | logical u32 | first 4 bytes of SHA-256(node_id)     big-endian, 16 in all

Invariants::

    every tick > every earlier tick of this clock, > everything received and everything observed
    0 <= physical_ms <= PHYSICAL_MS_MAX        0 <= logical <= LOGICAL_MAX

Order is numeric, numeric, bytewise: the order of the tuple, never the order of the text.
"""

from __future__ import annotations

import hashlib
import re
import struct
from functools import lru_cache, partial
from itertools import repeat
from typing import NamedTuple

from ledger.errors import ClockSkewError, InvalidInputError
from ledger.names import NODE_ID

PHYSICAL_MS_MAX = 2**63 - 1
"""Largest physical part: what a PostgreSQL ``bigint`` holds."""

LOGICAL_MAX = 2**32 - 1
"""Largest logical part: what the 16-byte form holds."""

PACKED_BYTES = 16
NODE_HASH_BYTES = 4

_PACKED = struct.Struct(f">QI{NODE_HASH_BYTES}s")
TEXT = f"(0|[1-9][0-9]{{0,18}}):(0|[1-9][0-9]{{0,9}}):({NODE_ID})"
"""The text form as a regular expression: physical time in ms, logical counter, node."""
_TEXT = re.compile(TEXT)

assert _PACKED.size == PACKED_BYTES


class Hlc(NamedTuple):
    """One timestamp. Node ids are ASCII, so the order of the tuple is the order of HLCs."""

    physical_ms: int
    logical: int
    node_id: str

    def text(self) -> str:
        """``{physical_ms}:{logical}:{node_id}``; it does not sort as the timestamp does."""
        return f"{self.physical_ms}:{self.logical}:{self.node_id}"

    def __str__(self) -> str:
        return self.text()

    @classmethod
    def parse(cls, text: str) -> Hlc:
        """Parse the text form; it has one spelling, without leading signs, zeros or spaces.

        Raises:
            InvalidInputError: ``text`` is not an HLC, or a part is out of its range.
        """
        if (match := _TEXT.fullmatch(text)) is None:
            raise InvalidInputError(f"{text[:100]!r} is not an HLC; write physical_ms:logical:node_id")
        hlc = cls(int(match[1]), int(match[2]), match[3])
        if hlc.physical_ms > PHYSICAL_MS_MAX or hlc.logical > LOGICAL_MAX:
            raise InvalidInputError(f"HLC {text} is out of range; at most {PHYSICAL_MS_MAX}:{LOGICAL_MAX}")
        return hlc

    def pack(self) -> bytes:
        """The 16-byte form; packed forms of one node sort as its HLCs do. Parts must be in range."""
        return _PACKED.pack(self.physical_ms, self.logical, node_hash(self.node_id))


_hlc_of = partial(tuple.__new__, Hlc)
"""Makes an ``Hlc`` of a tuple of its three parts: a third cheaper than calling ``Hlc``."""


@lru_cache(maxsize=1024)
def node_hash(node_id: str) -> bytes:
    """First 4 bytes of SHA-256(node_id), which identify the node in the 16-byte form."""
    return hashlib.sha256(node_id.encode()).digest()[:NODE_HASH_BYTES]


def unpack16(data: bytes) -> tuple[int, int, bytes]:
    """``(physical_ms, logical, node_hash)`` of a 16-byte form; the node's name is not in it.

    Raises:
        InvalidInputError: ``data`` is not 16 bytes, or its physical part is out of range.
    """
    if len(data) != PACKED_BYTES:
        raise InvalidInputError(f"a packed HLC has {PACKED_BYTES} bytes, not {len(data)}")
    physical_ms, logical, hashed = _PACKED.unpack(data)
    if physical_ms > PHYSICAL_MS_MAX:
        raise InvalidInputError(f"physical part {physical_ms} of a packed HLC is over {PHYSICAL_MS_MAX}")
    return physical_ms, logical, hashed


class Clock:
    """The clock of one node. Not safe for threads: one thread owns it.

    Wall time is passed in, in milliseconds; it may jump or stand still. ``ticks`` and
    ``skew_rejections`` count what their names say.
    """

    __slots__ = ("_logical", "_physical_ms", "max_clock_skew_ms", "node_id", "skew_rejections", "ticks")

    def __init__(self, node_id: str, max_clock_skew_ms: int, last: Hlc | None = None) -> None:
        self.node_id = node_id
        self.max_clock_skew_ms = max_clock_skew_ms
        self.ticks = 0
        self.skew_rejections = 0
        self._physical_ms = 0
        self._logical = 0
        if last is not None:
            self.observe(last)

    @property
    def last(self) -> Hlc:
        """The floor: the next tick is greater than it, whatever the wall clock says."""
        return Hlc(self._physical_ms, self._logical, self.node_id)

    def tick(self, wall_ms: int) -> Hlc:
        """A timestamp greater than all before it; to be issued only with a WAL record."""
        if wall_ms > self._physical_ms:
            self._physical_ms = wall_ms
            self._logical = 0
        elif self._logical < LOGICAL_MAX:
            self._logical += 1
        else:
            self._physical_ms += 1
            self._logical = 0
        self.ticks += 1
        return Hlc(self._physical_ms, self._logical, self.node_id)

    def draw(self, wall_ms: int, count: int) -> list[Hlc]:
        """``count`` timestamps, as successive calls of ``tick`` give them."""
        if count < 1 or self._logical + count > LOGICAL_MAX:
            return [self.tick(wall_ms) for _ in range(count)]
        physical_ms, logical, node_id = self.tick(wall_ms)
        self.ticks += count - 1
        self._logical = logical + count - 1
        return list(map(_hlc_of, zip(repeat(physical_ms), range(logical, logical + count), repeat(node_id))))

    def receive(self, remote: Hlc, wall_ms: int) -> None:
        """Advance past a timestamp of another node: later ticks are greater than it.

        Receiving is not recorded, so it issues no timestamp. A remote that is not ahead of this clock
        changes nothing and is never refused, even while the wall clock is too low.

        Raises:
            ClockSkewError: ``remote`` is more than ``max_clock_skew_ms`` ahead of the wall clock; the
                clock is as it was, and ``skew_rejections`` has counted it.
        """
        if (remote.physical_ms, remote.logical) <= (self._physical_ms, self._logical):
            return
        ahead_ms = remote.physical_ms - wall_ms
        if ahead_ms > self.max_clock_skew_ms:
            self.skew_rejections += 1
            raise ClockSkewError(
                f"HLC {remote} is {ahead_ms} ms ahead of this node's wall clock, more than the "
                f"{self.max_clock_skew_ms} ms allowed by hlc.max_clock_skew; check the clocks of both nodes"
            )
        self.observe(remote)

    def observe(self, hlc: Hlc) -> None:
        """Raise the floor to ``hlc`` without a skew check: at start, for timestamps that this node issued."""
        if (hlc.physical_ms, hlc.logical) > (self._physical_ms, self._logical):
            self._physical_ms = hlc.physical_ms
            self._logical = hlc.logical

    def offset_ms(self, wall_ms: int) -> int:
        """How far this clock is ahead of the wall clock; 0 when it is not."""
        return max(0, self._physical_ms - wall_ms)
