"""A command run in our place has our streams, gets our signals, and its end is told exactly."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import Forked, run_forked
from tests.tally import IMPORTED

RUN = "import sys; from tallystick_client.command import run_command; print(*run_command(sys.argv[1:])[:2])"

WAIT = """
import signal, sys
wanted = {getattr(signal, sys.argv[1])}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
open(sys.argv[2], "w").close()
signal.sigwait(wanted)
sys.exit(42)
"""
"""Held back, the signal waits until it is waited for: a trap of a shell may miss the one that comes before a read."""


def ran(*command: str) -> list[str]:
    return run_forked(IMPORTED, "-c", RUN, *command, check=True).stdout.splitlines()


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_the_exit_code_is_that_of_the_command(code: int) -> None:
    assert ran("sh", "-c", f"exit {code}") == [f"{code} None"]


def test_a_command_that_a_signal_killed_has_128_and_its_number() -> None:
    assert ran("sh", "-c", "kill -KILL $$") == ["137 SIGKILL"]


def test_the_command_has_our_standard_output() -> None:
    assert ran("echo", "hello") == ["hello", "0 None"]


def test_a_command_dies_of_a_closed_pipe_as_it_would_without_us() -> None:
    assert ran("sh", "-c", "kill -PIPE $$; echo alive") == ["141 SIGPIPE"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1"])
def test_a_signal_sent_to_us_reaches_the_command_and_we_outlive_it(name: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    command = [sys.executable, "-SE", "-c", WAIT, name, str(ready)]
    tally = Forked(IMPORTED, "-c", RUN, *command, stdout=subprocess.PIPE, text=True)
    ready.read_text()

    tally.send_signal(getattr(signal, name))
    stdout, _ = tally.communicate(timeout=120)

    assert stdout == "42 None\n"
    assert tally.returncode == 0


def test_a_command_that_does_not_exist_is_said_to_be_missing() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        ran("/nowhere/at/all")

    assert "FileNotFoundError" in refused.value.stderr
