"""A pipeline command at work: its Spark session, what a signal does to it, and how a failure of Spark is told."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

from ledger.errors import LedgerError
from pipeline.cli.options import log_file
from pipeline.cli.outcome import CommandExit, err, fail
from pipeline.failures import told
from pipeline.spark import apart, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIGNAL_BASE: Final = 128
"""A command that a signal ends exits with this and the signal's number, as shells have it."""


class InterruptedBySignalError(CommandExit):
    """A signal asked the command to end."""


def unwind_on_signals() -> None:
    """From now on SIGINT and SIGTERM end the command in order: jobs are cancelled, Spark stops, files are whole."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _unwind)


@contextmanager
def running(command: str, master: str | None, settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A Spark session for ``command``; an error of Spark becomes one line that names its log file, and an exit."""
    log = log_file(command)
    try:
        with spark_session(f"tally pipeline {command}", master=master, log_file=log, settings=settings) as spark:
            unwind_on_signals()  # Spark has put its own handler in the place of ours.
            try:
                yield spark
            except InterruptedBySignalError:
                err.print("stopping ...")
                apart(spark.sparkContext.cancelAllJobs)
                raise
    except (LedgerError, OSError):
        raise
    except Exception as error:
        message, code = told(error)
        raise fail(f"{message} (Spark's log: {log})", code) from None


def _unwind(number: int, _frame: FrameType | None) -> NoReturn:
    raise InterruptedBySignalError(SIGNAL_BASE + number)
