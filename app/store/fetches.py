"""How many rows of a cursor are fetched at once: as many as ``FETCH_BYTES`` hold, if they are as long as those before.

    1 <= rows <= rows_max

PostgreSQL counts rows, not bytes, and a row may be as long as ``wal.record_bytes_max``. Where long rows follow short
ones, one fetch is larger: of as many rows as fitted before.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getsizeof
from typing import Any, Final

FETCH_BYTES: Final = 16 << 20
"""What the rows of one fetch may take in memory."""
FIRST_ROWS: Final = 16
"""Rows of the first fetch, before anything is known of them."""


def rows_after(rows: Sequence[Sequence[Any]], text_column: int, rows_max: int) -> int:
    """How many rows to fetch after ``rows``, the last that came; all columns but ``text_column`` are short."""
    size = sum(getsizeof(row[text_column]) for row in rows)
    return max(1, min(rows_max, FETCH_BYTES * len(rows) // size))
