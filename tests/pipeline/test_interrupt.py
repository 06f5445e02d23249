"""A command that is interrupted ends soon and in order, wherever it is in its work."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.forked import Forked, run_forked
from tests.pipeline.spark_process import IMPORTED

COMMAND = """
import sys, threading
from pipeline.cli.running import _cancel_jobs, running, unwind_on_signals

pipe = sys.argv[1]

def wait(batches):
    print("at work", flush=True, file=open(pipe, "w"))
    threading.Event().wait(200)
    yield from batches

unwind_on_signals()
soon = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
try:
    with running("wait", "local[1]", soon) as spark:
        spark.range(1).mapInArrow(wait, "id long").collect()
finally:
    _cancel_jobs(spark)  # As the thread of a signal that comes while Spark stops: it finds nothing, and is silent.
"""


def test_a_signal_in_the_middle_of_a_job_ends_it_with_the_exit_code_of_shells(tmp_path: Path) -> None:
    pipe = tmp_path / "at-work"
    os.mkfifo(pipe)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TALLY_PIPELINE_LOGS": str(tmp_path / "logs")}
    with Forked(IMPORTED, "-c", COMMAND, pipe, env=environment, stderr=subprocess.PIPE, text=True) as command:
        assert pipe.read_text() == "at work\n"
        command.send_signal(signal.SIGINT)
        _, told = command.communicate(timeout=150)
    assert (command.returncode, told) == (128 + signal.SIGINT, "stopping ...\n")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["at-work", "logs"]


START = """
import sys
from pipeline.cli.running import running, unwind_on_signals

unwind_on_signals()
with running("wait", sys.argv[1]):
    print("started", flush=True)
"""


def processes_of(folder: Path, word: str = "") -> list[str]:
    """Command lines that name ``folder`` and ``word``."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # It has ended meanwhile.
            found.append(file.read_bytes().replace(b"\0", b" ").decode())
    return [line for line in found if str(folder) in line and word in line]


@contextmanager
def starting(folder: Path, master: str) -> Iterator[subprocess.Popen[str]]:
    """A command that starts Spark under ``master``, all files of which are in ``folder``."""
    environment = {**os.environ, "TMPDIR": str(folder), "TALLY_PIPELINE_LOGS": str(folder / "logs")}
    pipe = subprocess.PIPE
    with Forked(IMPORTED, "-c", START, master, env=environment, stdout=pipe, stderr=pipe, text=True) as command:
        yield command


def test_a_signal_while_java_starts_leaves_no_java_and_no_folder(tmp_path: Path) -> None:
    with starting(tmp_path, "local[1]") as command:
        while not processes_of(tmp_path, "org.apache.spark.deploy.SparkSubmit"):
            with suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it has ended: {command.wait(timeout=0.02)}")
        command.send_signal(signal.SIGTERM)
        printed, told = command.communicate(timeout=150)
    assert (command.returncode, printed, told) == (128 + signal.SIGTERM, "", "")
    assert processes_of(tmp_path) == []
    assert [file.name for file in tmp_path.iterdir()] == ["logs"]


def test_a_cluster_that_never_answers_is_waited_for_until_a_signal_comes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        master = "spark://127.0.0.1:{1}".format(*silent.getsockname())
        with starting(tmp_path, master) as command:
            assert command.stderr is not None
            assert command.stderr.readline() == f"waiting for Spark to start on {master} ...\n"
            command.send_signal(signal.SIGINT)
            command.send_signal(signal.SIGINT)  # Whoever asks twice gets it once.
            printed, told = command.communicate(timeout=150)
    assert (command.returncode, printed, told) == (128 + signal.SIGINT, "", "")
    log, *_ = (tmp_path / "logs").iterdir()
    assert "All masters are unresponsive" not in log.read_text(), "it has not waited until Spark gave up"
    assert processes_of(tmp_path) == []
    assert [file.name for file in tmp_path.iterdir()] == ["logs"]


# A reset instead of an end comes where Java dies with bytes that it has not read.
ABANDONED = """
import sys
from pathlib import Path

from pyspark import SparkContext
from pipeline.java import run_in_thread, java
from pipeline.java import class_archive_options


class GivenUpError(Exception):
    pass


folder = Path(sys.argv[1])
try:
    with java({"spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 {class_archive_options()}"}, folder / "log"):
        file = SparkContext._jvm.java.io.File(str(folder / "pipe")).toPath()
        read = f"c\\nz:java.nio.file.Files\\nreadAllBytes\\nr{file._target_id}\\ne\\n"
        run_in_thread(lambda: SparkContext._gateway._gateway_client.send_command(read + "x" * 100_000))
        pipe = open(folder / "pipe", "wb")  # Only when Java reads.
        raise GivenUpError
except GivenUpError:
    pass
"""


def test_what_py4j_says_of_a_call_that_java_ended_below_is_in_the_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    command = run_forked(IMPORTED, "-c", ABANDONED, tmp_path)
    assert (command.returncode, command.stdout, command.stderr) == (0, "", "")
    assert "Exception while sending command." in (tmp_path / "log").read_text()
