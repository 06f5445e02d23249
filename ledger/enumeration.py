"""Long lists in messages: the first few, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence


def first_of(texts: Sequence[str], count_max: int, separator: str = ", ") -> str:
    """The first ``count_max`` of ``texts``, joined; of more, how many they are. Empty where there are none."""
    named = separator.join(texts[:count_max])
    if len(texts) <= count_max:
        return named
    link = separator if separator != ", " else " "
    return f"{named}{link}and {len(texts) - count_max} more"
