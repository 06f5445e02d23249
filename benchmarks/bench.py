"""What rows share: one folder, one PostgreSQL, fresh databases, and a checkpoint before each run."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import asyncpg
from rich.console import Console

from app.dev.cluster import DATABASE, OWNER, find_data
from app.dev.embedded import EmbeddedPostgres
from app.store.migrate import migrate
from benchmarks.machine import check_disk
from benchmarks.row import BenchmarkError, expect

Value = TypeVar("Value")

YARDSTICKS = Path(__file__).resolve().parent / "yardsticks"
DURABLE_SETTINGS = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
"""What both sides must run with, asked of every database as the service's login sees it."""


class Database(NamedTuple):
    """One fresh, migrated database: its URLs by who logs in."""

    superuser_url: str
    service_url: str


class Bench:
    """The ground under all rows of one run; leave it by ``close``."""

    def __init__(self, parent: Path, console: Console) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
        # The account that runs PostgreSQL for root must be able to enter.
        self.folder.chmod(0o755)
        self._console = console
        self._numbers = itertools.count(1)
        self._postgres: EmbeddedPostgres | None = None
        check_disk(self.folder)

    def close(self) -> None:
        """Stop PostgreSQL and remove the folder."""
        if self._postgres is not None:
            self._postgres.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def say(self, text: str) -> None:
        """Progress, for whoever watches."""
        self._console.print(f"  {text}", highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def fresh_folder(self) -> Iterator[Path]:
        """An empty folder on the disk under test; removed afterwards."""
        folder = self.folder / f"run-{next(self._numbers)}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    @cached_property
    def postgres(self) -> EmbeddedPostgres:
        """The one server of both sides; its own database is migrated and the template of all others."""
        server = EmbeddedPostgres(self.folder / "postgres")
        self._postgres = server
        server.start()
        migrate(server.owner_url())
        data = find_data(server.data_dir)
        assert data is not None
        check_disk(self.folder, data)
        return server

    def start_postgres(self) -> None:
        """Have the one server run."""
        _ = self.postgres

    @contextmanager
    def fresh_database(self) -> Iterator[Database]:
        """A fresh migrated database, durable settings asserted, behind a checkpoint; dropped afterwards."""
        server = self.postgres
        name = f"bench_{next(self._numbers)}"
        maintenance_url = server.superuser_url("postgres")
        execute(maintenance_url, f"CREATE DATABASE {name} TEMPLATE {DATABASE} OWNER {OWNER}")
        try:
            service_url = server.service_url(name)
            wait_for(_check_settings(service_url))
            self.checkpoint()
            yield Database(server.superuser_url(name), service_url)
        finally:
            execute(maintenance_url, f"DROP DATABASE {name} WITH (FORCE)")

    @contextmanager
    def yardstick_database(self, schema: str) -> Iterator[str]:
        """As ``fresh_database``, with the frozen ``yardsticks/{schema}.sql``; gives the URL of its superuser."""
        server, name = self.postgres, f"yardstick_{next(self._numbers)}"
        maintenance_url = server.superuser_url("postgres")
        execute(maintenance_url, f"CREATE DATABASE {name} TEMPLATE template0")
        try:
            url = server.superuser_url(name)
            execute(url, (YARDSTICKS / f"{schema}.sql").read_text())
            wait_for(_check_settings(url))
            self.checkpoint()
            yield url
        finally:
            execute(maintenance_url, f"DROP DATABASE {name} WITH (FORCE)")

    def checkpoint(self) -> None:
        """Let what earlier work left in PostgreSQL's buffers go to disk before the clock starts."""
        execute(self.postgres.superuser_url("postgres"), "CHECKPOINT")

    def postgres_pid(self) -> int:
        """The process that all others of the server are below."""
        data = find_data(self.postgres.data_dir)
        assert data is not None
        return int((data / "postmaster.pid").read_text().split()[0])

    def postgres_version(self) -> str | None:
        """Version of the server, None when no row needed one."""
        if self._postgres is None:
            return None
        return str(fetch_value(self._postgres.superuser_url("postgres"), "SHOW server_version"))

    def postgres_fsyncs(self) -> int:
        """Fsyncs of PostgreSQL's own WAL so far; only differences mean something."""
        query = "SELECT coalesce(sum(fsyncs), 0)::bigint FROM pg_stat_io WHERE object = 'wal'"
        found = fetch_value(self.postgres.superuser_url("postgres"), query)
        assert isinstance(found, int)
        return found


def wait_for(work: Coroutine[Any, Any, Value]) -> Value:
    """Run ``work`` in an event loop of its own."""
    return asyncio.run(work)


def execute(url: str, *statements: str) -> None:
    """Run ``statements``, each by itself."""

    async def run() -> None:
        connection = await asyncpg.connect(url)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    wait_for(run())


def fetch_value(url: str, query: str) -> object:
    """First column of the first row."""

    async def run() -> object:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetchval(query)
        finally:
            await connection.close()

    return wait_for(run())


def expect_fsyncs(bench: Bench, before: int, at_least: int, who: str) -> None:
    """PostgreSQL synced its WAL at least so often since ``before``; its count may lag a moment.

    Raises:
        BenchmarkError: it did not.
    """
    found = bench.postgres_fsyncs() - before
    expect(found >= at_least, f"{who}: PostgreSQL synced its WAL {found} times, at least {at_least} were expected")


async def _check_settings(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for name, wanted in DURABLE_SETTINGS.items():
            found = await connection.fetchval(f"SHOW {name}")
            if found != wanted:
                raise BenchmarkError(f"PostgreSQL has {name} = {found}; the comparison needs {wanted}")
    finally:
        await connection.close()
