"""A command run in our place has our streams, gets our signals, and its end is told exactly."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RUN = "import sys; from app.cli import process; print(*process.run(sys.argv[1:])[:2])"


def ran(*command: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", RUN, *command], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


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
    script = f"trap 'exit 42' {name.removeprefix('SIG')}; echo up > {ready}; while read line; do :; done"
    held_open, stdin = os.pipe()
    tally = subprocess.Popen(
        [sys.executable, "-c", RUN, "sh", "-c", script],
        stdin=held_open,
        stdout=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background may ignore it, and a shell cannot trap what it was told to ignore.
        preexec_fn=lambda: signal.signal(getattr(signal, name), signal.SIG_DFL),
    )
    ready.read_text()

    tally.send_signal(getattr(signal, name))
    stdout, _ = tally.communicate(timeout=20)

    os.close(held_open)
    os.close(stdin)
    assert stdout == "42 None\n"
    assert tally.returncode == 0


def test_a_command_that_does_not_exist_is_said_to_be_missing() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        ran("/nowhere/at/all")

    assert "FileNotFoundError" in refused.value.stderr
