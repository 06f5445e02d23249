"""A PostgreSQL with the schema, made once a run while tests are collected, and copied by whoever needs a server.

Making one takes a second and a half of the processor, a copy a tenth of that.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import asyncpg
from structlog.testing import capture_logs

from app.dev.cluster import find_data
from app.dev.embedded import EmbeddedPostgres
from app.store.migrate import migrate

_VARIABLE = "TEST_SERVER"
"""Names a folder to all processes of a run: ``postgres`` in it is the server, once nobody holds ``lock``."""


class ServerToCopy:
    """The server of a run that several processes share; begins to be made beside whatever its maker does then."""

    def __init__(self) -> None:
        self._folder = scratch_folder()
        self._lock = (self._folder / "lock").open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.environ[_VARIABLE] = str(self._folder)
        self._making = threading.Thread(target=self._make)
        self._making.start()

    def remove(self) -> None:
        """Once nobody copies it any more."""
        self._making.join()
        shutil.rmtree(self._folder)

    def _make(self) -> None:
        with self._lock:
            _make(EmbeddedPostgres(self._folder / "unfinished"))
            (self._folder / "unfinished").rename(self._folder / "postgres")


def scratch_folder() -> Path:
    """A new folder that every account can enter, as the one that runs PostgreSQL must where we are root.

    pytest's own is closed to others.
    """
    folder = Path(tempfile.mkdtemp(prefix="tally-"))
    folder.chmod(0o755)
    return folder


def server_with_schema(folder: Path) -> EmbeddedPostgres:
    """A new server at ``folder``, which there is not yet; its database has the schema, and it does not run."""
    server = EmbeddedPostgres(folder)
    made = os.environ.get(_VARIABLE)
    if made:
        with (Path(made) / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            data = find_data(Path(made) / "postgres")
            # Where the account cannot reach the folder its cluster is elsewhere: the copy would have the same.
            if data is not None and data.is_relative_to(made):
                subprocess.run(["cp", "-a", Path(made) / "postgres", folder], check=True)
                return server
    _make(server)
    return server


def _make(server: EmbeddedPostgres) -> None:
    server.start()
    try:
        with capture_logs():  # nobody else captures what is said while tests are collected
            migrate(server.owner_url())
        asyncio.run(_vacuum_catalog(server.superuser_url()))
    finally:
        server.stop()


async def _vacuum_catalog(url: str) -> None:
    """Keep what is known of the rows of PostgreSQL's catalog, which else the first to read them in each copy finds out.

    Tables of the ledger are as a migration leaves them: nobody knows how large they are.
    """
    connection = await asyncpg.connect(url)
    try:
        names = await connection.fetchval(
            "SELECT string_agg(oid::regclass::text, ', ') FROM pg_class"
            " WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind = 'r'"
        )
        await connection.execute(f"VACUUM (FREEZE, ANALYZE) {names}")
    finally:
        await connection.close()
