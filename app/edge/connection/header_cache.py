"""Heads that were parsed before, so that a client that sends one a thousand times has it parsed once.

The heads of a client differ in the path and in the Idempotency-Key; all other lines, the block, are those of one of
its last requests, byte for byte. What the parser made of a block is remembered, and holds for each request that came
whole and alone::

    POST <path> HTTP/1.1                   read here: a short path without anything to decode, and no query
    Idempotency-Key: <visible characters>  read here, taken out of the block: at most one, and nothing is folded into it
    <block>                                known
                                           an empty line
    <body>                                 as many bytes as the block says

    0 <= blocks <= BLOCKS_MAX, each of at most BLOCK_BYTES_MAX bytes
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

BLOCKS_MAX: Final = 4096
"""A client has one for each length of its bodies. When there are more, all are forgotten."""
BLOCK_BYTES_MAX: Final = 1024
_LINE = re.compile(rb"POST (/v1/[A-Za-z0-9._/-]{1,1024}) HTTP/1\.1(?=\r\n)")
_END = b"\r\n\r\n"
_KEY: Final = b"idempotency-key"
_KEY_FIELDS: Final = (b"\r\nIdempotency-Key: ", b"\r\nidempotency-key: ")
"""How clients spell it; whoever spells it otherwise is parsed."""
_is_visible = re.compile(rb"[!-~]+").fullmatch
_FOLDS: Final = (b"\r\n ", b"\r\n\t")

Fields = list[tuple[bytes, bytes]]
"""Headers: names in small letters, and values."""


class CachedHead(NamedTuple):
    """A request whose head needs no parser."""

    path: bytes
    key: bytes
    """Empty where there is none."""
    headers: Fields
    body: bytes
    authorization: bytes | None
    """What it says once, None where it says nothing."""


class _Split(NamedTuple):
    path: bytes
    key: bytes
    block: bytes
    body_at: int


class HeaderCache:
    """What the blocks of one listener's clients say."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Fields, int, bytes | None]] = {}

    def find(self, data: bytes) -> CachedHead | None:
        """The one request that ``data`` is, if its block is known."""
        split = _split(data)
        known = None if split is None else self._known.get(split.block)
        if split is None or known is None:
            return None
        fields, body_bytes, authorization = known
        if len(data) - split.body_at != body_bytes:
            return None
        headers = [*fields, (_KEY, split.key)] if split.key else fields.copy()
        return CachedHead(split.path, split.key, headers, data[split.body_at :], authorization)

    def remember(self, data: bytes, headers: Fields) -> None:
        """Remember the block of a plain request: the parser found one with these ``headers``, beginning with the first
        byte of ``data``. Nothing is remembered where more than that request came, or it is spelt in an unusual way."""
        split = _split(data)
        if split is None or any(fold in split.block for fold in _FOLDS):
            return
        fields = [field for field in headers if field[0] != _KEY]
        body_bytes = int(dict(fields)[b"content-length"])
        said = [value for name, value in fields if name == b"authorization"]
        if len(said) > 1:
            return
        if dict(headers).get(_KEY, b"") != split.key or len(data) - split.body_at != body_bytes:
            return
        if len(self._known) == BLOCKS_MAX:
            self._known.clear()
        self._known[split.block] = fields, body_bytes, said[0] if said else None


def _split(data: bytes) -> _Split | None:
    """The parts of what begins with a head as it is told above, whether or not it is known."""
    line = _LINE.match(data)
    if line is None:
        return None
    begin = line.end()
    end = data.find(_END, begin, begin + BLOCK_BYTES_MAX)
    if end < 0:
        return None
    for field in _KEY_FIELDS:
        at = data.find(field, begin, end)
        if at >= 0:
            key_end = data.find(b"\r\n", at + len(field))
            key = data[at + len(field) : key_end]
            if _is_visible(key) is None:
                return None
            return _Split(line[1], key, data[begin:at] + data[key_end:end], end + len(_END))
    return _Split(line[1], b"", data[begin:end], end + len(_END))
