"""Services under test, each in a process of its own: ``tally serve``, or a baseline that is served the same way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.row import BenchmarkError, expect

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
LOG_TAIL_CHARACTERS = 2000
SAFEKEEPERS = 3
_ANSWERS_AT = re.compile(r"answers at (http://[^\s,]+)")
_HERE = str(Path(__file__).resolve().parent.parent)


class _Process:
    """A started process, what it said on standard error so far, and the URL it named there."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.upper().startswith("TALLY_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *module.split()],
            cwd="/",
            env={**kept, "PYTHONPATH": _HERE, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        self.url = ""
        self.ready = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said = (self.said + line)[-LOG_TAIL_CHARACTERS:]
            found = _ANSWERS_AT.search(line)
            if found is not None:
                self.url = found[1]
                self.ready.set()
        self.ready.set()


@contextmanager
def served(module: str, environment: Mapping[str, str]) -> Iterator[str]:
    """The base URL of ``python -m module``, which says ``answers at URL``; stopped by SIGTERM on leaving.

    The process sees no ``TALLY_`` variable but those in ``environment``, so that all else is as by default.

    Raises:
        BenchmarkError: it did not start, or did not end with exit code 0.
    """
    running = _Process(module, environment)
    try:
        is_ready = running.ready.wait(READY_TIMEOUT_S) and running.url
        expect(bool(is_ready), f"{module} did not start:\n{running.said}")
        yield running.url
    finally:
        running.process.send_signal(signal.SIGTERM)
        try:
            code = running.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            running.process.kill()
            code = running.process.wait()
        running.reader.join()
    if code != 0:
        raise BenchmarkError(f"{module} ended with exit code {code}:\n{running.said}")


@contextmanager
def tally_serve(database_url: str, data_dir: Path, settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """The base URL of ``tally serve`` with every setting at its default but where database, data and port are, and
    ``settings``."""
    environment = {"TALLY_DATABASE_URL": database_url, "TALLY_DATA_DIR": str(data_dir), "TALLY_PORT": "0"}
    with served("cli serve", {**environment, **(settings or {})}) as url:
        yield url


@contextmanager
def safekeepers(folder: Path) -> Iterator[list[str]]:
    """The addresses of three ``tally safekeeper serve``."""
    with ExitStack() as stack:
        addresses = []
        for number in range(SAFEKEEPERS):
            command = [sys.executable, "-m", "cli", "safekeeper", "serve", "--listen", "127.0.0.1:0"]
            process = stack.enter_context(
                subprocess.Popen(
                    [*command, "--dir", str(folder / f"keeper-{number}")], cwd=_HERE, stderr=subprocess.PIPE, text=True
                )
            )
            stack.callback(process.terminate)
            assert process.stderr is not None
            line = next(line for line in process.stderr if "safekeeper_ready" in line)
            addresses.append(next(word for word in line.replace('"', " ").split() if word.startswith("127.0.0.1:")))
        yield addresses
