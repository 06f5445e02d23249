"""What pipeline tests share: one Spark session a process, in local mode on two cores, and commands run in it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
from pyspark.sql import SparkSession

from app.dev.embedded import EmbeddedPostgres
from pipeline import cli
from pipeline.java import class_archive_options
from pipeline.spark import spark_session
from tests.conftest import Database, fresh_database


@pytest.fixture
def database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """A fresh migrated database; dropped afterwards.

    All have one name: by URL the driver keeps which types PostgreSQL has, which takes it longer than many a test.
    """
    with fresh_database(postgres, name="test_pipeline") as database:
        yield database


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A Spark session with few partitions; its log is in pytest's folder."""
    log_file = tmp_path_factory.mktemp("spark") / "spark.log"
    settings = {
        "spark.sql.shuffle.partitions": "2",
        # Plans of a few hundred rows take longer to compile and to adapt than to run. Commands that are processes of
        # their own, and those on a cluster, compile theirs.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.driver.memory": "3g",
        # By the size of the heap each sort and aggregation would begin with 64 MB, and fill it for nothing.
        "spark.buffer.pageSize": "4m",
        # Those of a stream are renamed by this process: else each of a thousand starts `readlink`.
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        ),
    }
    # What hundreds of commands leave behind is collected seldom where there is room; in large pages it is found sooner.
    options = f"-Xms3g -Xmn600m -XX:+UseTransparentHugePages {class_archive_options()}"
    with spark_session("tests", master="local[2]", log_file=log_file, settings=settings, java_options=options) as spark:
        yield spark


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class RunCommand(Protocol):
    """Runs ``tally pipeline`` with these arguments in this process, in the test's folder."""

    def __call__(self, *arguments: str | Path) -> Ran: ...


@pytest.fixture
def run_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[RunCommand]:
    """Commands of ``tally pipeline`` as a process runs them; where ``spark`` is used too, in that session.

    ``monkeypatch`` has no TALLY_PIPELINE_* for them but the folder of logs.
    """
    for variable in ("DSN", "ARCHIVE", "SIGNING_KEY", "SIGNING_PIN"):
        monkeypatch.delenv(f"TALLY_PIPELINE_{variable}", raising=False)
    monkeypatch.setenv("TALLY_PIPELINE_LOGS", str(tmp_path / "logs"))
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}

    def run(*arguments: str | Path) -> Ran:
        monkeypatch.setattr(sys, "argv", ["tally pipeline", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, *capfd.readouterr())

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
