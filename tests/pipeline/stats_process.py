"""A run of the stats stream that a test kills: one file a batch, so that it is always in the middle of one."""

from __future__ import annotations

from pathlib import Path

from pipeline.spark import spark_session
from pipeline.stats import run


def main(source: str, dest: str) -> None:
    """Stream ``source`` into ``dest``."""
    log_file = Path(dest).parent / "spark.log"
    # It runs for a few batches only: compiling their plans would take longer than it saves.
    settings = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    with spark_session("killed", master="local[2]", log_file=log_file, settings=settings) as spark:
        run(spark, source, dest, files_a_batch_max=1)
