"""A number of things in words."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 line``, ``1,200 lines``; ``many`` is the plural where it is not ``one`` and an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
