"""The archive on Spark: the command as users run it, one task a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from pyspark.sql import SparkSession

from objects.store import ArchiveStore
from pipeline.archiving.filing import Ledger as PostgresLedger
from pipeline.archiving.filing import file_on
from signing import private_keys
from signing.keys import Keyring
from tests.app.chains import until
from tests.conftest import Database
from tests.forked import Forked
from tests.ledger.ledger_in_memory import SIGNER
from tests.pipeline.archived_ledgers import (
    RING,
    archive_at,
    archive_by,
    archive_here,
    days,
    ledger_of,
    store,
    without_table,
)
from tests.pipeline.conftest import RunCommand
from tests.pipeline.spark_process import IMPORTED, PIPELINE


async def test_spark_makes_the_archive_that_one_process_makes(
    spark: SparkSession, database: Database, tmp_path: Path
) -> None:
    await store(database, ledger_of("acme", days(64)), ledger_of("other", days(31)))
    url = str(tmp_path / "spark")
    rows = spark.sparkContext.accumulator(0)
    with PostgresLedger.connected(database.service_url) as ledger:
        acme, other = archive_by(ledger, ArchiveStore(url), SIGNER, RING, file_on(spark, rows))
    assert (acme.to_seq, other.to_seq, rows.value) == (60, 30, 90)
    archive_here(database, tmp_path / "here")
    assert without_table(tmp_path / "spark") == without_table(tmp_path / "here")


async def test_the_command_killed_while_spark_is_at_work_is_finished_by_the_next(
    spark: SparkSession, run_command: RunCommand, database: Database, tmp_path: Path
) -> None:
    signer = private_keys.generate(tmp_path / "key.pem")
    (tmp_path / "ledger.pem").write_text(SIGNER.public_key_pem)
    ledgers = [ledger_of(f"tenant-{number}", days(40)) for number in range(6)]
    await store(database, *ledgers)
    archive_at(database, str(tmp_path / "whole"), Keyring([signer.public_key, SIGNER.public_key]), signer)
    whole, killed = without_table(tmp_path / "whole"), tmp_path / "killed"
    command = ["archive", "--dest", str(killed), "--dsn", database.service_url, "--master", "local[2]", "--json"]
    command += ["--signing-key", str(tmp_path / "key.pem"), "--keys", str(tmp_path / "ledger.pem")]

    process = Forked(IMPORTED, "-c", PIPELINE, *command, stdout=subprocess.DEVNULL)
    try:
        # Plans are written first, so the files are being made, or about to be.
        await until(lambda: list(killed.glob("entries/*/*/*.parquet")), "a file is there", 120)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert without_table(killed).items() <= whole.items()
    assert len(without_table(killed)) > len(ledgers)

    next_one = run_command(*command)
    assert next_one.returncode == 0, next_one.stderr
    assert [(each["tenant_id"], each["to_seq"]) for each in json.loads(next_one.stdout)["tenants"]] == [
        (ledger.tenant_id, 40) for ledger in ledgers
    ]
    assert without_table(killed) == whole
