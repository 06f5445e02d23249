"""Indexes of jobs with short blocks, so that a short log has runs of every level."""

from __future__ import annotations

from types import ModuleType
from typing import Final

import pytest

from ledger import job_index
from ledger.job_index import builder

BLOCK_ENTRIES: Final = 2


def short_blocks(patched: pytest.MonkeyPatch, *users: ModuleType, entries: int = BLOCK_ENTRIES) -> None:
    """Have blocks of so many entries, in these modules too."""
    for module in (job_index, builder, *users):
        patched.setattr(module, "BLOCK_ENTRIES", entries)
    patched.setattr(builder, "_GROUP_ENTRIES", job_index.RUNS_MERGED * entries)
