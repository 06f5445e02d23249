"""Runs a pipeline command: its Spark session and log file, signal handling, reports of cluster waits, and errors of
Spark in one line.
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
from pipeline import PROGRESS, PROGRESS_VARIABLE
from pipeline.java import error_line, is_submitted
from pipeline.spark import is_local, spark_session
from terminal import stop_signals
from terminal.outcome import CommandExit, err, fail

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession


SIGNAL_BASE: Final = 128
"""A command ended by a signal exits with this plus the signal's number, as in shells."""
ASK_AGAIN_S: Final = 0.2
"""Interval between interruptions of a command that waits for a Spark job."""
ASKED_MAX: Final = 50
"""Most such interruptions; after them the command is interrupted even during the call to Java."""
ENDING_S: Final = 10.0
"""Grace period of an ending command, during which further signals are ignored."""
TOLD_AFTER_S: Final = 5.0
"""Shorter waits are not reported."""
WAIT_INTERVAL_S: Final = 0.5
FOLDER_VARIABLE: Final = "TALLY_PIPELINE_LOGS"
LOG_FILES_MAX: Final = 50
"""Most log files kept, including that of the starting run."""


class InterruptedBySignalError(CommandExit):
    """A signal asked the command to end."""


class _Interruption:
    """Handles signals to a command.

    A handler must not raise while the command waits for a Spark job: the next call to Java would wait for the job
    and read its answer as its own. So another thread cancels the jobs, which ends the wait, and a timer interrupts
    the command again.
    """

    def __init__(self) -> None:
        self.spark: SparkSession | None = None
        self._asked = 0
        self._ignored_until_s = 0.0
        self.exit_code = 0
        """Nonzero once a signal arrived."""

    def end(self) -> None:
        """Record that the command no longer waits for Spark."""
        if self._asked:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.spark = None

    def unwind(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: cancel the jobs that the command waits for, else raise InterruptedBySignalError."""
        if number != signal.SIGALRM:
            self.exit_code = SIGNAL_BASE + number
        if self.spark is not None and _is_waiting_for_a_job(frame) and self._asked < ASKED_MAX:
            self._asked += 1
            threading.Thread(target=_cancel_jobs, args=(self.spark,), daemon=True).start()
            signal.setitimer(signal.ITIMER_REAL, ASK_AGAIN_S)
            return
        if (now_s := time.monotonic()) >= self._ignored_until_s:
            self._ignored_until_s = now_s + ENDING_S
            raise InterruptedBySignalError(self.exit_code)


_interruption = _Interruption()


def unwind_on_signals() -> None:
    """Make stop signals end the command cleanly: jobs are cancelled, Spark stops, files are whole. A signal ignored at
    process start stays ignored."""
    for number in (*stop_signals.handled_signals(), signal.SIGALRM):
        signal.signal(number, _interruption.unwind)


def is_interrupted() -> bool:
    """Whether a signal asked the command to end; later failures follow from it."""
    return _interruption.exit_code != 0


@contextmanager
def running(command: str, master: str | None, settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A Spark session for ``command``. An error of Spark ends the command with one line that names the log file."""
    log = log_file(command)
    try:
        with (
            _progress_reported(),
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
            except InterruptedBySignalError:  # Also raised if the signal arrives just after a job ended.
                err.print("stopping ...")
                raise
    except Exception as error:
        # A cancelled job raises an error, as does a Java that received the signal.
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
    """Whether a call to Java is under way. A call that waits for a stream does not count, as a stream has no end."""
    modules = set()
    while frame is not None:
        modules.add(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return any(name.startswith("py4j.") for name in modules) and "pyspark.sql.streaming.query" not in modules


@contextmanager
def _while_spark_runs() -> Iterator[None]:
    """Suppress the errors of calls to a Spark that stops or has ended; the command itself reports them."""
    from py4j.protocol import Py4JError

    with suppress(Py4JError, OSError, AttributeError):  # A context that stops drops its Java objects.
        yield


def _cancel_jobs(spark: SparkSession) -> None:
    with _while_spark_runs():
        spark.sparkContext.cancelAllJobs()


JOIN_TIMEOUT_S: Final = 1.0


@contextmanager
def _watching(name: str, watch: Callable[[], None], interval_s: float) -> Iterator[threading.Event]:
    """Call ``watch`` every ``interval_s`` in its own thread until the event is set or the context ends."""
    ended = threading.Event()

    def follow() -> None:
        with _while_spark_runs():
            while not ended.wait(interval_s):
                watch()

    watching = threading.Thread(target=follow, name=name, daemon=True)
    watching.start()
    try:
        yield ended
    finally:
        ended.set()
        watching.join(JOIN_TIMEOUT_S)  # Spark may be stopped next. A hanging Java must not block.


@contextmanager
def _waits_reported(master: str | None) -> Iterator[threading.Event]:
    """Report each wait for the cluster once, until the event is set before Spark stops; reports nothing in local
    mode."""
    since_s: dict[str | None, float] = {}
    """Start of the current wait; infinity once it was reported."""

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
    # The list of executors includes the driver.
    is_waiting = (
        not is_local(context.master or "")
        and context.statusTracker().getActiveStageIds()
        and len(context._jsc.statusTracker().getExecutorInfos()) < 2
    )
    return f"{context.master} to give the application an executor" if is_waiting else None


def log_file(command: str) -> Path:
    """A new log file for this run, in the folder that the environment names, else in ``logs`` of the working folder.

    The least recently written logs of ended runs are deleted to make room.
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
REPORTED_INTERVAL_S: Final = 1.0
"""The same for another program."""


@contextmanager
def shown(spark: SparkSession, what: str, rows: Accumulator[int] | None = None) -> Iterator[None]:
    """Show the progress of jobs that run within the context; ``rows`` counts rows of finished tasks.

    Shows nothing if standard error is no terminal.
    """
    if not err.is_terminal:
        yield
        return
    # Imported here: most commands run without a terminal, and option parsing should not wait for it.
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True) as progress:
        task = progress.add_task(what, total=None, told="")

        def watch() -> None:
            done, total, told = _progress(spark)
            if rows is not None and rows.value:
                elapsed_s = progress.tasks[task].elapsed or 1
                told += f", {rows.value:,} rows, {rows.value / elapsed_s:,.0f} rows/s"
            progress.update(task, total=total or None, completed=done, told=told)

        with _watching("pipeline-progress", watch, PROGRESS_INTERVAL_S):
            yield


@contextmanager
def _progress_reported() -> Iterator[None]:
    """Write the progress to standard error for a program that set ``PROGRESS_VARIABLE``, and end with that program."""
    if PROGRESS_VARIABLE not in os.environ:
        yield
        return

    def watch() -> None:
        spark = _interruption.spark
        told = "Spark starts" if spark is None else _progress(spark)[2]
        try:
            os.write(2, f"{PROGRESS}{told}\n".encode())
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(ENDING_S)
            os.kill(os.getpid(), signal.SIGKILL)  # The command waits in a call that no signal interrupts.

    with _watching("pipeline-reporting", watch, REPORTED_INTERVAL_S):
        yield


def _progress(spark: SparkSession) -> tuple[int, int, str]:
    """Finished tasks and all tasks of the active stages, and the same in words."""
    context = spark.sparkContext
    tracker = context.statusTracker()
    stages = [info for info in map(tracker.getStageInfo, tracker.getActiveStageIds()) if info is not None]
    numbers = ", ".join(str(info.stageId + 1) for info in stages)
    done, total = sum(info.numCompletedTasks for info in stages), sum(info.numTasks for info in stages)
    return done, total, f"stage {numbers}, {done}/{total} tasks" if total else "planning"


# --- output under spark-submit --------------------------------------------------------------------


PRINTED_TIMEOUT_S: Final = 30.0
"""How long Java may take to print; the reader of its output may be slow."""
PRINTED_INTERVAL_S: Final = 0.01


def write_past_java() -> None:
    """Under ``spark-submit``, write errors directly to its standard error, and output to its standard output if that
    is a terminal."""
    if not is_submitted():
        return
    with suppress(OSError):  # No /proc, or a socket: Java continues to print everything.
        output, errors = (f"/proc/{os.getppid()}/fd/{number}" for number in (1, 2))
        if not os.path.samefile(output, errors) or _is_terminal(errors):
            _reopen(2, errors)
        if _is_terminal(output):
            _reopen(1, output)


def wait_until_printed() -> None:
    """Wait until Java has read all output written so far."""
    if not is_submitted() or not stat.S_ISFIFO(os.fstat(1).st_mode):
        return
    with suppress(OSError):
        sys.stdout.flush()
    abandoned = select.poll()
    abandoned.register(1, 0)  # poll() reports a pipe without a reader even if no event is asked for.
    deadline_s = time.monotonic() + PRINTED_TIMEOUT_S
    while time.monotonic() < deadline_s and not abandoned.poll(0):
        (unread,) = struct.unpack("i", fcntl.ioctl(1, termios.FIONREAD, b"\0\0\0\0"))
        if not unread:
            return
        time.sleep(PRINTED_INTERVAL_S)


def _is_terminal(path: str) -> bool:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK), "wb", 0) as stream:
        return stream.isatty()


def _reopen(number: int, path: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY), "wb", 0) as stream:
        os.dup2(stream.fileno(), number)
