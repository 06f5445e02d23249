"""What the stream has written: Parquet by kind and date, of which only committed files count.

    DEST/kind=window/date=2026-11-21/part-....parquet     closed windows; date is that of their start, UTC
    DEST/kind=rejected/date=2026-11-21/part-....parquet   lines that count nowhere; date is that of their file
    DEST/_spark_metadata/                                 the commit log: the files of each batch, batch by batch
    DEST/_checkpoint/                                     what was read, and windows that are still open

A batch that was cut short leaves files that no entry of the log names. Spark passes over them when it reads ``DEST``
itself, and only then: never read a folder below it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, cast
from urllib.parse import unquote, urlsplit

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn
from pyspark.sql.types import StructType

from ledger.errors import InvalidInputError, NotFoundError

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
    """Rows of both kinds with where they go: one stream, so that one commit covers both."""
    rows = windows.select(fn.lit("window").alias("kind"), fn.to_date("window_start").alias("date"), "*")
    others = rejected_lines.select(fn.lit("rejected").alias("kind"), fn.to_date("closed").alias("date"), "*")
    return rows.unionByName(others, allowMissingColumns=True)


def read(spark: SparkSession, url: str) -> DataFrame:
    """The closed windows that stand in ``url``, which ``tally pipeline stats`` wrote; columns of ``WINDOW_SCHEMA``.

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
    # Which columns a file has depends on what its batch held.
    present = [
        fn.col(field.name) if field.name in found.columns else fn.lit(None).cast(field.dataType).alias(field.name)
        for field in columns.fields
    ]
    return found.where(fn.col("kind") == kind).select("date", *present)


def committed_files(folder: Path) -> list[Path]:
    """The Parquet files in ``folder`` that count, for readers other than Spark, in the order they were committed.

    Raises:
        NotFoundError: there is no commit log.
        InvalidInputError: it is of a form that is not known here.
    """
    log = folder / COMMIT_LOG
    if not log.is_dir():
        raise NotFoundError(f"{folder} holds no stats: there is no {COMMIT_LOG}")
    entries = {path.name: path for path in log.iterdir() if path.name.removesuffix(".compact").isdigit()}
    batches = sorted(int(name) for name in entries if not name.endswith(".compact"))
    compacted = max((int(name.removesuffix(".compact")) for name in entries if name.endswith(".compact")), default=-1)
    names = [f"{compacted}.compact"] if compacted >= 0 else []
    names += [str(batch) for batch in batches if batch > compacted]
    files: dict[Path, None] = {}
    for name in names:
        version, *lines = entries[name].read_text().splitlines()
        if version != _LOG_VERSION:
            raise InvalidInputError(f"{entries[name]} is of version {version}; {_LOG_VERSION} is known here")
        for line in lines:
            files[Path(unquote(urlsplit(json.loads(line)["path"]).path))] = None
    return list(files)
