"""A streaming hot standby of the embedded PostgreSQL, made with its own programs and run by its own account."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from app.dev.account import reachable_folder
from app.dev.cluster import free_port, open_cluster
from app.dev.embedded import EmbeddedPostgres
from tests.waiting import until

READY_TIMEOUT_S = 60


class Standby:
    """One hot standby of ``primary``, on a port of its own. Replays until told to pause."""

    def __init__(self, primary: EmbeddedPostgres, home: Path) -> None:
        self._primary = primary
        self._cluster = open_cluster(primary.data_dir)
        self._data = home / "data"
        self._log = primary.data_dir / "standby.log"
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def copy(self) -> None:
        """Take the base backup, with the settings that make it follow the primary."""
        program = self._cluster.binaries / "pg_basebackup"
        url = self._primary.superuser_url("postgres")
        self._cluster.account.run(
            [str(program), "-d", url, "-D", str(self._data), "--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        )

    def start(self) -> None:
        """Start the server and wait until it answers."""
        # Chosen when it is listened on at once; kept when the server starts again.
        self._port = self._port or free_port()
        command = [str(self._cluster.binaries / "postgres"), "-D", str(self._data), "-p", str(self._port)]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        with self._log.open("ab") as log:
            process = self._process = self._cluster.account.spawn(command, log)
        until(lambda: process.poll() is not None or self._answers(), f"the standby answers, see {self._log}")
        assert process.poll() is None, self._log.read_text()[-2000:]

    def kill(self) -> None:
        """End the server at once, as a power cut would."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGQUIT)
        self._process.wait(READY_TIMEOUT_S)
        self._process = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and not killed since."""
        return self._process is not None

    def url(self, url: str) -> str:
        """The URL of a database and login of the primary, here."""
        parts = urlsplit(url)
        return parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{self._port}")).geturl()

    async def pause(self) -> None:
        """Replay no more, once this returns: what the primary commits now is not seen here."""
        async with self._superuser() as connection:
            await connection.execute("SELECT pg_wal_replay_pause()")
            while await connection.fetchval("SELECT pg_get_wal_replay_pause_state()") != "paused":
                pass

    async def resume(self) -> None:
        """Replay again."""
        async with self._superuser() as connection:
            await connection.execute("SELECT pg_wal_replay_resume()")

    def _superuser(self) -> asyncpg.Pool:
        return asyncpg.create_pool(self.url(self._primary.superuser_url("postgres")), min_size=1, max_size=1)

    def _answers(self) -> bool:
        async def ask() -> None:
            await (await asyncpg.connect(self.url(self._primary.superuser_url("postgres")))).close()

        try:
            asyncio.run(ask())
        except (OSError, asyncpg.CannotConnectNowError):
            return False
        return True


@contextmanager
def standby_of(primary: EmbeddedPostgres) -> Iterator[Standby]:
    """A running standby; it and its files are gone afterwards."""
    home = reachable_folder(primary.data_dir / "standby")
    standby = Standby(primary, home)
    try:
        standby.copy()
        standby.start()
        yield standby
    finally:
        if standby.is_running:
            standby.kill()
        shutil.rmtree(home)
