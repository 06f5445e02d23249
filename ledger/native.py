"""The batch functions in C if they are built, else stubs.

A function returns None if it leaves the work to its Python twin, which is the specification. The stubs, for an
installation without a C compiler, always do. ``NAME`` tells which are in use.
"""

from __future__ import annotations

import hashlib  # noqa: F401 - loads the hash library of the C functions
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Final

_module: ModuleType | None
try:
    _module = import_module("ledger._native")
except ImportError:
    _module = None

NAME: Final = "python" if _module is None else "c"
"""The implementation that checks, links and encodes batches."""


def _function(name: str) -> Callable[..., Any]:
    return getattr(_module, name, lambda *_args: None)


entries_in_copy: Callable[..., Any] = _function("entries_in_copy")
rows_in_copy: Callable[[bytes, bytes], list[tuple[Any, ...]] | None] = _function("rows_in_copy")
entries_in_lines: Callable[..., Any] = _function("entries_in_lines")
entries_in_columns: Callable[..., Any] = _function("entries_in_columns")
leaves_of_entries: Callable[[bytes, Sequence[tuple[Any, ...]]], list[bytes] | None] = _function("leaves_of_entries")
signatures_made: Callable[[bytes, bool, tuple[tuple[bytes, bytes], ...]], bytes | None] = _function("signatures_made")
paired: Callable[..., list[bytes] | None] = _function("paired")
are_well_formed: Callable[..., bool | None] = _function("are_well_formed")
canonical: Callable[[object], bytes | None] = _function("canonical")
event_lines: Callable[..., Any] = _function("event_lines")
new_rows: Callable[..., Any] = _function("new_rows")
block_leaves: Callable[..., bytes | None] = _function("block_leaves")
merged_leaves: Callable[[Sequence[bytes]], bytes | None] = _function("merged_leaves")
piece_roots: Callable[..., bytes | None] = _function("piece_roots")
