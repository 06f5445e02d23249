"""A process set as the service sets its own, for rows that measure a part of it by itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from app.node.serving import GC_ALLOCATIONS, SWITCH_INTERVAL_S


@contextmanager
def as_in_the_service() -> Iterator[None]:
    """The collector and the switches between threads set as ``app.node.serving.serve`` sets them."""
    switch_interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    gc.set_threshold(GC_ALLOCATIONS, 20, 50)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_interval_s)
        gc.set_threshold(*thresholds)
