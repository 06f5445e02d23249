"""Text for people: long lists cut short, and text that a terminal shows and does not obey."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tab and newline, what turns the direction of text, and halves of surrogate pairs."""


def printable(text: str) -> str:
    """``text`` with characters that move, colour or reorder what is shown written as ``\\x1b`` or ``\\u202e``."""
    return _CONTROL.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def first_of(texts: Sequence[str], count_max: int, separator: str = ", ") -> str:
    """The first ``count_max`` of ``texts``, joined; of more, how many they are. Empty where there are none."""
    named = separator.join(texts[:count_max])
    if len(texts) <= count_max:
        return named
    link = separator if separator != ", " else " "
    return f"{named}{link}and {len(texts) - count_max} more"
