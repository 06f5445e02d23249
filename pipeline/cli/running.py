"""A pipeline command at work: its Spark session and its log file, what a signal does to it, what it waits for in a
cluster, and how a failure of Spark is told.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import signal
import stat
import struct
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from ledger.errors import LedgerError
from pipeline.java import error_line, is_submitted
from pipeline.spark import is_local, spark_session
from terminal import stop_signals
from terminal.outcome import CommandExit, err, fail

if TYPE_CHECKING:
    from pyspark import Accumulator, SparkContext
    from pyspark.sql import SparkSession


SIGNAL_BASE: Final = 128
"""A command that a signal ends exits with this and the signal's number, as shells have it."""
ASK_AGAIN_S: Final = 0.2
"""How soon a command is interrupted again that was waiting for a job of Spark."""
ASKED_MAX: Final = 50
"""After so many times it is torn away from a job that does not end."""
ENDING_S: Final = 10.0
"""For so long a command that is ending is let end: somebody who asks again gets what was asked for already."""
TOLD_AFTER_S: Final = 5.0
"""Shorter waits are not worth a line."""
WAIT_INTERVAL_S: Final = 0.5
FOLDER_VARIABLE: Final = "TALLY_PIPELINE_LOGS"
LOG_FILES_MAX: Final = 50
"""How many there are at most, that of the run which begins included."""


class InterruptedBySignalError(CommandExit):
    """A signal asked the command to end."""


class _Interruption:
    """What a signal does to a command.

    A command that waits for a job of Spark must not be torn away from it: the next call would wait for the job to end,
    and take its answer for its own. So its jobs are cancelled from another thread, which ends the wait, and it is
    interrupted again.
    """

    def __init__(self) -> None:
        self.spark: SparkSession | None = None
        self._asked = 0
        self._ending_since_s: float | None = None
        self.exit_code = 0
        """Other than 0 once a signal came."""

    def install(self) -> None:
        """From now on the signals that ask to stop end the command; one that it was started to ignore it ignores."""
        for number in stop_signals.handled_signals():
            signal.signal(number, self._unwind)
        signal.signal(signal.SIGALRM, self._unwind)

    def end(self) -> None:
        """The command waits for Spark no more."""
        if self._asked:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.spark = None

    def _unwind(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGALRM:
            self.exit_code = SIGNAL_BASE + number
        if self.spark is not None and _is_waiting_for_a_job(frame) and self._asked < ASKED_MAX:
            self._asked += 1
            threading.Thread(target=_cancel_jobs, args=(self.spark,), daemon=True).start()
            signal.setitimer(signal.ITIMER_REAL, ASK_AGAIN_S)
            return
        now_s = time.monotonic()
        if self._ending_since_s is not None and now_s - self._ending_since_s < ENDING_S:
            return
        self._ending_since_s = now_s
        raise InterruptedBySignalError(self.exit_code)


_interruption = _Interruption()


def unwind_on_signals() -> None:
    """From now on the signals that stop a process end the command in order: jobs are cancelled, Spark stops, files are
    whole."""
    _interruption.install()


def is_interrupted() -> bool:
    """Whether a signal asked the command to end, so that what fails from then on fails for that."""
    return _interruption.exit_code != 0


@contextmanager
def running(command: str, master: str | None, settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A Spark session for ``command``; an error of Spark becomes one line that names its log file, and an exit."""
    log = log_file(command)
    try:
        with (
            _waits_reported(master) as is_ending,
            spark_session(f"tally pipeline {command}", master=master, log_file=log, settings=settings) as spark,
        ):
            _interruption.spark = spark
            try:
                try:
                    yield spark
                finally:
                    is_ending.set()
                    _interruption.end()
            except InterruptedBySignalError:  # Also one that came as a cancelled job had just ended.
                err.print("stopping ...")
                raise
    except Exception as error:
        # A job that was cancelled ends in an error, and a Java that was sent the signal too.
        if _interruption.exit_code:
            err.print("stopping ...")
            raise InterruptedBySignalError(_interruption.exit_code) from None
        if isinstance(error, (LedgerError, OSError)):
            raise
        with log.open("a") as file:
            traceback.print_exception(error, file=file)
        message, code = error_line(error)
        raise fail(f"{message} (Spark's log: {log})", code) from None


def _is_waiting_for_a_job(frame: FrameType | None) -> bool:
    """Whether a call to Java is under way, other than one that waits for a stream, which has no end to wait for."""
    modules = set()
    while frame is not None:
        modules.add(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return any(name.startswith("py4j.") for name in modules) and "pyspark.sql.streaming.query" not in modules


def _cancel_jobs(spark: SparkSession) -> None:
    from py4j.protocol import Py4JError

    with suppress(Py4JError, OSError):  # Spark is stopping already, or has ended.
        spark.sparkContext.cancelAllJobs()


JOIN_TIMEOUT_S: Final = 1.0


@contextmanager
def _watching(name: str, watch: Callable[[], None], interval_s: float) -> Iterator[threading.Event]:
    """Call ``watch`` every so often, in a thread of its own, until the event is set or the context is left."""
    from py4j.protocol import Py4JError

    ended = threading.Event()

    def follow() -> None:
        with suppress(Py4JError, OSError):  # Java is gone; the command itself will say so.
            while not ended.wait(interval_s):
                watch()

    watching = threading.Thread(target=follow, name=name, daemon=True)
    watching.start()
    try:
        yield ended
    finally:
        ended.set()
        watching.join(JOIN_TIMEOUT_S)  # Spark may be stopped next; but a Java that hangs is not waited for.


@contextmanager
def _waits_reported(master: str | None) -> Iterator[threading.Event]:
    """Report each wait once, until the event is set, as Spark is about to stop; none where the work is done on this
    machine."""
    since_s: dict[str | None, float] = {}
    """When the wait under way began; a wait that was reported began never."""

    def watch() -> None:
        what, now_s = _waits_for(_interruption.spark, master), time.monotonic()
        if what not in since_s:
            since_s.clear()
        if what is not None and now_s - since_s.setdefault(what, now_s) >= TOLD_AFTER_S:
            err.print(f"waiting for {what} ...", markup=False)
            since_s[what] = math.inf

    if is_submitted() or (master is not None and not is_local(master)):
        with _watching("pipeline-waiting", watch, WAIT_INTERVAL_S) as ended:
            yield ended
    else:
        yield threading.Event()


def _waits_for(spark: SparkSession | None, master: str | None) -> str | None:
    if spark is None:
        return "Spark to start" if master is None else f"Spark to start on {master}"
    context = spark.sparkContext
    # The driver is among the executors that are listed.
    is_waiting = (
        not is_local(context.master or "")
        and context.statusTracker().getActiveStageIds()
        and len(context._jsc.statusTracker().getExecutorInfos()) < 2
    )
    return f"{context.master} to give the application an executor" if is_waiting else None


def log_file(command: str) -> Path:
    """A new file for this run, in the folder the environment names, else the working folder's ``logs``.

    The oldest make room for it: those that were written to least recently, by runs that have ended.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE) or "logs").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    old = sorted(folder.glob("pipeline-*.log"), key=_written_ns)
    ended = [file for file in old if not _is_running(file)]
    for file in ended[: max(0, len(old) - LOG_FILES_MAX + 1)]:
        file.unlink(missing_ok=True)
    return folder / f"pipeline-{command}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.log"


def _is_running(file: Path) -> bool:
    """Whether a process has the id that the run of ``file`` had."""
    try:
        os.kill(int(file.stem.rpartition("-")[2]), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _written_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


# --- progress on a terminal -----------------------------------------------------------------------


PROGRESS_INTERVAL_S: Final = 0.25


@contextmanager
def shown(spark: SparkSession, what: str, rows: Accumulator[int] | None = None) -> Iterator[None]:
    """Show how far the jobs are that run meanwhile; ``rows`` counts the rows that tasks which ended have passed.

    Nothing is shown where standard error is no terminal.
    """
    if not err.is_terminal:
        yield
        return
    # Imported here: most commands end without a terminal, and options should not wait for it.
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True) as progress:
        task = progress.add_task(what, total=None, told="")

        def watch() -> None:
            done, total, stages = _tasks(spark.sparkContext)
            told = f"stage {stages}, {done}/{total} tasks" if total else "planning"
            if rows is not None and rows.value:
                elapsed_s = progress.tasks[task].elapsed or 1
                told += f", {rows.value:,} rows, {rows.value / elapsed_s:,.0f} rows/s"
            progress.update(task, total=total or None, completed=done, told=told)

        with _watching("pipeline-progress", watch, PROGRESS_INTERVAL_S):
            yield


def _tasks(context: SparkContext) -> tuple[int, int, str]:
    """Tasks done and in all of the stages at work, and the numbers of those stages."""
    tracker = context.statusTracker()
    stages = [info for info in map(tracker.getStageInfo, tracker.getActiveStageIds()) if info is not None]
    numbers = ", ".join(str(info.stageId + 1) for info in stages)
    return sum(info.numCompletedTasks for info in stages), sum(info.numTasks for info in stages), numbers


# --- output under spark-submit --------------------------------------------------------------------


PRINTED_TIMEOUT_S: Final = 30.0
"""How long Java may take to print: whoever reads its output may be slow."""
PRINTED_INTERVAL_S: Final = 0.01


def write_past_java() -> None:
    """From now on errors go where those of ``spark-submit`` go, if it runs this process; to a terminal, output too."""
    if not is_submitted():
        return
    with suppress(OSError):  # No /proc, or a socket: Java goes on printing all.
        output, errors = (f"/proc/{os.getppid()}/fd/{number}" for number in (1, 2))
        if not os.path.samefile(output, errors) or _is_terminal(errors):
            _reopen(2, errors)
        if _is_terminal(output):
            _reopen(1, output)


def wait_until_printed() -> None:
    """Wait until nothing that was written is left for Java to read."""
    if not is_submitted() or not stat.S_ISFIFO(os.fstat(1).st_mode):
        return
    with suppress(OSError):
        sys.stdout.flush()
    abandoned = select.poll()
    abandoned.register(1, 0)  # What is told of a pipe unasked: that nobody reads it any more.
    deadline_s = time.monotonic() + PRINTED_TIMEOUT_S
    while time.monotonic() < deadline_s and not abandoned.poll(0):
        (unread,) = struct.unpack("i", fcntl.ioctl(1, termios.FIONREAD, b"\0\0\0\0"))
        if not unread:
            return
        time.sleep(PRINTED_INTERVAL_S)


def _is_terminal(path: str) -> bool:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        return os.isatty(descriptor)
    finally:
        os.close(descriptor)


def _reopen(number: int, path: str) -> None:
    stream = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
    os.dup2(stream, number)
    os.close(stream)
