"""What pipeline tests share: one Spark session a process, in local mode on two cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from pipeline.spark import spark_session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A Spark session with few partitions; its log is in pytest's folder."""
    log_file = tmp_path_factory.mktemp("spark") / "spark.log"
    settings = {
        "spark.sql.shuffle.partitions": "2",
        # Plans of a few hundred rows take longer to compile and to adapt than to run.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.adaptive.enabled": "false",
    }
    with spark_session("tests", master="local[2]", log_file=log_file, settings=settings) as spark:
        yield spark
