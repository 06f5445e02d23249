"""Python as a process of its own, forked from one that has imported already what it needs.

Imports are most of what a short program costs, and a second of what a service does; tests start hundreds of both. So
each process of tests has forkers, ``python -m tests.forked``, which import once and are asked over a socket. What they
fork has its own arguments, environment, folder and files, and becomes a child of whoever asked: it is waited for,
signalled and killed like any other. strace can be told to trace it from its first step on.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.task_daemon import THREADLESS

TIMEOUT_S = 120.0
REQUEST_BYTES_MAX = 128 << 10
ROOT = Path(__file__).parents[1]

_SET_CHILD_SUBREAPER = 36
"""The option of prctl(2) by which orphans among our descendants become our children."""

_COLLAPSE = 25
"""The advice of madvise(2) by which memory is put together in large pages at once; older systems do not know it."""

_one_at_a_time = threading.Lock()


class Forked(subprocess.Popen[Any]):
    """``python`` with these arguments, in which ``first`` has run already. Of what ``Popen`` takes it heeds ``env``,
    ``cwd``, the three files and what concerns text.

    ``first`` is a program that imports, and starts no thread; a process of tests keeps one forker for each. ``env`` is
    all of the environment. ``tracer`` is a command of strace without what it traces; the child runs once that is
    attached, and has ended when strace has ended too.
    """

    def __init__(self, first: str, *arguments: str | Path, tracer: Sequence[str] = (), **given: Any) -> None:
        self._first = first
        self._tracer_command = [*tracer]
        self._tracer: subprocess.Popen[bytes] | None = None
        super().__init__([sys.executable, *map(str, arguments)], **given)

    def _execute_child(self, args: Any, executable: Any, *given: Any) -> None:
        """As the one above, which it is where there is no way to adopt what is forked."""
        if sys.platform != "linux":
            super()._execute_child(args, executable, *given)  # type: ignore[misc]
            return
        _, _, _, folder, environment, _, _, _, *ends = given[:14]
        _, p2cwrite, c2pread, _, errread, _ = ends
        files = [number if end == -1 else end for number, end in enumerate((ends[0], ends[3], ends[5]))]
        waits = bool(self._tracer_command)
        try:
            self.pid = _forked(self._first, args[1:], environment, folder, files, waits)
            self._child_created = True
            if waits:
                self._tracer = _traced(self._tracer_command, self.pid)
        finally:
            self._close_pipe_fds(ends[0], p2cwrite, c2pread, ends[3], errread, ends[5])  # type: ignore[attr-defined]

    def _handle_exitstatus(self, status: int, *given: Any) -> None:
        super()._handle_exitstatus(status, *given)  # type: ignore[misc]
        if self._tracer is not None:
            self._tracer.communicate()


def run_forked(
    first: str, *arguments: str | Path, said: str | None = None, check: bool = False, **given: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``Forked`` to its end, with ``said`` on its standard input."""
    pipe = subprocess.PIPE
    given = {
        "stdout": pipe,
        "stderr": pipe,
        "text": True,
        "stdin": subprocess.DEVNULL if said is None else pipe,
    } | given
    with Forked(first, *arguments, **given) as process:
        try:
            out, err = process.communicate(said, timeout=TIMEOUT_S)
        finally:
            process.kill()
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# --- the side that asks -------------------------------------------------------------------------------


def _forked(
    first: str, arguments: list[str], environment: dict[str, str] | None, folder: Any, files: list[int], waits: bool
) -> int:
    """Process id of a new child; one that ``waits`` is stopped until it is sent SIGCONT."""
    environment = dict(os.environ) if environment is None else environment
    request = json.dumps([arguments, environment, os.fspath(folder or Path.cwd()), waits])
    with _one_at_a_time:
        asked = _forker(first)
        _adopt(True)
        try:
            socket.send_fds(asked, [request.encode()], files)
            answer = asked.recv(8)
        finally:
            _adopt(False)
    assert answer, "the forker has ended; why stands on standard error, above"
    return int.from_bytes(answer, sys.byteorder)


@cache
def _forker(first: str) -> socket.socket:
    """Where to ask for a fork; the forker ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno()), first],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("TALLY_")} | THREADLESS,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    return ours


def _adopt(orphans: bool) -> None:
    """Whether orphans among our descendants become our children, as the forker's do at once."""
    assert ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0) == 0


def _traced(command: list[str], pid: int) -> subprocess.Popen[bytes]:
    """strace, attached to the stopped process ``pid``, which then runs."""
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    tracer = subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE)
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    os.kill(pid, signal.SIGCONT)
    assert said.endswith(b" attached\n"), said + tracer.stderr.read()
    return tracer


# --- the forker ---------------------------------------------------------------------------------------


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


def _become(request: bytes, files: list[int]) -> list[str]:
    """Be a process that was started with what ``request`` says, and has ``files`` as its first three; its arguments."""
    arguments, environment, folder, waits = json.loads(request)
    for number, descriptor in enumerate(files):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    # Whoever runs the tests in the background of a shell has it ignored, and what is forked inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    if waits:
        os.kill(os.getpid(), signal.SIGSTOP)
    return list(arguments)


def _run(arguments: list[str]) -> None:
    """What ``python`` does with these arguments."""
    kind, *more = arguments
    if kind == "-m":
        name, *sys.argv[1:] = more
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, *sys.argv[1:] = more
        sys.argv[0] = kind
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = arguments
        runpy.run_path(kind, run_name="__main__")


def _leave(code: Any) -> None:
    """End as the interpreter does, but for taking all modules apart, which costs more than most programs do.

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


def _in_large_pages() -> None:
    """Move what is in memory into pages of 2 MiB, where the system has such: a fork copies where each page is."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, may, _, _, inode, *name = line.split()
        if may == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in where.split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _COLLAPSE)


def _main(descriptor: int, first: str) -> None:
    exec(first, {"__name__": "first"})
    gc.collect()
    gc.freeze()
    _in_large_pages()
    assert len(os.listdir("/proc/self/task")) == 1, "a process of several threads cannot be forked"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with whoever asks
    try:
        _run(_become(*_fork_for_each(socket.socket(fileno=descriptor))))
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            _leave(ended.code or 0)
        raise
    _leave(0)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
