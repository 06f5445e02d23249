"""The Spark session of a pipeline command: quiet on the terminal, its log in a file, stopped however the command ends.

By default Spark runs in this process tree, ``local[*]``; ``--master`` names any cluster, to which the project's own
packages are sent, and under ``spark-submit`` its settings hold. What Spark and its Java print goes to the log file.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from ledger.errors import ConfigurationError
from pipeline.java import class_archive_options, find_java_home
from pipeline.shipping import pack

if TYPE_CHECKING:
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

Value = TypeVar("Value")

LOCAL_MASTER: Final = "local[*]"
SHUFFLE_PARTITIONS_A_CORE: Final = 2
SHUFFLE_PARTITIONS_MIN: Final = 16
"""On a cluster, whose workers may still be joining; adaptive execution puts small ones together."""
ARROW_BATCH_ROWS: Final = 10_000

_LOCAL: Final = re.compile(r"local(?:\[(\*|[1-9]\d{0,3})(?:,\d{1,3})?\])?")
_CLUSTER: Final = re.compile(r"spark://\S+|k8s://\S+|yarn|local-cluster\[\d+,\d+,\d+\]")
_DRIVER_JAVA: Final = "spark.driver.extraJavaOptions"
_SHUFFLE_PARTITIONS: Final = "spark.sql.shuffle.partitions"

_JAVA_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Rows are read and checked in Python, so Java should start fast and leave the cores alone."""

_LOG4J: Final = """\
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = {log_file}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd'T'HH:mm:ss.SSSXXX}} %p %c{{1}}: %m%n%ex
"""


@contextmanager
def spark_session(
    name: str,
    *,
    master: str | None,
    log_file: Path,
    settings: Mapping[str, str] | None = None,
    java_options: str | None = None,
) -> Iterator[SparkSession]:
    """A session for one command, stopped at its end; ``settings`` are Spark's, over ours.

    A session that this process has already is used as it is, and left to whoever started it.

    ``master`` is None for ``LOCAL_MASTER``, or for what ``spark-submit`` says; ``java_options`` is None for those with
    which Java starts from its archive of classes.

    Raises:
        ConfigurationError: ``master`` is none, or there is no Java for it.
    """
    _check_master(master)
    active = _active()
    if active is not None:
        yield active
        return
    folder = Path(tempfile.mkdtemp(prefix="tally-pipeline-"))
    try:
        with _errors_to(log_file):
            ours = _java_options(log_file, folder, java_options)
            spark = _whole(lambda: _start(name, master, folder, {_DRIVER_JAVA: ours, **(settings or {})}))
        try:
            yield spark
        finally:
            with _errors_to(log_file):
                apart(spark.stop)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _active() -> SparkSession | None:
    """The session that this process has; asked without loading Spark where nobody has."""
    if "pyspark.sql" not in sys.modules:
        return None
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    # The session that Spark calls active is one of the calling thread.
    return None if SparkContext._active_spark_context is None else SparkSession.builder.getOrCreate()


def _check_master(master: str | None) -> None:
    if master is not None and not _LOCAL.fullmatch(master) and not _CLUSTER.fullmatch(master):
        raise ConfigurationError(
            f"--master {master}: must be local[*], local[N] for N cores of this machine, spark://HOST:PORT, yarn or "
            "k8s://HOST:PORT"
        )


def shuffle_partitions(configured: SparkConf, cores: int) -> int | None:
    """Partitions of a shuffle on a cluster of so many cores; None where the settings of Spark say how many."""
    if configured.contains(_SHUFFLE_PARTITIONS):
        return None
    return max(SHUFFLE_PARTITIONS_MIN, SHUFFLE_PARTITIONS_A_CORE * cores)


def apart(work: Callable[[], Value]) -> Value:
    """Call Java from a thread, and so over a connection, of its own.

    What a signal's handler raises may cut a call short whose answer is still to come: while that is being handled, the
    next call on the same thread would be given that answer for its own.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _whole(start: Callable[[], SparkSession]) -> SparkSession:
    """What ``start`` gives, which comes to its end in a thread of its own, whatever a signal's handler raises here.

    A Java that is left in the middle of its start waits for ever for somebody who asks it something.
    """
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(start)
        try:
            return starting.result()
        except BaseException:
            if starting.exception() is None:
                thread.submit(starting.result().stop).result()
            raise


def _java_options(log_file: Path, folder: Path, more: str | None) -> str:
    log4j = folder / "log4j2.properties"
    log4j.write_text(_LOG4J.format(log_file=log_file))
    more = class_archive_options() if more is None else more
    return f"-Dlog4j2.configurationFile={log4j.as_uri()} {_JAVA_OPTIONS} {more}"


def _start(name: str, master: str | None, folder: Path, settings: Mapping[str, str]) -> SparkSession:
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not is_submitted:
        os.environ["JAVA_HOME"] = str(find_java_home(folder))
    master = master or (None if is_submitted else LOCAL_MASTER)
    is_local = master is not None and _LOCAL.fullmatch(master) is not None
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if is_local or not os.environ.get("PYSPARK_PYTHON"):
        os.environ["PYSPARK_PYTHON"] = sys.executable
    # Imported here: it takes a while, and what only reads options should not wait for it.
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in {**_settings(master, folder), **settings}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    if not is_local:
        context = spark.sparkContext
        context.addPyFile(str(pack(folder)))
        partitions = shuffle_partitions(context.getConf(), context.defaultParallelism)
        if partitions is not None:
            spark.conf.set(_SHUFFLE_PARTITIONS, str(partitions))
    return spark


def _settings(master: str | None, folder: Path) -> dict[str, str]:
    settings = {
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_BATCH_ROWS),
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    local = None if master is None else _LOCAL.fullmatch(master)
    if local is None:
        return settings
    cores = local[1] or "1"
    count = len(os.sched_getaffinity(0)) if cores == "*" else int(cores)
    return settings | {
        "spark.pyspark.python": sys.executable,
        _SHUFFLE_PARTITIONS: str(SHUFFLE_PARTITIONS_A_CORE * count),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.local.dir": str(folder),
    }


@contextmanager
def _errors_to(log_file: Path) -> Iterator[None]:
    """What this process and those it starts write to standard error goes to the log file meanwhile."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    kept = os.dup(2)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.dup2(log, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(log)
