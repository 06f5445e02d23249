"""The output of the stream: Parquet by kind and date, of which only committed files are valid.

    DEST/kind=window/date=2026-11-21/part-....parquet     closed windows; date is that of their start, UTC
    DEST/kind=rejected/date=2026-11-21/part-....parquet   lines that count nowhere; date is that of their file
    DEST/_spark_metadata/                                 the commit log: the files of each batch, batch by batch
    DEST/_checkpoint/                                     what was read, and windows that are still open

An interrupted batch leaves files that the commit log does not name. Spark ignores them only if it reads ``DEST``
itself, so never read a folder below it.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.types import StructType

from ledger.errors import ConfigurationError, InvalidInputError, NotFoundError, refuse
from pipeline.stats.reports import AHEAD_MAX_S

# --- what was written -----------------------------------------------------------------------------


PARTITIONS: Final = ("kind", "date")
WINDOW_SCHEMA: Final = """
    window_start timestamp, window_end timestamp, tenant_id string, dc_id string, what string, name string,
    lines bigint, reports bigint, series bigint, sum double, per_second double, latest double,
    mean double, min double, max double, p50 double, p95 double, p99 double
"""
REJECTED_SCHEMA: Final = "reason string, line string, file string, closed timestamp, time timestamp"
COMMIT_LOG: Final = "_spark_metadata"
CHECKPOINT: Final = "_checkpoint"
_LOG_VERSION: Final = "v1"


def together(windows: DataFrame, rejected_lines: DataFrame) -> DataFrame:
    """Rows of both kinds with their partitions, as one stream, so that one commit covers both."""
    rows = windows.selectExpr("'window' AS kind", "to_date(window_start) AS date", "*")
    return rows.unionByName(
        rejected_lines.selectExpr("'rejected' AS kind", "to_date(closed) AS date", "*"), allowMissingColumns=True
    )


def read(spark: SparkSession, url: str) -> DataFrame:
    """The closed windows in ``url``, written by ``tally pipeline stats``; columns of ``WINDOW_SCHEMA``.

    Raises:
        NotFoundError: nothing was ever written there.
    """
    return _of_kind(spark, url, "window", WINDOW_SCHEMA)


def rejected(spark: SparkSession, url: str) -> DataFrame:
    """The lines that were rejected on the way to ``url``, with the reason; columns of ``REJECTED_SCHEMA``.

    Raises:
        NotFoundError: nothing was ever written there.
    """
    return _of_kind(spark, url, "rejected", REJECTED_SCHEMA)


def _of_kind(spark: SparkSession, url: str, kind: str, schema: str) -> DataFrame:
    columns = cast(StructType, StructType.fromDDL(schema))
    try:
        found = spark.read.parquet(url)
    except AnalysisException as error:
        raise NotFoundError(f"{url} holds no stats: {str(error).splitlines()[0]}") from None
    # The columns of a file depend on the contents of its batch.
    present = [
        fn.col(field.name) if field.name in found.columns else fn.lit(None).cast(field.dataType).alias(field.name)
        for field in columns.fields
    ]
    return found.where(fn.col("kind") == kind).select("date", *present)


def committed_files(folder: Path) -> list[Path]:
    """The committed Parquet files in ``folder``, for readers other than Spark, in commit order.

    Raises:
        NotFoundError: there is no commit log.
        InvalidInputError: its form is unknown.
    """
    log = folder / COMMIT_LOG
    if not log.is_dir():
        raise NotFoundError(f"{folder} holds no stats: there is no {COMMIT_LOG}")
    numbers = {path: int(path.stem) for path in log.iterdir() if path.name.removesuffix(".compact").isdigit()}
    compacted = max((number for path, number in numbers.items() if path.suffix), default=-1)
    files: dict[Path, None] = {}
    for path in sorted(numbers, key=numbers.__getitem__):
        if numbers[path] < compacted or (numbers[path] == compacted and not path.suffix):
            continue  # The compacted file of a batch names the files of all batches up to it.
        version, *lines = path.read_text().splitlines()
        if version != _LOG_VERSION:
            raise InvalidInputError(f"{path} is of version {version}; {_LOG_VERSION} is known here")
        for line in lines:
            files[Path(unquote(urlsplit(json.loads(line)["path"]).path))] = None
    return list(files)


# --- the clock ------------------------------------------------------------------------------------


class Tick(NamedTuple):
    """In milliseconds since 1970: the newest report read, and the time announced to the stream."""

    newest_ms: int
    time_ms: int


def next_tick(last: Tick, newest_ms: int, now_ms: int, close_after_ms: int) -> Tick:
    """The tick after ``last``, after reports up to ``newest_ms`` were read; ``close_after_ms`` 0 closes nothing."""
    newest_ms = max(newest_ms, last.newest_ms)
    is_closing = close_after_ms and newest_ms
    return Tick(newest_ms, max(last.time_ms, min(now_ms, newest_ms + close_after_ms) if is_closing else 0))


def refuse_behind(last: Tick, now_ms: int) -> None:
    """Check that ``now_ms`` is a plausible clock time for closing windows.

    Raises:
        ConfigurationError: it is too far behind the newest report read.
    """
    if now_ms + AHEAD_MAX_S * 1000 < max(last):
        raise ConfigurationError(
            f"this machine's clock says {_utc(now_ms)}, and an earlier run here had come to {_utc(max(last))}: "
            "set the clock right, or leave out --close"
        )


def _utc(time_ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_ms / 1000))


# --- the destination ------------------------------------------------------------------------------


_DESCRIPTION: Final = "stream.json"
_TICKS: Final = "clock"


class Destination:
    """A folder, or a URL that Spark can write to."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        """``url`` is a path, or a URL whose scheme Spark knows.

        Raises:
            ConfigurationError: it does not.
        """
        parts = urlsplit(url)
        self.is_local = parts.scheme in ("", "file")
        self.url = str(Path(parts.path if parts.scheme else url).absolute()) if self.is_local else url
        if parts.scheme == "s3":
            self.url = "s3a" + url.removeprefix("s3")
        self.checkpoint = f"{self.url}/{CHECKPOINT}"
        self.ticks = f"{self.checkpoint}/{_TICKS}"
        jvm: Any = spark._jvm
        self._jvm = jvm
        path = jvm.org.apache.hadoop.fs.Path(self.checkpoint)
        try:
            self._files = path.getFileSystem(spark._jsc.hadoopConfiguration())
        except Py4JJavaError:
            version = jvm.org.apache.hadoop.util.VersionInfo.getVersion()
            raise ConfigurationError(
                f"this Spark cannot write to {parts.scheme}: write to a folder and copy its committed files, "
                "or run under a spark-submit whose --packages bring that file system (for s3: "
                f"org.apache.hadoop:hadoop-aws:{version})"
            ) from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the destination against other runs on this machine; Spark itself detects runs on others.

        Raises:
            ConfigurationError: another run holds the lock.
        """
        if not self.is_local:
            yield
            return
        Path(self.checkpoint).mkdir(parents=True, exist_ok=True)
        with (Path(self.checkpoint) / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigurationError(f"another run writes to {self.url}; let it end first") from None
            yield

    def check_whole(self) -> None:
        """Check that the logs here are consistent.

        Raises:
            ConfigurationError: it does not.
        """
        check_logs(
            self.url,
            is_described=bool(self._files.exists(self._path(_DESCRIPTION))),
            commits=self._names(f"{self.checkpoint}/commits"),
            written=self._names(f"{self.url}/{COMMIT_LOG}"),
            offsets=self._names(f"{self.checkpoint}/offsets"),
        )

    def describe(self, wanted: dict[str, Any]) -> None:
        """Write the description of the stream, or compare it with the existing one.

        Raises:
            ConfigurationError: the existing one differs or is damaged.
        """
        path = self._path(_DESCRIPTION)
        self._files.mkdirs(self._path(_TICKS))
        if not self._files.exists(path):
            self._write(path, json.dumps(wanted).encode())
            return
        try:
            said = json.loads(self._text(path))
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise ConfigurationError(f"{_DESCRIPTION} of {self.url} is damaged: bring it back, or write elsewhere")
        for name, value in wanted.items():
            if said.get(name) != value:
                raise ConfigurationError(
                    f"{self.url} was begun with {name} {said.get(name)}, not {value}: say that, or write elsewhere"
                )

    def last_tick(self) -> Tick:
        """The newest recorded tick."""
        names = (name.lstrip("_").partition("-") for name in self._names(self.ticks))
        return max((Tick(int(newest), int(time)) for newest, _, time in names), default=Tick(0, 0))

    def note_tick(self, tick: Tick, *, is_later: bool) -> None:
        """Record ``tick`` in place of the last one; the stream reads it if it ``is_later``."""
        earlier = self._names(self.ticks)
        # Spark ignores names that start with an underscore.
        name = f"{'' if is_later else '_'}{tick.newest_ms}-{tick.time_ms}"
        self._write(self._path(f"{_TICKS}/{name}"), f"{tick.time_ms}\n".encode())
        for each in earlier:
            self._files.delete(self._path(f"{_TICKS}/{each}"), False)

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self.checkpoint}/{name}")

    def _names(self, folder: str) -> list[str]:
        path = self._jvm.org.apache.hadoop.fs.Path(folder)
        return [each.getPath().getName() for each in self._files.listStatus(path)] if self._files.exists(path) else []

    def _text(self, path: Any) -> str:
        try:
            with closing(self._files.open(path)) as stream:
                return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        except Py4JJavaError as error:
            reason = str(error.java_exception).splitlines()[0]
            raise ConfigurationError(f"{path} cannot be read ({reason}): write elsewhere") from None

    def _write(self, path: Any, content: bytes) -> None:
        """Write the file atomically."""
        beside = self._path("unfinished.tmp")
        with closing(self._files.create(beside, True)) as stream:
            stream.write(bytearray(content))
        self._files.rename(beside, path)


def check_logs(
    url: str, *, is_described: bool, commits: Iterable[str], written: Iterable[str], offsets: Iterable[str]
) -> None:
    """Check the inequality above on the names in the three logs.

    Raises:
        ConfigurationError: a log is missing, or older than the others.
    """
    committed, in_sink, begun = (_newest(names) for names in (commits, written, offsets))
    refuse(
        ConfigurationError,
        (
            not is_described and max(committed, in_sink, begun) >= 0,
            f"{url} was written to before, and {CHECKPOINT}/{_DESCRIPTION} is not there any more: what was read is not "
            "known. Bring it back, or write elsewhere; what stands there can still be read",
        ),
        (
            in_sink > begun,
            f"{url} holds batch {in_sink}, and its {CHECKPOINT} knows of none after {begun}: it is gone or older than "
            "what was written. Bring it back, or write elsewhere; what stands there can still be read",
        ),
        (
            committed > in_sink,
            f"the {CHECKPOINT} of {url} has come to batch {committed}, and {COMMIT_LOG} to {in_sink}: that is gone or "
            "older. Bring it back, or write elsewhere",
        ),
    )


def _newest(names: Iterable[str]) -> int:
    """The newest batch number in Spark's file names; -1 for none."""
    numbers = (name.removesuffix(".compact") for name in names)
    return max((int(number) for number in numbers if number.isascii() and number.isdecimal()), default=-1)
