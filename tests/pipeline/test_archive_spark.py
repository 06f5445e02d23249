"""The archive on Spark: the command as users run it, one task a file."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from pipeline.archive.postgres import Ledger as PostgresLedger
from pipeline.archive.run import Run
from pipeline.archive.store import ArchiveStore
from pipeline.archive.tasks import file_on
from tests.conftest import Database
from tests.ledger.ledger_in_memory import SIGNER
from tests.pipeline.archived_ledgers import RING, archive_here, content_of, days, ledger_of, store


async def test_spark_makes_the_archive_that_one_process_makes(
    spark: SparkSession, database: Database, tmp_path: Path
) -> None:
    await store(database, ledger_of("acme", days(64)), ledger_of("other", days(31)))
    url = str(tmp_path / "spark")
    rows = spark.sparkContext.accumulator(0)
    with PostgresLedger.connected(database.service_url) as ledger:
        run = Run(ledger, ArchiveStore(url), SIGNER, RING, file_on(spark, database.service_url, url, rows))
        acme, other = run.archive()
    assert (acme.to_seq, other.to_seq, rows.value) == (60, 30, 90)
    archive_here(database, tmp_path / "here")
    assert content_of(tmp_path / "spark") == content_of(tmp_path / "here")
