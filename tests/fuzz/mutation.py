"""Damage to bytes, reproducible by seed: what a fuzzer feeds to a parser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

EDITS_MAX = 6
"""Edits of one input; one edit alone is the most frequent."""
INPUT_BYTES_MAX = 1 << 20
INTEGERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**63)
"""Values at which a length, an offset or a sign goes wrong."""
TOKENS = (
    *(b"", b'"', b"\\", b"\\u0000", b"\\ud800", b"{", b"}", b"[", b"]", b",", b":", b"\n", b"\r\n", b"\0", b"\xff"),
    *(b"null", b"true", b"-0", b"1e999", b"NaN", b"9007199254740992", b"18446744073709551616", b"0" * 40, b"[" * 70),
    *(b"\xc3\xa9", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\xf4\x90\x80\x80", b'"tenant_id":"acme"', b'"seq":1', b" "),
)
"""Pieces that parsers of text and of UTF-8 treat in a way of their own."""


def mutate(data: bytes, others: Sequence[bytes], random: Random) -> bytes:
    """``data`` with one to ``EDITS_MAX`` edits; pieces may come from ``others``."""
    edited = bytearray(data)
    for _ in range(min(random.randint(1, EDITS_MAX), random.randint(1, EDITS_MAX))):
        random.choice(_EDITS)(edited, others, random)
    del edited[INPUT_BYTES_MAX:]
    return bytes(edited)


def _flip_bit(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _set_byte(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    if data:
        data[random.randrange(len(data))] = random.randrange(256)


def _set_integer(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    width = random.choice((1, 2, 4, 8))
    at = random.randrange(len(data) + 1)
    value = (random.choice(INTEGERS) + random.randint(-2, 2)) % 2 ** (8 * width)
    data[at : at + width] = value.to_bytes(width, random.choice(("big", "little")))


def _cut_end(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    del data[random.randrange(len(data) + 1) :]


def _remove(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    at = random.randrange(len(data) + 1)
    del data[at : at + random.choice((1, 2, 8, 64, 1024))]


def _repeat(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    at = random.randrange(len(data) + 1)
    data[at:at] = data[at : at + random.choice((1, 8, 64, 1024))] * random.choice((1, 2, 20))


def _insert_token(data: bytearray, _: Sequence[bytes], random: Random) -> None:
    at = random.randrange(len(data) + 1)
    data[at : at + random.choice((0, 0, 1, 4))] = random.choice(TOKENS)


def _splice(data: bytearray, others: Sequence[bytes], random: Random) -> None:
    other = random.choice(others)
    start = random.randrange(len(other) + 1)
    at = random.randrange(len(data) + 1)
    data[at : at + random.choice((0, 16, 256))] = other[start : start + random.choice((1, 16, 256, 4096))]


_EDITS: Sequence[Callable[[bytearray, Sequence[bytes], Random], None]] = (
    _flip_bit,
    _set_byte,
    _set_integer,
    _cut_end,
    _remove,
    _repeat,
    _insert_token,
    _splice,
)
