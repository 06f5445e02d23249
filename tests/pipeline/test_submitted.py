"""Output under ``spark-submit``: nothing of it is lost because its Java ends as soon as the command does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.forked import Forked

IMPORTED = "import pipeline.cli.running"
PRINT = """
import fcntl, sys, struct, termios
from pipeline.cli import running

running.PRINTED_TIMEOUT_S = 1e6
print("x" * 1000, flush=True)
print("printed", file=sys.stderr, flush=True)
running.wait_until_printed()
sys.exit(struct.unpack("i", fcntl.ioctl(1, termios.FIONREAD, bytes(4)))[0])
"""
"""Prints, waits as a command does, and says how much nobody has read by then."""
TIMEOUT_S = 60


@pytest.fixture
def printing() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has printed 1001 bytes to a pipe, and now waits until they are read."""
    environment = {**os.environ, "PYSPARK_GATEWAY_PORT": "1"}
    pipe = subprocess.PIPE
    with Forked(IMPORTED, "-c", PRINT, env=environment, stdout=pipe, stderr=pipe) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"printed\n"
        yield process
        process.kill()


def test_a_command_ends_once_all_that_it_printed_is_read(printing: subprocess.Popen[bytes]) -> None:
    assert printing.stdout is not None
    assert len(printing.stdout.read()) == 1001
    assert printing.wait(TIMEOUT_S) == 0


def test_a_command_does_not_wait_for_a_java_that_has_ended(printing: subprocess.Popen[bytes]) -> None:
    assert printing.stdout is not None
    printing.stdout.close()
    assert printing.wait(TIMEOUT_S) == 1001 % 256
