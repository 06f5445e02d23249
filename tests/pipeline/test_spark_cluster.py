"""A cluster runs the pipeline with the project's packages sent to it, as docs/pipeline.md tells users to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import asyncpg
import pytest
from pyspark.sql import SparkSession

import pipeline
from ledger.exit_code import ExitCode
from pipeline.java import find_java_home
from pipeline.spark import pack
from tests.app.chain_builder import insert
from tests.conftest import Database
from tests.ledger.ledger_in_memory import SIGNER, build
from tests.pipeline.standalone import JAVA_OPTIONS, SHORT_LIVED, SPARK_HOME, cluster, said

SETTINGS = {
    "spark.cores.max": "1",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    "spark.ui.enabled": "false",
}
"""Of the driver. A SPARK_CONF_DIR would be on its class path, for which Java passes the archive of classes over."""

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


# Three Javas are started, on a machine that has other tests to run.
@pytest.mark.timeout(900)
async def test_a_standalone_cluster_whose_worker_comes_late_runs_the_pipeline(
    spark: SparkSession, superuser: asyncpg.Connection, database: Database, bare_python: Path, tmp_path: Path
) -> None:
    await superuser.execute("SET session_replication_role = replica")
    for tenant in ("acme", "beta"):
        await insert(superuser, build(200, tenant_id=tenant, snapshots_to=(150, 200)))
    await superuser.execute("UPDATE scheduler.scheduler_log SET action = 'FAIL' WHERE tenant_id = 'beta' AND seq = 9")
    (tmp_path / "keys.pem").write_text(SIGNER.public_key_pem)
    found = subprocess.run(
        [bare_python, "-c", "import ledger"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "No module named 'ledger'" in found.stderr
    temporary, properties = tmp_path / "temporary", tmp_path / "submit.conf"
    temporary.mkdir()
    properties.write_text("".join(f"{name} {value}\n" for name, value in SETTINGS.items()))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SPARK", "PYSPARK", "PYTHON"))},
        "JAVA_HOME": str(find_java_home(tmp_path / "submitting")),
        "PYSPARK_PYTHON": str(bare_python),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LAUNCHER_OPTS": SHORT_LIVED,
        "TMPDIR": str(temporary),
    }
    options = ("--dsn", database.service_url, "--keys", "keys.pem", "--json")
    with cluster(spark) as begun, (tmp_path / "told").open("wb") as told:
        submit = (SPARK_HOME / "bin" / "spark-submit", "--master", begun.url, "--properties-file", properties, MAIN)
        command = (*submit, "verify", *options)
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=told) as verifying:
            try:
                assert said(tmp_path / "told", WAITING)[1] == begun.url
                begun.add_worker(tmp_path / "worker")
                printed, _ = verifying.communicate(timeout=TIMEOUT_S)
            finally:
                verifying.kill()
    assert verifying.returncode == ExitCode.TAMPERED, (tmp_path / "told").read_text()
    acme, beta = json.loads(printed)["tenants"]
    assert (acme["valid"], acme["entries_checked"], acme["first_break"]) == (True, 200, None)
    assert (beta["first_break"]["kind"], beta["first_break"]["seq"]) == ("link", 9)
    # An executor fetches what is sent with its first task.
    assert len([*(tmp_path / "worker").glob("*/*/tallystick.zip")]) == 1
    assert " INFO " not in (tmp_path / "told").read_text()
    assert list(temporary.iterdir()) == []
