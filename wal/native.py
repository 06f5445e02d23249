"""Batches of the WAL in C where that is built; where it is not, each is left to Python, as ``ledger.native`` says."""

from __future__ import annotations

import zlib  # noqa: F401 - it loads the library that the function in C sums with
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

_module: ModuleType | None
try:
    _module = import_module("wal._native")
except ImportError:
    _module = None

commit_records: Callable[..., tuple[float, bool] | None] = getattr(_module, "commit_records", lambda *_args: None)
