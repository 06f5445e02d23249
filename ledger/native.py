"""The batch functions in C where they are built, and what stands in for them where they are not.

Each answers None where it leaves the work to its twin in Python, which is the specification; without a C compiler at
the time of the installation all do, always. Which it is says ``NAME``.
"""

from __future__ import annotations

import hashlib  # noqa: F401 - it loads the library that the functions in C hash with
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
"""What batches are checked, linked and encoded by."""


def _function(name: str) -> Callable[..., Any]:
    return getattr(_module, name, lambda *_args: None)


entries_in_copy: Callable[..., Any] = _function("entries_in_copy")
rows_in_copy: Callable[[bytes, bytes], list[tuple[Any, ...]] | None] = _function("rows_in_copy")
entries_in_lines: Callable[..., Any] = _function("entries_in_lines")
entries_in_columns: Callable[..., Any] = _function("entries_in_columns")
leaves_of_entries: Callable[[bytes, Sequence[tuple[Any, ...]]], list[bytes] | None] = _function("leaves_of_entries")
paired: Callable[..., list[bytes] | None] = _function("paired")
are_well_formed: Callable[..., bool | None] = _function("are_well_formed")
canonical: Callable[[object], bytes | None] = _function("canonical")
event_lines: Callable[..., Any] = _function("event_lines")
new_rows: Callable[..., Any] = _function("new_rows")
