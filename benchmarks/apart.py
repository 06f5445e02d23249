"""Work in a process of its own: the client beside the service, a verification whose memory is measured."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

from benchmarks.row import BenchmarkError

Given = ParamSpec("Given")
Value = TypeVar("Value")


def apart(work: Callable[Given, Value], *given: Given.args, **named: Given.kwargs) -> Value:
    """``work`` in a fresh process, with nothing in its memory that others left there.

    Raises:
        BenchmarkError: the process died.
        Exception: whatever ``work`` raised.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(work, *given, **named).result()
        except BrokenProcessPool as error:
            raise BenchmarkError(f"the process of {work.__module__}.{work.__qualname__} died") from error
