"""Java's archive of Spark's classes, which halves its start-up time: ``python -m pipeline.class_archive``.

Loading and checking about ten thousand classes is most of the start-up cost of a small job. Java can map them from a
file (dynamic class data sharing, https://openjdk.org/jeps/350), which is built once, beside the packages of this
Python environment. Java ignores a file of another Java or other jars and starts without it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipeline.java import CLASS_ARCHIVE, SILENT, quoted, size_file
from pipeline.spark import spark_session
from signing.files import whole_file

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_EXIT_TIMEOUT_S: Final = 300.0


def make() -> bool:
    """Build the file from the classes that a small job of each kind loads; returns whether this Java supports it."""
    CLASS_ARCHIVE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CLASS_ARCHIVE.parent) as folder:
        fresh = Path(folder) / CLASS_ARCHIVE.name
        options = f"{quoted(f'-XX:ArchiveClassesAtExit={fresh}')} {SILENT}"
        with spark_session(
            "classes", master="local[1]", log_file=Path(folder) / "spark.log", java_options=options
        ) as spark:
            gateway = spark.sparkContext._gateway
            assert gateway is not None
            _work(spark, Path(folder))
        # Java exits and writes the file once no client is connected.
        gateway.proc.stdin.close()
        gateway.proc.wait(_EXIT_TIMEOUT_S)
        if fresh.exists():
            with whole_file(CLASS_ARCHIVE) as archive, fresh.open("rb") as made:
                shutil.copyfileobj(made, archive)
            # The size is written last: a matching size means a whole file.
            with whole_file(size_file(CLASS_ARCHIVE)) as size:
                size.write(str(fresh.stat().st_size).encode())
        return fresh.exists()


def _work(spark: SparkSession, folder: Path) -> None:
    """Read, map in Arrow, shuffle, aggregate, write and stream a few rows."""
    from pyspark.sql import functions as F  # noqa: N812 (the name everyone uses)

    rows = spark.range(100).mapInArrow(_same, "id long").withColumn("kind", F.col("id") % 3)
    rows.write.partitionBy("kind").parquet(str(folder / "rows"))
    spark.read.schema("id long, kind long").parquet(str(folder / "rows")).groupBy("kind").agg(
        F.count("*"), F.max_by("id", "kind"), F.percentile_approx("id", 0.5)
    ).orderBy("kind").collect()
    spark.sparkContext.parallelize(range(10), 2).mapPartitions(lambda part: part).collect()
    stream = spark.readStream.schema("id long, kind long").parquet(str(folder / "rows")).groupBy("kind").count()
    query = stream.writeStream.outputMode("complete").format("memory").queryName("counted").trigger(availableNow=True)
    query.option("checkpointLocation", str(folder / "stream")).start().awaitTermination()


def _same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


if __name__ == "__main__":
    if not make():
        print("This Java keeps no archive of classes; Spark starts without one.", file=sys.stderr)
