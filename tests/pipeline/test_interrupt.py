"""A command that is interrupted ends soon and in order, wherever it is in its work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

COMMAND = """
import sys, threading
from pipeline.cli.running import running, unwind_on_signals

pipe = sys.argv[1]

def wait(batches):
    print("at work", flush=True, file=open(pipe, "w"))
    threading.Event().wait(200)
    yield from batches

unwind_on_signals()
with running("wait", "local[1]") as spark:
    spark.range(1).mapInArrow(wait, "id long").collect()
"""


def test_a_signal_in_the_middle_of_a_job_ends_it_with_the_exit_code_of_shells(tmp_path: Path) -> None:
    pipe = tmp_path / "at-work"
    os.mkfifo(pipe)
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TALLY_PIPELINE_LOGS": str(tmp_path / "logs")}
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, pipe], env=environment, stderr=subprocess.PIPE, text=True
    )
    with command:
        assert pipe.read_text() == "at work\n"
        command.send_signal(signal.SIGINT)
        _, told = command.communicate(timeout=150)
    assert (command.returncode, told) == (128 + signal.SIGINT, "stopping ...\n")
    assert list(tmp_path.glob("tally-pipeline-*")) == []


START = """
from pipeline.cli.running import running, unwind_on_signals

unwind_on_signals()
with running("wait", "local[1]"):
    print("started", flush=True)
"""


def has_begun(moment: str, folder: Path) -> bool:
    """Whether a start of Spark whose temporary files are in ``folder`` has come so far."""
    return bool(processes_of(folder, "org.apache.spark.deploy.SparkSubmit")) and (
        moment == "java" or any(folder.glob("tally-pipeline-*/blockmgr-*"))
    )


def processes_of(folder: Path, word: str = "") -> list[str]:
    """Command lines that name ``folder`` and ``word``."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # It has ended meanwhile.
            found.append(file.read_bytes().replace(b"\0", b" ").decode())
    return [line for line in found if str(folder) in line and word in line]


@pytest.mark.parametrize("moment", ["java", "context"])
def test_a_signal_while_spark_starts_leaves_no_java_and_no_folder(tmp_path: Path, moment: str) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TALLY_PIPELINE_LOGS": str(tmp_path / "logs")}
    command = subprocess.Popen(
        [sys.executable, "-c", START], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with command:
        while not has_begun(moment, tmp_path):
            with suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it has ended: {command.wait(timeout=0.02)}")
        command.send_signal(signal.SIGTERM)
        # Java has the same standard output: this waits for its end too.
        printed, told = command.communicate(timeout=150)
    assert (command.returncode, printed, told) == (128 + signal.SIGTERM, "", "")
    assert processes_of(tmp_path) == []
    assert list(tmp_path.glob("tally-pipeline-*")) == []
