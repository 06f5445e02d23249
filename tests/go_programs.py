"""Programs in Go that others wrote, which tests run beside the ledger: compiled once, and kept in ``build/go``."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import until

BUILT = Path(__file__).parents[1] / "build" / "go"


def built(name: str, *commands: Sequence[str], files: Mapping[str, str] | None = None) -> Path:
    """The program ``name`` that ``commands`` make in a folder with these files, which is ``GOBIN`` too; kept for later
    runs under its files and commands."""
    assert shutil.which("go") is not None, "install Go 1.26 or newer: it builds what others wrote"
    given = repr((commands, sorted((files or {}).items())))
    program = BUILT / f"{name}-{hashlib.sha256(given.encode()).hexdigest()[:16]}"
    if not program.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as folder:
            for path, text in (files or {}).items():
                Path(folder, path).write_text(text)
            for command in commands:
                subprocess.run(command, cwd=folder, env={**os.environ, "GOBIN": folder}, check=True)
            Path(folder, name).rename(program)
    return program


@contextmanager
def process(
    *command: object, is_ready: Callable[[], bool], log: Path | None = None, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ready, and ends afterwards; its output is appended to ``log``."""
    with Path(log or os.devnull).open("ab") as output:
        started = subprocess.Popen(
            [*map(str, command)], stdout=output, stderr=output, env={**os.environ, **environment}
        )
    try:
        until(lambda: started.poll() is not None or is_ready(), f"{command[0]} is ready")
        assert started.poll() is None, f"it ended: {log and log.read_text()[-4000:]}"
        yield started
    finally:
        started.terminate()
        started.wait(timeout=30)


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def is_open(port: int) -> bool:
    """Whether something listens at ``port``."""
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
