"""A PostgreSQL 18 of our own, for ``make run`` and the tests: no server to install, no rights to ask for.

The folder given holds::

    credentials.json   0600  passwords of the three logins, and the port
    cluster/           0700  owned by the account that PostgreSQL runs as; its ``data/`` is the cluster
    location           instead of cluster/: path of the folder that takes its place
    postgresql.log     0600  what the server says
    start.lock         flock, exclusive: held while somebody starts or stops the server
    users.lock         flock, shared: held by every process that uses the server; the last one stops it

PostgreSQL refuses to run as root, so a root process runs it as an account of its own
(``app.dev.account``), which may be unable to reach the folder. Then the cluster is placed where the account can reach
it, and ``location`` says where. Permissions of existing folders are never changed.

The server outlives a killed process of ours, and the next start takes it over. It listens on 127.0.0.1 alone, asks for
passwords, and runs with fsync on.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from app.dev.cluster import (
    DATABASE,
    OWNER,
    SERVICE,
    SUPERUSER,
    Cluster,
    Credentials,
    find_data,
    free_port,
    is_free,
    open_cluster,
    read_credentials,
    write_credentials,
)
from ledger.errors import StartRefusedError

READY_TIMEOUT_S = 300
"""How long to wait for a server that is up but still replays its WAL."""
STOP_TIMEOUT_S = 60
"""How long a fast stop may take before an immediate one, which the next start recovers from."""
PORT_WAIT_S = 3
"""How long to wait for the last port, which a killed server holds for a moment, before taking another."""
LAUNCHES_MAX = 100
"""Launches before giving up on a taken port, or on processes that a killed server left behind."""
LOG_BYTES_MAX = 16 << 20
"""Size at which the next launch rotates ``postgresql.log``; one older file is kept."""
_LOG_TAIL_CHARACTERS = 2000
_POLL_S = 0.02
_RELAUNCH_S = 0.1


class EmbeddedPostgres:
    """One PostgreSQL server below ``data_dir``. Not for use from several threads at once.

    ``programs`` is the folder of another PostgreSQL's programs, which the server's account must be able to execute.
    """

    def __init__(self, data_dir: Path, programs: Path | None = None) -> None:
        self.data_dir = data_dir.resolve()
        self._programs = programs
        self._process: subprocess.Popen[bytes] | None = None
        self._users_lock: IO[bytes] | None = None

    def start(self) -> None:
        """Make the cluster if there is none, start the server if it is down, and wait until it is ready.

        Raises:
            StartRefusedError: it cannot run here; the text says why and what to do.
        """
        with self._exclusive():
            if self._users_lock is None:
                self._users_lock = (self.data_dir / "users.lock").open("ab")
                fcntl.flock(self._users_lock, fcntl.LOCK_SH)
            try:
                self._make_sure_it_runs()
            except BaseException:
                self._leave()
                raise

    def ensure_alive(self) -> bool:
        """Restart the server if it died; True if it had. The port, and so the URLs, change only if the port is
        taken."""
        if self.postmaster_pid() is not None:
            return False
        with self._exclusive():
            return self._make_sure_it_runs()

    def stop(self) -> None:
        """Stop the server, unless another process still uses it. Does nothing when not started."""
        if self._users_lock is None:
            return
        with self._exclusive():
            self._leave()

    def remove(self) -> None:
        """Stop a scratch server and remove its folder and its cluster, wherever it was placed.

        Raises:
            StartRefusedError: another process uses it; nothing was changed.
        """
        self.stop()
        if self.postmaster_pid() is not None:
            raise StartRefusedError(f"another process uses the embedded PostgreSQL in {self.data_dir}")
        if (data := find_data(self.data_dir)) is not None:
            shutil.rmtree(data.parent)
        shutil.rmtree(self.data_dir)

    def superuser_url(self, database: str = DATABASE) -> str:
        """URL of the superuser, for psql and for tests; works in any process that may read the folder."""
        return self._credentials().url(SUPERUSER, database)

    def owner_url(self, database: str = DATABASE) -> str:
        """URL of the login that owns schema and tables and runs the migrations."""
        return self._credentials().url(OWNER, database)

    def service_url(self, database: str = DATABASE) -> str:
        """URL of the login that the service works with; it owns nothing."""
        return self._credentials().url(SERVICE, database)

    def postmaster_pid(self) -> int | None:
        """Process id of the running server, whichever process started it; None when it is down."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        data = find_data(self.data_dir)
        lines = _pid_file_lines(data)
        if data is None or not lines:
            return None
        pid = int(lines[0])
        return pid if _serves(pid, data) else None

    def _credentials(self) -> Credentials:
        credentials = read_credentials(self.data_dir)
        if credentials is None:
            raise StartRefusedError(
                f"there is no embedded PostgreSQL in {self.data_dir}; `make run` or `tally dev` makes one"
            )
        return credentials

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            lock = (self.data_dir / "start.lock").open("ab")
        except OSError as error:
            raise StartRefusedError(
                f"{error.filename} cannot be written: {error.strerror}. Choose another folder with TALLY_DATA_DIR."
            ) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_sure_it_runs(self) -> bool:
        """True if the server was down. The start lock is held."""
        cluster = open_cluster(self.data_dir, self._programs)
        if self.postmaster_pid() is not None and self._wait_until_ready(cluster.data):
            return False
        self._launch(cluster)
        return True

    def _launch(self, cluster: Cluster) -> None:
        port = cluster.credentials.port
        deadline = time.monotonic() + PORT_WAIT_S
        while not is_free(port) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        log_path = self.data_dir / "postgresql.log"
        if log_path.exists() and log_path.stat().st_size > LOG_BYTES_MAX:
            log_path.rename(log_path.with_suffix(".log.1"))
        said = ""
        for _ in range(LAUNCHES_MAX):
            if not is_free(port):
                port = free_port()
                write_credentials(self.data_dir, msgspec.structs.replace(cluster.credentials, port=port))
            _remove_misleading_pid_file(cluster.data)
            with open(log_path, "ab", opener=_open_private) as log:
                said_from = log.tell()
                command = [str(cluster.binaries / "postgres"), "-D", str(cluster.data), "-p", str(port)]
                command += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
                self._process = cluster.account.spawn(command, log)
            if self._wait_until_ready(cluster.data):
                return
            said = log_path.read_bytes()[said_from:].decode(errors="replace").strip()
            if "still in use" not in said and "Address already in use" not in said:
                break
            time.sleep(_RELAUNCH_S)
        # On a full disk the server cannot write its log.
        said = said or f"nothing; {shutil.disk_usage(self.data_dir).free:,} bytes are free on its disk"
        raise StartRefusedError(
            f"the embedded PostgreSQL does not start; {log_path} says:\n{said[-_LOG_TAIL_CHARACTERS:]}"
        )

    def _wait_until_ready(self, data: Path) -> bool:
        """True once the server takes connections, False if it ended before."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._living_pid() is None:
                return False
            # Both from one read: a killed server left a file that says ready, which this one rewrites.
            lines = _pid_file_lines(data)
            if len(lines) >= 8 and lines[7].strip() == "ready" and _serves(int(lines[0]), data):
                return True
            time.sleep(_POLL_S)
        raise StartRefusedError(
            f"the embedded PostgreSQL is not ready after {READY_TIMEOUT_S} s; see {self.data_dir / 'postgresql.log'}"
        )

    def _leave(self) -> None:
        """Release the server, and stop it if no other process uses it. The start lock is held."""
        assert self._users_lock is not None
        try:
            fcntl.flock(self._users_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        finally:
            self._users_lock.close()
            self._users_lock = None
        for how in (signal.SIGINT, signal.SIGQUIT):
            self._end_server(how)

    def _end_server(self, how: signal.Signals) -> None:
        """Send the signal, if there is a server, and wait for its end, at most a bounded time."""
        pid = self._living_pid()
        if pid is None:
            return
        os.kill(pid, how)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        # It removes its pid file, and then loses its command line, a moment before it ends.
        while self._living_pid() is not None or _is_running(pid):
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)

    def _living_pid(self) -> int | None:
        """As ``postmaster_pid``; also finds a server of ours that has not yet written its pid file."""
        pid = self.postmaster_pid()
        return self._process.pid if self._process is not None else pid


def _open_private(path: str, flags: int) -> int:
    """Open a file and make it private (0600): it has failed statements with their data."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _pid_file_lines(data: Path | None) -> list[str]:
    """Lines of ``postmaster.pid``: process id first, state last (eighth), when there is a server."""
    if data is None:
        return []
    try:
        return os.fsdecode((data / "postmaster.pid").read_bytes()).splitlines()
    except FileNotFoundError:
        return []


def _serves(pid: int, data: Path) -> bool:
    """Whether the process is the server of ``data``: not a zombie, nor one that got the number later."""
    return b" -D %b -p " % os.fsencode(data) in _command_line(pid)


def _is_running(pid: int) -> bool:
    """Whether the process runs. A zombie does not: its adoptive parent may reap it late."""
    return _process_file(pid, "stat").rpartition(b") ")[2][:1] not in (b"", b"Z", b"X")


def _command_line(pid: int) -> bytes:
    """Command line of a process with spaces between arguments; empty for a zombie, and if there is no such process."""
    return _process_file(pid, "cmdline").replace(b"\0", b" ")


def _process_file(pid: int, name: str) -> bytes:
    """Content of a file of a process in /proc; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _remove_misleading_pid_file(data: Path) -> None:
    """Remove a pid file that names a zombie or a foreign process, which PostgreSQL would take for a server.

    If a server runs after all, its shared memory segment keeps a second one out.
    """
    lines = _pid_file_lines(data)
    if lines and Path("/proc", lines[0].strip()).exists() and b"postgres" not in _command_line(int(lines[0])):
        (data / "postmaster.pid").unlink()
