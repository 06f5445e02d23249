"""The Spark session of a pipeline command: silent on the terminal, logged to a file, always stopped at the end.

By default Spark runs in this process tree, ``local[*]``. ``--master`` names any cluster, to which the project's
packages are sent; ``spark-submit`` brings its own settings. Third-party packages MUST be on the workers: a virtual
environment under the driver's path, or one that ``PYSPARK_PYTHON`` names. Output of Spark and Java goes to the log
file, their files on the driver to a folder of the command.

That folder is removed at the command's end, or by a later run if the command was killed. A run locks its folder
(flock) for its lifetime, and then creates a marker file in it. So a folder with a marker and a free lock belongs to
a killed run. A folder without a marker is never removed.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import shutil
import socket
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import TimeoutError as NotInTimeError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ledger.errors import ConfigurationError
from pipeline.java import class_archive_options, find_java_home, is_submitted, java, quoted, run_in_thread

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

SHUFFLE_PARTITIONS_A_CORE: Final = 2
SHUFFLE_PARTITIONS_MIN: Final = 16
"""On a cluster, whose workers may still be joining; adaptive execution merges small partitions."""
ARROW_BATCH_ROWS: Final = 10_000
STOP_TIMEOUT_S: Final = 20.0
"""How long Spark may take to stop before its Java is killed."""

TASK_DAEMON: Final = "pipeline.task_daemon"
"""The module from which local Python workers are forked; only on Linux is it known to have one thread."""

_SHUFFLE_PARTITIONS: Final = "spark.sql.shuffle.partitions"

_OF_ALL_PLANS: Final = ("functions", "org.apache.spark.sql.functions", "PythonUtils")
"""Java names that every plan uses."""
_JAVA_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=192m -XX:+UseSerialGC -XX:-UsePerfData"
"""Rows are read and checked in Python, so Java should start fast and use few cores. A small code cache would make it
evict and recompile code. It writes no files for monitoring tools."""

_LOG4J: Final = """\
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {log_file}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd'T'HH:mm:ss.SSSXXX}} %p %c{{1}}: %m%n%ex
"""
PACKAGES: Final = ("ledger", "objects", "signing", "pipeline")
"""Packages that tasks import."""


@contextmanager
def spark_session(
    name: str,
    *,
    master: str | None,
    log_file: Path,
    settings: Mapping[str, str] | None = None,
    java_options: str | None = None,
) -> Iterator[SparkSession]:
    """A session for one command, stopped at its end; ``settings`` of Spark override ours.

    An existing session of this process is used unchanged and not stopped.

    ``master`` None means ``LOCAL_MASTER``, or the master of ``spark-submit``; ``java_options`` None means the
    options to start from Java's archive of classes.

    Raises:
        ConfigurationError: ``master`` is malformed or unreachable, Spark cannot use TMPDIR, or there is no Java.
    """
    temporary = Path(tempfile.gettempdir())
    if "," in str(temporary):
        raise ConfigurationError(
            f"TMPDIR={temporary}: Spark takes a comma for the end of a folder's name; name another"
        )
    if master is not None:
        refuse_unless_master(master)
        refuse_unless_there(master)
    if (active := _active()) is not None:
        yield active
        return
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with own_folder(temporary, "tally-run-") as folder:
        log4j = folder / "log4j2.properties"
        log4j.write_text(_LOG4J.format(log_file=log_file))
        given = settings or {}
        if not is_submitted():
            master = master or LOCAL_MASTER
            os.environ["JAVA_HOME"] = str(find_java_home(folder))
            given = {"spark.driver.extraJavaOptions": _java_options(log4j, folder, java_options), **given}
        # The Python of tasks is this one, unless a cluster has another.
        os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        if (master is not None and is_local(master)) or not os.environ.get("PYSPARK_PYTHON"):
            os.environ["PYSPARK_PYTHON"] = sys.executable
        with java({} if master is None else {**_settings(name, master, folder), **given}, log_file):
            # If a signal handler raises here, the start still completes, or ends with its Java.
            spark = run_in_thread(lambda: _start(name, master, log4j, folder, given)).result()
            try:
                yield spark
            finally:
                _stop(spark, log_file)


def _active() -> SparkSession | None:
    """The session of this process, or None; does not load Spark if nothing loaded it."""
    if "pyspark.sql" not in sys.modules:
        return None
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    # Spark's own active session is per thread.
    return None if SparkContext._active_spark_context is None else SparkSession.builder.getOrCreate()


def shuffle_partitions(configured: SparkConf, cores: int) -> int | None:
    """Partitions of a shuffle on a cluster of ``cores``; None if the settings of Spark define them."""
    if configured.contains(_SHUFFLE_PARTITIONS):
        return None
    return max(SHUFFLE_PARTITIONS_MIN, SHUFFLE_PARTITIONS_A_CORE * cores)


def _start(name: str, master: str | None, log4j: Path, folder: Path, given: Mapping[str, str]) -> SparkSession:
    # Imported here: it is slow, and option parsing should not wait for it.
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    master = master or SparkConf().get("spark.master") or LOCAL_MASTER
    if is_submitted():
        _take_over(log4j, folder)
        refuse_unless_there(master)
    settings = {**_settings(name, master, folder), **given}
    context = SparkContext.getOrCreate(SparkConf().setAll([*settings.items()]))
    # The next call reports that Java has ended; the accumulator server should not report it too.
    vars(context)["_accumulatorServer"].handle_error = lambda *_: None
    if is_local(master):
        # Start the worker daemon now, so that it imports the tasks' modules while Java plans.
        run_in_thread(lambda: context.parallelize([0], 1).map(bool).count())
    spark = SparkSession.builder.getOrCreate()
    # Cached, or each function of a plan makes Java search all archives for a class of that name.
    for name in _OF_ALL_PLANS:
        setattr(context._jvm, name, getattr(context._jvm, name))
    if not is_local(master):
        context.addPyFile(str(pack(folder)))
        if (partitions := shuffle_partitions(context.getConf(), context.defaultParallelism)) is not None:
            spark.conf.set(_SHUFFLE_PARTITIONS, str(partitions))
    return spark


def _stop(spark: SparkSession, log_file: Path) -> None:
    """Stop Spark. If it does not stop or has ended, the end of its Java follows."""
    from py4j.protocol import Py4JError

    # The accumulator server checks once a second whether to stop; its shutdown overlaps with the end of Java.
    counting: Any = vars(spark.sparkContext).pop("_accumulatorServer", None)
    with _errors_to(log_file), suppress(NotInTimeError, Py4JError, ConnectionError):
        run_in_thread(spark.stop).result(STOP_TIMEOUT_S)
    if counting is not None:
        run_in_thread(counting.shutdown)


def _take_over(log4j: Path, folder: Path) -> None:
    """Make a Java launched by ``spark-submit`` log to our file and keep its files in our folder."""
    from pyspark import SparkContext

    jvm: Any = SparkContext._jvm
    # Without a log configuration Spark sets its own when it first logs, so trigger that first.
    getattr(getattr(jvm, "org.apache.spark.SparkContext$"), "MODULE$").initializeLogIfNecessary(False, True)
    jvm.org.apache.logging.log4j.core.config.Configurator.reconfigure(jvm.java.net.URI.create(log4j.as_uri()))
    jvm.java.lang.System.setProperty("java.io.tmpdir", str(folder))


def _java_options(log4j: Path, folder: Path, more: str | None) -> str:
    """Options of a Java that we launch."""
    more = class_archive_options() if more is None else more
    of_files = f"-Dlog4j2.configurationFile={log4j.as_uri()}", f"-Djava.io.tmpdir={folder}"
    return f"{' '.join(map(quoted, of_files))} {_JAVA_OPTIONS} {more}"


def _settings(name: str, master: str, folder: Path) -> dict[str, str]:
    settings = {
        "spark.master": master,
        "spark.app.name": name,
        "spark.ui.showConsoleProgress": "false",
        # Else each column operation reports its source line to Java in a dozen calls, its largest cost.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_BATCH_ROWS),
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder),
    }
    if not is_local(master):
        return settings
    if sys.platform == "linux":
        settings["spark.python.daemon.module"] = TASK_DAEMON
    return settings | {
        "spark.pyspark.python": sys.executable,
        _SHUFFLE_PARTITIONS: str(SHUFFLE_PARTITIONS_A_CORE * local_cores(master)),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        # Tasks keep their files there too.
        "spark.executorEnv.TMPDIR": str(folder),
        # Tasks share worker processes only if their environments are equal; tasks of tables have this anyway.
        "spark.executorEnv.SPARK_SIMPLIFIED_TRACEBACK": "1",
    }


@contextmanager
def _errors_to(log_file: Path) -> Iterator[None]:
    """Redirect standard error of this process to the log file within the context."""
    with log_file.open("ab") as log, os.fdopen(os.dup(2), "wb", 0) as kept:
        sys.stderr.flush()
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept.fileno(), 2)


def pack(folder: Path) -> Path:
    """A zip of ``PACKAGES`` in ``folder``, as they are imported here."""
    archive = folder / "tallystick.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for package in PACKAGES:
            root = Path(importlib.import_module(package).__path__[0])
            for path in sorted(root.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    packed.write(path, f"{package}/{path.relative_to(root)}")
    return archive


# --- the master -----------------------------------------------------------------------------------


LOCAL_MASTER: Final = "local[*]"
CONNECT_TIMEOUT_S: Final = 5.0
"""How long each master of a standalone cluster may take to accept a connection."""

_LOCAL: Final = re.compile(r"local(?:\[(\*|[1-9]\d{0,3})(?:,\d{1,3})?\])?")
_ADDRESS: Final = r"(?:\[[0-9a-fA-F:.]+\]|[^\s,:/\[\]]+):\d{1,5}"
_STANDALONE: Final = re.compile(rf"spark://{_ADDRESS}(?:,{_ADDRESS})*")
_OTHER: Final = re.compile(r"k8s://\S+|yarn|local-cluster\[\d+,\d+,\d+\]")


def refuse_unless_master(master: str) -> None:
    """Check how ``master`` is spelled.

    Raises:
        ConfigurationError: it is malformed.
    """
    if not any(form.fullmatch(master) for form in (_LOCAL, _STANDALONE, _OTHER)):
        raise ConfigurationError(
            f"--master {master}: must be local[*], local[N] for N cores of this machine, spark://HOST:PORT, yarn or "
            "k8s://HOST:PORT"
        )


def refuse_unless_there(master: str) -> None:
    """Connect to the masters of a standalone cluster until one accepts; other masters are not checked.

    Spark itself would retry an unreachable master for a minute.

    Raises:
        ConfigurationError: no master accepts.
    """
    if not _STANDALONE.fullmatch(master):
        return
    reasons = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except UnicodeError:  # Raised by the encoding of host names.
            reasons.append(f"{address}: no host can have that name")
        except (OSError, OverflowError) as error:
            reasons.append(f"{address}: {getattr(error, 'strerror', None) or error}")
        else:
            return
    raise ConfigurationError(f"--master {master}: no Spark master is there ({'; '.join(reasons)})")


def is_local(master: str) -> bool:
    """Whether tasks run in the driver's own Java."""
    return _LOCAL.fullmatch(master) is not None


def local_cores(master: str) -> int:
    """The cores that a local master takes."""
    local = _LOCAL.fullmatch(master)
    assert local is not None, f"{master} is local"
    named = local[1] or "1"
    return len(os.sched_getaffinity(0)) if named == "*" else int(named)


# --- the folder of one run ------------------------------------------------------------------------


MARKER: Final = ".tallystick-run"
"""The file in every folder of a run."""
_SAID: Final = (
    "Temporary files of one run of tally pipeline: a later run removes this folder when that one has ended.\n"
)
_RANDOM: Final = re.compile(r"[a-z0-9_]{8}")
"""What tempfile puts after a prefix."""


@contextmanager
def own_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in ``parent`` with ``prefix``; folders of this user's dead runs are removed.

    Raises:
        OSError: it cannot be created.
    """
    for left in parent.glob(f"{prefix}*"):
        if _RANDOM.fullmatch(left.name.removeprefix(prefix)):
            _remove_if_dead(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with _opened(folder) as lock:
        try:
            with suppress(OSError):  # Without locks in the file system, no run can find the folder dead either.
                fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / MARKER).write_text(_SAID)
            yield folder
        finally:
            _remove(folder)


def _remove_if_dead(folder: Path) -> None:
    with suppress(OSError):  # It vanished, is no folder, or belongs to another user.
        if folder.lstat().st_uid == os.geteuid():
            with _opened(folder) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (folder / MARKER).is_file():
                    _remove(folder)


def _remove(folder: Path) -> None:
    """Remove ``folder``, its marker last, so that a later run can continue an interrupted removal."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != MARKER:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
