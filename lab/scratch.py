"""A service of its own in a folder of its own, for demonstrations: started, waited for, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import httpx

from cli.serve import embedded_postgres
from ledger.errors import StartRefusedError
from terminal import stop_signals
from terminal.outcome import CommandExit

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0
SIGNAL_BASE = 128
"""An exit code that names a signal is so much more than its number."""
_POLL_S = 0.1
_LOG_TAIL_LINES = 10


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder that is gone afterwards, and with it a PostgreSQL cluster that had to live elsewhere.

    A signal that asks to stop unwinds from now on.
    """
    stop_signals.take(_unwind)
    with tempfile.TemporaryDirectory(prefix="tally-scratch-") as name:
        folder = Path(name)
        # The account that runs PostgreSQL when we are root may pass through, to what is its own inside.
        folder.chmod(0o711)
        try:
            yield folder
        finally:
            postgres = embedded_postgres(folder)
            if postgres.data_dir.exists():
                postgres.remove()


def _unwind(number: int, _frame: FrameType | None) -> NoReturn:
    raise CommandExit(SIGNAL_BASE + number)


@contextmanager
def scratch_service(folder: Path) -> Iterator[str]:
    """The URL of ``tally dev`` on ``folder``, ready; stopped, PostgreSQL too, when left.

    No setting of this process reaches it: neither ``TALLY_`` variables nor a ``tally.toml``.

    Raises:
        StartRefusedError: it did not become ready; the text has the end of its log.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TALLY_")}
    # Of the ports the system has one free; one that is chosen here may be another's by the time it is listened on.
    environment |= {"TALLY_DATA_DIR": str(folder), "TALLY_PORT": "0"}
    log_file = folder / "service.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli", "dev"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield _wait_ready(process, log_file)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], log_file: Path) -> str:
    """The URL of the service, once it is ready."""
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < give_up_at:
        if (url := _told_url(log_file)) is not None and _is_ready(url):
            return url
        time.sleep(_POLL_S)
    tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
    raise StartRefusedError(f"the scratch service did not become ready; the end of its log:\n{tail}")


def _told_url(log_file: Path) -> str | None:
    """Where the service says that it answers, None as long as it does not."""
    *lines, _unfinished = log_file.read_bytes().split(b"\n")
    for line in lines:
        if line.startswith(b"{") and (said := json.loads(line)).get("event") == "service_ready":
            return str(said["url"])
    return None


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False
