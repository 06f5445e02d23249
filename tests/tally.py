"""``tally`` as a process of its own, forked from one that has imported its commands already.

Imports are most of what a short command costs, and a second of what a service does; tests start hundreds of both. So
each process of tests has a forker, ``python -m tests.tally``, which imports them once and is asked over a socket. What
it forks has its own arguments, environment, folder and files, and becomes a child of whoever asked: it is waited for,
signalled and killed like any other. That commands find what they import is no part of this: each file of tests that is
about starting, such as ``tests/app/test_cli_outcome.py``, starts ``COLD`` ones too, and so does whatever runs ``tally``
below another program.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

COLD = (sys.executable, "-m", "app.cli")
"""``tally`` that imports by itself."""
TIMEOUT_S = 120.0
REQUEST_BYTES_MAX = 128 << 10
ROOT = Path(__file__).parents[1]

_SET_CHILD_SUBREAPER = 36
"""The option of prctl(2) by which orphans among our descendants become our children."""
_LAZY = (
    "alembic.command",
    "app.main",
    "asyncpg",
    "certifi",
    "cryptography.hazmat.primitives.ciphers.aead",
    "encodings.idna",
    "httpcore",
    "rich.markdown",
    "typer._adapters",
    "typer.rich_utils",
    "uvicorn.lifespan.off",
    "uvloop",
)
"""What commands import when they run."""

_one_at_a_time = threading.Lock()


class Tally(subprocess.Popen[Any]):
    """``tally`` with these arguments, else as ``Popen``; ``env`` is all of its environment."""

    def __init__(self, *arguments: str | Path, **given: Any) -> None:
        super().__init__([*COLD, *map(str, arguments)], **given)

    def _execute_child(self, args: Any, executable: Any, *given: Any) -> None:
        """As the one above, which it is where there is no way to adopt what is forked."""
        if sys.platform != "linux":
            super()._execute_child(args, executable, *given)  # type: ignore[misc]
            return
        _, _, _, folder, environment, _, _, _, *ends = given[:14]
        _, p2cwrite, c2pread, _, errread, _ = ends
        files = [number if end == -1 else end for number, end in enumerate((ends[0], ends[3], ends[5]))]
        try:
            self.pid = _forked([str(argument) for argument in args[len(COLD) :]], environment, folder, files)
            self._child_created = True
        finally:
            self._close_pipe_fds(ends[0], p2cwrite, c2pread, ends[3], errread, ends[5])  # type: ignore[attr-defined]


def run_tally(
    *arguments: str | Path, said: str = "", folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``tally`` to its end, with ``said`` on its standard input; of TALLY_* it has only what is given here."""
    pipe = subprocess.PIPE
    with Tally(
        *arguments, env=bare_environment() | environment, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            out, err = process.communicate(said, timeout=TIMEOUT_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def bare_environment() -> dict[str, str]:
    """The environment without anything that is meant for ``tally``."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TALLY_")}


# --- the side that asks -------------------------------------------------------------------------------


def _forked(arguments: list[str], environment: dict[str, str] | None, folder: Any, files: list[int]) -> int:
    """Process id of a new child that is ``tally``."""
    request = json.dumps(
        [arguments, dict(os.environ) if environment is None else environment, os.fspath(folder or Path.cwd())]
    )
    with _one_at_a_time:
        asked = _forker()
        _adopt(True)
        try:
            socket.send_fds(asked, [request.encode()], files)
            answer = asked.recv(8)
        finally:
            _adopt(False)
    assert answer, "the forker has ended; it said why"
    return int.from_bytes(answer, sys.byteorder)


@cache
def _forker() -> socket.socket:
    """Where to ask for a fork; the forker ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.tally", str(theirs.fileno())],
            cwd=ROOT,
            env=bare_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    return ours


def _adopt(orphans: bool) -> None:
    """Whether orphans among our descendants become our children, as the forker's do at once."""
    assert ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0) == 0


# --- the forker ---------------------------------------------------------------------------------------


def _import_all() -> None:
    from app.cli import Commands

    for name in (*(entry.module for entry in Commands.ENTRY_POINTS.values()), *_LAZY):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, "a process of several threads cannot be forked"


def _fork_for_each(asked: socket.socket) -> tuple[bytes, list[int]]:
    """Fork for each request. Returns in the children, each with its request; ends with whoever asks."""
    while True:
        request, files, _, _ = socket.recv_fds(asked, REQUEST_BYTES_MAX, 3)
        if not request:
            sys.exit()
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                for descriptor in (told, tell, asked.detach()):
                    os.close(descriptor)
                return request, files
            os.write(tell, array.array("q", [child]).tobytes())
            # The child is an orphan now.
            os._exit(0)
        os.waitpid(between, 0)
        asked.send(os.read(told, 8))
        for descriptor in (told, tell, *files):
            os.close(descriptor)


def _become(request: bytes, files: list[int]) -> None:
    """Be a process that was started with what ``request`` says, and has ``files`` as its first three."""
    arguments, environment, folder = json.loads(request)
    for number, descriptor in enumerate(files):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(folder)
    sys.argv = ["tally", *arguments]


def _leave(code: Any) -> None:
    """End as the interpreter does, but for taking all modules apart, which costs more than most commands do.

    Returns where what was printed cannot be written, which is for the interpreter to tell.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


if __name__ == "__main__":
    _import_all()
    _become(*_fork_for_each(socket.socket(fileno=int(sys.argv[1]))))
    try:
        importlib.import_module("app.cli").main()
    except SystemExit as ended:
        _leave(ended.code)
        raise
