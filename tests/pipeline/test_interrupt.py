"""A command that is interrupted ends soon and in order, wherever it is in its work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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
