"""What tests share: one real PostgreSQL a run, and a fresh migrated database for each test that asks."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import logging
import os
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import asyncpg
import httpcore
import httpx
import pytest
import uvloop
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from app.dev.cluster import DATABASE, OWNER, find_data
from app.dev.embedded import EmbeddedPostgres
from app.node.serving import GC_ALLOCATIONS
from app.store.sessions import NodeConnection
from tests.server_copies import ServerToCopy, scratch_folder, server_with_schema
from tests.workers import fork_workers

MEMORY = Path("/dev/shm")
"""Linux's file system in memory."""
MEMORY_BYTES_MIN = 6 << 30
"""Free room there with which the files of a run go to it: each of six PostgreSQL takes some 200 MB, tests as much."""
SETTINGS = {
    "autovacuum": "off",
    "fsync": "off",
    "full_page_writes": "off",
    "max_wal_size": "128MB",
    "min_wal_size": "32MB",
    "shared_buffers": "16MB",
}
"""Of the PostgreSQL of a run. Tests that kill the server have one of their own; here nothing is asked of its disk, and
nobody comes to a table whom a test did not send. Buffers are few as all are looked through when a database is made or
dropped."""

EXAMPLES_USUAL = 25
EXAMPLES = int(os.environ.get("TEST_EXAMPLES") or EXAMPLES_USUAL)
"""Examples of each property that names no number of its own; `make torture` draws many."""
settings.register_profile("tests", max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

LONGEST = (
    *("test_model", "test_embedded", "test_quorum_processes", "test_simulation", "test_lease", "test_truncation"),
    *("test_cluster", "test_tls", "test_keyed", "test_verify_page", "test_ledger_watch", "test_console"),
    *("test_scheduler", "test_full_walk", "test_webhooks", "test_replaced_tables", "test_witnesses", "test_watch"),
    *("test_notary", "test_package", "test_interrupt", "test_webhook_rows", "test_openapi", "test_guard"),
)
"""Names of files that take half a minute and more, or a multiple of what their size tells, those that wait among those
that compute; only those that have a Spark session are handed out before them."""
LONG_FIRST = ("pipeline", "crash", "clients")
"""Folders whose files take longest, in the order in which they are handed to workers. Those of the others follow side
by side, as far in the one as in the other: some wait for most of their time, some never do."""
ONE_JAVA = (
    *("test_archive_spark", "test_class_archive", "test_diff", "test_ledgers", "test_merge", "test_report_cli"),
    "test_report_spark",
    *("test_source_postgres", "test_source_spark", "test_spark", "test_stats", "test_stats_destination"),
    *("test_task_processes", "test_verify_cli", "test_verify_commitments", "test_verify_files", "test_verify_postgres"),
)
"""Names of files of ``tests/pipeline`` that have a Spark session: they go to one worker, for a Java takes seconds to
start, and some twenty more of the processor until it is fast."""

Case = TypeVar("Case")

_numbers = itertools.count(1)

_administering: dict[str, tuple[asyncio.Runner, asyncpg.Connection]] = {}
"""By URL of a server: a connection of its superuser, and the event loop it lives in."""


def _once(make: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    """What ``make`` makes, kept for who asks for the same under the same authorities."""
    kept = functools.cache(lambda _authorities, *given, **more: make(*given, **more))
    return lambda *given, **more: kept(os.environ.get("SSL_CERT_FILE"), *given, **more)


def _raise_what_cannot_be_formatted(_: logging.Handler, record: logging.LogRecord, /) -> None:
    """In place of printing that, and going on, which no test would see."""
    record.getMessage()


# Every client reads the certificate authorities that are trusted anew, 14 ms; nearly none of those here speaks TLS.
httpx.create_ssl_context = httpx._transports.default.create_ssl_context = _once(httpx.create_ssl_context)
# Each lock of a connection asks for the event loop's name by an import that fails, which searches all folders.
httpcore._synchronization.current_async_library = lambda: "asyncio"

setattr(logging.Handler, "handleError", _raise_what_cannot_be_formatted)  # noqa: B010

gc.disable()  # until all tests are collected


class OneJava(LoadFileScheduling):
    """Files are handed out one by one, but for those that share a Java."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "tests/pipeline with Spark" if _has_spark(Path(file)) else file


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Files of tests are in memory, where that has room: an fsync then costs no time, nor the system's half of it.

    What is synced, and in which order, tests ask of strace; what is left after a kill is the same in either place.
    """
    if "TMPDIR" not in os.environ and _takes_files(MEMORY):
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Before workers are started."""
    config.add_cleanup(ServerToCopy().remove)
    fork_workers(config.invocation_params.args, config.invocation_params.dir)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneJava | None:
    """What distributes tests among workers under ``--dist loadfile``."""
    return OneJava(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run in the event loop of ``tally serve``, in which a node costs a tenth less than in Python's own."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: whoever takes the last file should not keep the others waiting. Of most, their size tells."""
    files: dict[str, dict[Path, None]] = {}
    for item in items:
        files.setdefault(_folder(item.path), {})[item.path] = None
    ordered = [sorted(of_folder, key=_size, reverse=True) for of_folder in files.values()]
    shares = {file: at / len(of_folder) for of_folder in ordered for at, file in enumerate(of_folder)}
    items.sort(key=lambda item: (*_rank(item.path), shares[item.path]))
    for item in items:
        if "strace" in getattr(item, "fixturenames", ()):
            item.add_marker("debian_tools")


def pytest_collection_finish() -> None:
    """What is there now, half a million objects of modules and tests, stays: the collector need not look at it, and at
    the rest as seldom as in the service."""
    gc.set_threshold(GC_ALLOCATIONS, 20, 50)
    gc.enable()
    gc.freeze()


def _size(file: Path) -> int:
    return file.stat().st_size


@functools.cache
def _folder(file: Path) -> str:
    return file.relative_to(Path(__file__).parent).parts[0]


@functools.cache
def _rank(file: Path) -> tuple[int, int]:
    if _has_spark(file):
        return 0, 0
    if file.stem in LONGEST:
        return 1, LONGEST.index(file.stem)
    folder = _folder(file)
    return 2, LONG_FIRST.index(folder) if folder in LONG_FIRST else len(LONG_FIRST)


def _has_spark(file: Path) -> bool:
    return file.parent.name == "pipeline" and file.stem in ONE_JAVA


@pytest.fixture(autouse=True)
def user_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of the user who runs commands in a test, which begins without one; never that of whoever tests.

    Ledgers of tests share names and keys, so what one test has seen is not for the next.
    """
    folder = tmp_path_factory.getbasetemp() / f"state-{next(_numbers)}"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder / "tallystick"


@dataclass(frozen=True)
class Database:
    """URLs of one database, by who logs in."""

    name: str
    superuser_url: str
    owner_url: str
    service_url: str

    @classmethod
    def of(cls, server: EmbeddedPostgres, name: str) -> Database:
        """The database ``name`` of a server."""
        return cls(name, server.superuser_url(name), server.owner_url(name), server.service_url(name))


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    """A running PostgreSQL; its own database is the migrated template of others.

    Do not log in to that one.
    """
    folder = scratch_folder()
    server = server_with_schema(folder / "postgres")
    try:
        data = find_data(server.data_dir)
        assert data is not None
        with (data / "postgresql.conf").open("a") as configuration:
            configuration.writelines(f"{name} = '{value}'\n" for name, value in SETTINGS.items())
        server.start()
        # Where a test changes the schema below a running service, PostgreSQL ends the service's part of a deadlock.
        asyncio.run(execute(server.superuser_url("postgres"), "ALTER ROLE postgres SET deadlock_timeout = '1h'"))
        # Stretching a password takes a third of the time that a connection does; those here are random and need none.
        for url in (server.owner_url(), server.service_url(), server.superuser_url()):
            login = urlsplit(url)
            statement = f"SET scram_iterations = 1; ALTER ROLE {login.username} PASSWORD '{login.password}'"
            asyncio.run(execute(server.superuser_url("postgres"), statement))
        # Whoever logs in first after a start writes down what all that follow read, five milliseconds; copies have it.
        asyncio.run(execute(server.superuser_url(), "SELECT 1"))
        yield server
    finally:
        for runner, connection in _administering.values():
            connection.terminate()
            runner.close()
        server.remove()
        folder.rmdir()


@pytest.fixture
def empty_database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """A fresh database with nothing in it, owned by the owner; dropped afterwards."""
    with fresh_database(postgres, "template0") as database:
        yield database


@pytest.fixture
def database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """A fresh migrated database; dropped afterwards."""
    with fresh_database(postgres) as database:
        yield database


@pytest.fixture
async def superuser(database: Database) -> AsyncIterator[asyncpg.Connection]:
    """A superuser's connection to ``database``."""
    async with connected_to(database.superuser_url) as connection:
        yield connection


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[asyncpg.Pool]:
    """A pool of connections to ``database`` as the service has them."""
    async with asyncpg.create_pool(
        database.service_url, min_size=1, max_size=10, connection_class=NodeConnection
    ) as pool:
        yield pool


def spread(cases: Iterable[Case], at_most: int) -> list[Case]:
    """In `make test` so many of the cases of an exhaustive test, from the first to the last; in `make torture` all."""
    every = [*cases]
    if EXAMPLES > EXAMPLES_USUAL or len(every) <= at_most:
        return every
    return [every[at * (len(every) - 1) // (at_most - 1)] for at in range(at_most)]


def copy_of(template: str, name: str) -> str:
    """The statement that makes database ``name`` in the likeness of ``template``, to which nobody may be logged in.

    Its files are copied: four hundred, of a few pages each, cost a tenth of what they cost by way of the WAL.
    """
    return f"CREATE DATABASE {name} TEMPLATE {template} OWNER {OWNER} STRATEGY file_copy"


def _takes_files(folder: Path) -> bool:
    """Whether there is such a folder, with room for a run, whose files may be programs too."""
    if not os.access(folder, os.W_OK) or os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return False
    return shutil.disk_usage(folder).free >= MEMORY_BYTES_MIN


@contextmanager
def fresh_database(postgres: EmbeddedPostgres, template: str = DATABASE, name: str | None = None) -> Iterator[Database]:
    """A copy of ``template``, by default migrated; dropped afterwards. Without ``name`` it has one of its own."""
    name = name or f"test_{next(_numbers)}"
    administer(postgres, copy_of(template, name))
    try:
        yield Database.of(postgres, name)
    finally:
        administer(postgres, f"DROP DATABASE {name} WITH (FORCE)")


def administer(postgres: EmbeddedPostgres, statement: str) -> None:
    """Run a statement as superuser, on a connection that is kept for the next one; not in an event loop."""
    url = postgres.superuser_url("postgres")
    if url not in _administering:
        runner = asyncio.Runner()
        _administering[url] = runner, runner.run(asyncpg.connect(url))
    runner, connection = _administering[url]
    runner.run(connection.execute(statement))


@asynccontextmanager
async def connected_to(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of its own."""
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def execute(url: str, statement: str) -> None:
    """Run a statement on a connection of its own."""
    async with connected_to(url) as connection:
        await connection.execute(statement)


@pytest.fixture(scope="session")
def strace() -> str:
    """Path of strace, which makes single system calls of a child process fail."""
    path = shutil.which("strace")
    if path is None:
        pytest.fail("install strace; on Debian: sudo apt-get install strace", pytrace=False)
    return path
