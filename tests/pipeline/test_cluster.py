"""A cluster runs the pipeline with the project's packages sent to it, as docs/pipeline.md tells users to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import pipeline
from ledger.exit_code import ExitCode
from pipeline.java import find_java_home
from pipeline.spark import pack
from tests.app.chain_builder import insert
from tests.conftest import EXAMPLES, EXAMPLES_USUAL, Database
from tests.forked import Forked
from tests.ledger.ledger_in_memory import SIGNER, build
from tests.pipeline.spark_process import IMPORTED
from tests.pipeline.standalone import JAVA_OPTIONS, SHORT_LIVED, SPARK_HOME, cluster, said

WORKERS = 2 if EXAMPLES > EXAMPLES_USUAL else 1
"""Each is three more Javas: one, which is a process that finds nothing of the project, as two are; two in torture."""
SETTINGS = {
    "spark.cores.max": str(WORKERS),
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    "spark.ui.enabled": "false",
}
"""Of both drivers. A SPARK_CONF_DIR would be on their class path, for which Java passes the archive of classes over."""

READ = """
import json, os, sys
from pathlib import Path

import pyarrow as pa

from pipeline.places import parse_place
from pipeline.source import over_pieces
from pipeline.spark import spark_session

master, dsn, log, given = sys.argv[1:]


def where(piece, reader):
    import ledger

    seqs = [seq for batch in reader.entries(("seq",)) for seq in batch.column(0).to_pylist()]
    yield pa.RecordBatch.from_pylist([{"seqs": len(seqs), "of": ledger.__file__, "in": os.getcwd()}])


# Tasks wait for all workers, so that each gets one. The plan is small: the command below compiles its own.
settings = json.loads(given) | {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "200s",
}
with spark_session("cluster", master=master, log_file=Path(log), settings=settings) as spark:
    with parse_place(dsn).open() as opened:
        read = over_pieces(spark, opened.pieces(), where, "seqs bigint, of string, in string", rows_a_task=1)
        tasks = [row.asDict() for row in read.collect()]
    print(json.dumps(tasks), flush=True)
    sys.stdin.readline()
"""
"""Reads a ledger, says who read what and where, and keeps the cluster's cores until it is told to end."""

MAIN = Path(pipeline.__file__).with_name("__main__.py")
WAITING = re.compile(r"^waiting for (\S+) to give the application an executor \.\.\.$", re.MULTILINE)
TIMEOUT_S = 240


def test_what_is_sent_is_all_that_tasks_import_of_the_project(tmp_path: Path) -> None:
    names = zipfile.ZipFile(pack(tmp_path)).namelist()
    assert {name.partition("/")[0] for name in names} == {"ledger", "objects", "signing", "pipeline"}
    assert {"ledger/__init__.py", "signing/bundle/reader.py", "pipeline/places/postgres.py"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python with the packages of others, which finds nothing of this project by itself."""
    script = tmp_path / "python"
    packages = sysconfig.get_path("purelib")
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec "{sys.executable}" -S "$@"\n')
    script.chmod(0o755)
    return script


# Eight Javas and more are started, on a machine that has other tests to run.
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
async def test_a_standalone_cluster_runs_the_pipeline_with_what_is_sent_to_its_workers(
    superuser: asyncpg.Connection, database: Database, bare_python: Path, tmp_path: Path
) -> None:
    await superuser.execute("SET session_replication_role = replica")
    for tenant in ("acme", "beta"):
        await insert(superuser, build(200, tenant_id=tenant, snapshots_to=(150, 200)))
    (tmp_path / "keys.pem").write_text(SIGNER.public_key_pem)
    found = subprocess.run(
        [bare_python, "-c", "import ledger"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "No module named 'ledger'" in found.stderr
    temporary, properties = tmp_path / "temporary", tmp_path / "submit.conf"
    temporary.mkdir()
    submitted = SETTINGS | {"spark.driver.extraJavaOptions": JAVA_OPTIONS, "spark.cores.max": "1"}
    properties.write_text("".join(f"{name} {value}\n" for name, value in submitted.items()))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SPARK", "PYSPARK", "PYTHON"))},
        "JAVA_HOME": str(find_java_home(tmp_path / "submitting")),
        "PYSPARK_PYTHON": str(bare_python),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LAUNCHER_OPTS": SHORT_LIVED,
        "TMPDIR": str(temporary),
    }
    pipe = subprocess.PIPE
    with cluster(tmp_path, WORKERS) as master, (tmp_path / "told").open("wb") as told:

        @contextmanager
        def begun(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
            with process:
                try:
                    yield process
                finally:
                    process.kill()

        # 1. A driver that sends what tasks import.
        read = ("-c", READ, master, database.service_url, tmp_path / "spark.log", json.dumps(SETTINGS))
        files: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stdin": pipe, "stdout": pipe, "stderr": told}
        with begun(Forked(IMPORTED, *read, **files)) as reading:
            assert reading.stdout is not None
            tasks = json.loads(reading.stdout.readline() or "[]")
            assert [task["seqs"] for task in tasks] == [200, 200], (tmp_path / "told").read_text()
            assert all("tallystick.zip" in task["of"] for task in tasks)
            worked = {Path(task["in"]).relative_to(tmp_path).parts[0] for task in tasks}
            assert worked == {f"worker-{number}" for number in range(WORKERS)}

            # 2. A command under spark-submit, while all cores are still taken.
            await superuser.execute(
                "UPDATE scheduler.scheduler_log SET action = 'FAIL' WHERE tenant_id = 'beta' AND seq = 9"
            )
            options = ("--dsn", database.service_url, "--keys", "keys.pem", "--json")
            submit = (SPARK_HOME / "bin" / "spark-submit", "--master", master, "--properties-file", properties, MAIN)
            with begun(subprocess.Popen([*submit, "verify", *options], **files)) as verifying:
                assert said(tmp_path / "told", WAITING)[1] == master
                reading.communicate(b"\n", TIMEOUT_S)
                printed, _ = verifying.communicate(timeout=TIMEOUT_S)
        assert (reading.returncode, verifying.returncode) == (ExitCode.FINE, ExitCode.TAMPERED)
    acme, beta = json.loads(printed)["tenants"]
    assert (acme["valid"], acme["entries_checked"], acme["first_break"]) == (True, 200, None)
    assert (beta["first_break"]["kind"], beta["first_break"]["seq"]) == ("link", 9)
    assert " INFO " not in (tmp_path / "told").read_text()
    assert list(temporary.iterdir()) == []
