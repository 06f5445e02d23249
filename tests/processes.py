"""What tests ask of processes that are not their children."""

from __future__ import annotations

import psutil


def runs(pid: int) -> bool:
    """False for a zombie too: whoever adopts an orphan takes its time to reap it."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
