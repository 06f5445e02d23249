"""SIGTERM and the like: not ready, open requests answered, everything flushed and chained, exit code 0 in time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import asyncpg
import psutil
import pytest
import uvloop

from app.dev.embedded import EmbeddedPostgres
from cli.serve import StopWhileStarting
from terminal import stop_signals
from terminal.outcome import CommandExit
from tests.app.chains import until
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.load import Book, Load, http_session
from tests.crash.proof import key_recorded, prove, verified_by_service, wal_folder
from tests.crash.serve_process import WAIT_S
from tests.crash.test_kill_postgres import kill_server
from tests.crash.writer import Writer, writer
from tests.processes import runs
from tests.server_copies import server_with_schema
from wal import control
from wal.reader import read

SETTINGS = {"shutdown_grace": "60s"}
AT_ONCE_S = 30.0
"""What a stop takes at the most that does not use up the budget of ``SETTINGS``, on a busy machine."""
SHORT = {"shutdown_grace": "6s"}
GRACE_S = 20.0
"""The budget of ``SHORT``, and what a busy machine adds to it."""

EACH = pytest.mark.parametrize("number", stop_signals.STOP_SIGNALS, ids=lambda number: number.name)


def nothing_is_left_to_chain(data_dir: Path) -> None:
    """After a clean stop the WAL ends where the chain ends."""
    folder = wal_folder(data_dir)
    kept = control.load(folder)
    assert kept is not None
    last_lsn = sum(1 for _ in read(folder, 1, folder.name))
    assert (kept.durable_lsn, kept.chained_lsn) == (last_lsn, last_lsn)


async def durable_after_the_start(one: Writer) -> int:
    """How far the WAL is durable once a start writes nothing more into it by itself."""
    await key_recorded(one.session, one.url)
    return (await one.positions())["durable_lsn"]


async def test_a_stop_under_load_loses_nothing_acknowledged_and_leaves_a_clean_start(
    tmp_path: Path, database: Database, launch: Launch, seed: int
) -> None:
    load, data_dir = Load(random.Random(seed)), tmp_path / "node"
    child = await launch(data_dir, database.service_url, **SETTINGS)
    url = await child.ready()
    async with load.on(url):
        await load.book.more_acknowledged(200)
        child.signal(signal.SIGINT)
        # make passes on to its child what the terminal has sent it already.
        child.signal(signal.SIGINT)
        assert await child.ended(AT_ONCE_S) == 0
    nothing_is_left_to_chain(data_dir)
    child = await launch(data_dir, database.service_url, **SETTINGS)
    url = await child.ready()
    assert child.events("wal_recovery_cut_torn_tail") == []
    await load.repeat_keyed(url)
    await verified_by_service(url, load.book.tenants())
    assert await child.terminate(AT_ONCE_S) == 0
    await prove(load.book, database.superuser_url, [wal_folder(data_dir)])


async def test_a_stop_answers_the_open_requests_and_takes_no_new_ones(
    tmp_path: Path, database: Database, superuser: asyncpg.Connection, launch: Launch
) -> None:
    book = Book()
    child = await launch(tmp_path / "node", database.service_url, **SETTINGS)
    url = await child.ready()
    async with writer(url, book) as one, writer(url, book) as other:
        await one.created("GLOBAL")
        durable_lsn = await durable_after_the_start(one)
        await superuser.execute("BEGIN; LOCK scheduler.chain_heads IN EXCLUSIVE MODE")
        waiting = [asyncio.ensure_future(one.created("GLOBAL")) for _ in range(5)]
        waiting.append(asyncio.ensure_future(one.created("GLOBAL", key="keyed")))
        await one.until("durable_lsn", durable_lsn + len(waiting))
        child.signal(signal.SIGTERM)
        # From ready over not ready to gone, and never back.
        said = [status async for status in readiness_until_gone(other)]
        assert sorted(said) == said
        assert set(said) <= {200, 503}
        with pytest.raises(aiohttp.ClientError):
            await other.create("LOCAL")
        assert not any(request.done() for request in waiting)
        await superuser.execute("ROLLBACK")
        await asyncio.gather(*waiting)
        assert await child.ended(AT_ONCE_S) == 0
    nothing_is_left_to_chain(tmp_path / "node")


async def test_a_stop_chains_what_was_only_durable(
    tmp_path: Path, database: Database, superuser: asyncpg.Connection, launch: Launch
) -> None:
    child = await launch(tmp_path / "node", database.service_url, **SETTINGS)
    async with writer(await child.ready(), Book()) as one:
        await one.created("GLOBAL")
        await superuser.execute("BEGIN; LOCK scheduler.chain_heads IN EXCLUSIVE MODE")
        for _ in range(20):
            await one.created("LOCAL")
    child.signal(signal.SIGTERM)
    await child.says_line("Finished server process")
    await superuser.execute("ROLLBACK")
    assert await child.ended(AT_ONCE_S) == 0
    nothing_is_left_to_chain(tmp_path / "node")


async def readiness_until_gone(other: Writer) -> AsyncIterator[int]:
    """Answers of ``/readyz`` until nobody answers."""
    while True:
        try:
            yield (await other.readiness())[0]
        except aiohttp.ClientError:
            return


async def test_a_write_that_cannot_reach_its_level_in_time_is_told_where_it_stands(
    tmp_path: Path, database: Database, superuser: asyncpg.Connection, launch: Launch
) -> None:
    book = Book()
    child = await launch(tmp_path / "node", database.service_url, write__timeout="1m", **SHORT)
    url = await child.ready()
    async with writer(url, book) as one:
        await one.created("GLOBAL")
        durable_lsn = await durable_after_the_start(one)
        await superuser.execute("BEGIN; LOCK scheduler.chain_heads IN EXCLUSIVE MODE")
        waiting = asyncio.ensure_future(one.create("GLOBAL"))
        await one.until("durable_lsn", durable_lsn + 1)
        assert await child.terminate(GRACE_S) == 0
        assert (await waiting).problem == "durability-timeout"
        await superuser.execute("ROLLBACK")
    child = await launch(tmp_path / "node", database.service_url, **SETTINGS)
    url = await child.ready()
    await verified_by_service(url, book.tenants())
    assert await child.terminate(AT_ONCE_S) == 0
    await prove(book, database.superuser_url, [wal_folder(tmp_path / "node")])


async def test_idle_and_half_sent_connections_do_not_delay_a_stop(
    tmp_path: Path, database: Database, launch: Launch
) -> None:
    child = await launch(tmp_path / "node", database.service_url, **SETTINGS)
    address = urlsplit(await child.ready())
    idle = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    half = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Len"
    with open_connections(address.hostname, address.port, [b"", idle, half] * 20):
        assert await child.terminate(AT_ONCE_S) == 0


async def test_a_request_whose_body_never_comes_is_answered_and_does_not_keep_the_process(
    tmp_path: Path, database: Database, launch: Launch
) -> None:
    child = await launch(tmp_path / "node", database.service_url, **SHORT)
    address = urlsplit(await child.ready())
    half = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(half)
    await writer.drain()
    async with http_session() as session, session.get(f"{address.geturl()}/livez") as answer:
        assert answer.status == 200
    assert await child.terminate(GRACE_S) == 0
    said = await reader.read()
    writer.close()
    assert said.startswith(b"HTTP/1.1 503 ")
    assert b"problems/not-ready" in said


@contextmanager
def open_connections(host: str | None, port: int | None, sent: list[bytes]) -> Iterator[None]:
    """One connection for each of ``sent``, on which that was sent; a whole request has been answered."""
    connections = [socket.create_connection((host, port), timeout=10) for _ in sent]
    try:
        for connection, data in zip(connections, sent, strict=True):
            connection.sendall(data)
            if data.endswith(b"\r\n\r\n"):
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        yield
    finally:
        for connection in connections:
            connection.close()


async def test_a_stop_while_postgres_is_down_or_hangs_ends_in_time_and_the_next_start_drains(
    tmp_path: Path, mortal_postgres: EmbeddedPostgres, mortal_database: Database, launch: Launch
) -> None:
    book, data_dir = Book(), tmp_path / "node"
    for away in (down, frozen):
        child = await launch(data_dir, mortal_database.service_url, **SHORT)
        url = await child.ready()
        async with writer(url, book) as one:
            await one.created("GLOBAL")
            async with away(mortal_postgres):
                for _ in range(20):
                    await one.created("LOCAL")
                assert await child.terminate(GRACE_S) == 0
    child = await launch(data_dir, mortal_database.service_url, **SETTINGS)
    url = await child.ready()
    await verified_by_service(url, book.tenants())
    assert await child.terminate(AT_ONCE_S) == 0
    await prove(book, mortal_database.superuser_url, [wal_folder(data_dir)])


@asynccontextmanager
async def down(server: EmbeddedPostgres) -> AsyncIterator[None]:
    """PostgreSQL was killed."""
    kill_server(server)
    yield
    await asyncio.to_thread(server.ensure_alive)


@asynccontextmanager
async def frozen(server: EmbeddedPostgres) -> AsyncIterator[None]:
    """PostgreSQL takes connections and does nothing."""
    pid = server.postmaster_pid()
    assert pid is not None
    postmaster = psutil.Process(pid)
    # It first: then no child is new, and none of those that end is gone.
    postmaster.suspend()
    children = postmaster.children(recursive=True)
    try:
        for child in children:
            child.suspend()
        yield
    finally:
        for process in (*children, postmaster):
            process.resume()


@EACH
async def test_a_start_that_waits_for_postgres_can_be_stopped(
    tmp_path: Path, launch: Launch, number: signal.Signals
) -> None:
    with socket.socket() as silent:
        # Bound, so that nobody else can listen there, and not listening.
        silent.bind(("127.0.0.1", 0))
        host, port = silent.getsockname()
        child = await launch(tmp_path / "node", f"postgresql://nobody@{host}:{port}/none", **SETTINGS)
        await until(lambda: list((tmp_path / "node").glob("wal/*/LOCK")) or child.returncode, "it starts", WAIT_S)
        assert child.returncode is None
        child.signal(number)
        assert await child.ended(AT_ONCE_S) == 0
    assert "Traceback" not in child.last_words()


async def test_tally_dev_stopped_under_load_takes_its_postgres_along(
    open_folder: Path, launch: Launch, seed: int
) -> None:
    load, server = Load(random.Random(seed)), await asyncio.to_thread(server_with_schema, open_folder / "postgres")
    child = await launch(open_folder, None, **SETTINGS)
    async with load.on(await child.ready()):
        await load.book.more_acknowledged(100)
        pid = server.postmaster_pid()
        assert pid is not None
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        # As Ctrl-\ in a terminal sends it.
        child.signal(signal.SIGQUIT)
        assert await child.ended() == 0
    assert not [process for process in processes if process.is_running() and runs(process.pid)]

    child = await launch(open_folder, None, **SETTINGS)
    url = await child.ready()
    assert child.events("wal_recovery_cut_torn_tail") == []
    for ignored in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN):
        child.signal(ignored)
    await load.repeat_keyed(url)
    await verified_by_service(url, load.book.tenants())
    child.signal(signal.SIGHUP)
    assert await child.ended() == 0, child.last_words()
    assert server.postmaster_pid() is None
    server.start()
    try:
        await prove(load.book, server.superuser_url(), [wal_folder(open_folder)])
    finally:
        server.stop()


async def test_tally_dev_stopped_while_it_starts_leaves_no_postgres_behind(open_folder: Path, launch: Launch) -> None:
    server = EmbeddedPostgres(open_folder / "postgres")
    moments = (
        ("starting PostgreSQL in", signal.SIGINT),
        ("schema_migration", signal.SIGTERM),
        ("wal_epoch_bump", signal.SIGHUP),
    )
    for said, number in moments:
        child = await launch(open_folder, None, **SETTINGS)
        await child.says_line(said)
        child.signal(number)
        assert await child.ended() == 0, child.last_words()
        assert server.postmaster_pid() is None
        assert "Traceback" not in child.last_words()


def be_told_to_end(mangled: bool) -> None:
    """A signal whose exception is lost in what it interrupts, or comes out of it as another."""
    with contextlib.suppress(CommandExit):
        signal.raise_signal(signal.SIGTERM)
    if mangled:
        raise ValueError("what a driver makes of it")


@pytest.mark.parametrize("mangled", [True, False])
def test_a_signal_while_it_starts_ends_it_whatever_became_of_what_the_signal_raised(mangled: bool) -> None:
    handlers = {number: signal.getsignal(number) for number in stop_signals.STOP_SIGNALS}
    try:
        with pytest.raises(CommandExit) as ended, StopWhileStarting().unwinding():
            be_told_to_end(mangled)
        assert ended.value.code == 0
        with pytest.raises(ValueError, match="its own"), StopWhileStarting().unwinding():
            raise ValueError("its own")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Dying:
    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def __del__(self) -> None:
        if self._error is not None:
            raise self._error
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_a_destructor_drops_ends_it_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    handlers = {number: signal.getsignal(number) for number in stop_signals.STOP_SIGNALS}
    try:
        with pytest.raises(CommandExit), StopWhileStarting().unwinding():
            Dying()
        assert capsys.readouterr().err == ""
        Dying(ValueError("its own"))
        assert "ValueError: its own" in capsys.readouterr().err
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_signal_before_the_loop_runs_waits_for_its_handler_there() -> None:
    async def serving() -> None:
        asked = asyncio.Event()
        stop_signals.handle(asked.set)
        await asyncio.wait_for(asked.wait(), AT_ONCE_S)

    handlers = {number: signal.getsignal(number) for number in stop_signals.STOP_SIGNALS}
    try:
        with StopWhileStarting().unwinding():
            stop_signals.hold()
            signal.raise_signal(signal.SIGTERM)
        uvloop.run(serving())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
