"""Text that a terminal shows and does not obey: what comes from data, files or others may hold anything."""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tab and newline, what turns the direction of text, and halves of surrogate pairs."""


def printable(text: str) -> str:
    """``text`` in which what moves, colours or reorders what is shown is written as ``\\x1b`` or ``\\u202e``."""
    return _CONTROL.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
