"""PostgreSQL killed under load: LOCAL writes go on, the others wait or fail with an identity, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from app.dev.embedded import EmbeddedPostgres
from tests.app.chains import until
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.load import Book, Load
from tests.crash.proof import prove, verified_by_service, wal_folder
from tests.crash.serve_process import WAIT_S
from tests.crash.writer import writer
from tests.server_copies import server_with_schema

ROUNDS = 2
SETTINGS = {"chain__batch_size": 50, "chain__batch_interval": "300ms", "write__timeout": "5s"}


async def test_local_writes_go_on_while_postgres_is_down_and_the_backlog_drains_when_it_is_back(
    tmp_path: Path, mortal_postgres: EmbeddedPostgres, mortal_database: Database, launch: Launch
) -> None:
    book = Book()
    child = await launch(tmp_path / "node", mortal_database.service_url, **SETTINGS)
    url = await child.ready()
    # What a start does once it answers is not done yet.
    kill_server(mortal_postgres)
    async with writer(url, book) as one:
        # LOCAL goes on, for a new tenant too; what asks for more is in the WAL, and the answer says where.
        for _ in range(20):
            await one.created("LOCAL")
        await one.created("LOCAL", tenant_id="born-while-down")
        for late in await asyncio.gather(*(one.create(level) for level in ("REGIONAL", "GLOBAL", None))):
            assert late.problem == "durability-timeout"
            assert late.answered.told["achieved"] == "LOCAL"
            assert {"job_id", "hlc", "epoch", "lsn"} <= late.answered.told.keys()
        status, text = await one.readiness()
        assert status == 503
        assert "database" in text

        await asyncio.to_thread(mortal_postgres.ensure_alive)
        await one.ready()
    await verified_by_service(url, book.tenants())
    assert await child.terminate() == 0
    await prove(book, mortal_database.superuser_url, [wal_folder(tmp_path / "node")])


async def test_a_keyed_write_that_timed_out_is_answered_when_it_is_repeated_after_postgres_came_back(
    tmp_path: Path, mortal_postgres: EmbeddedPostgres, mortal_database: Database, launch: Launch
) -> None:
    book = Book()
    holder = await asyncpg.connect(mortal_database.superuser_url)
    child = await launch(tmp_path / "node", mortal_database.service_url, **SETTINGS)
    async with writer(await child.ready(), book) as one:
        await one.created("GLOBAL")
        await holder.execute("BEGIN; LOCK scheduler.chain_heads IN EXCLUSIVE MODE")
        keyed = await one.create("GLOBAL", key="once")
        assert keyed.problem == "durability-timeout"
        identity = keyed.answered.told
        kill_server(mortal_postgres)
        await asyncio.to_thread(mortal_postgres.ensure_alive)
        await one.ready()
        book.note(keyed, await keyed.send(one.session, one.url))
        assert keyed.is_acknowledged
        assert [keyed.answered.told[name] for name in ("hlc", "lsn")] == [identity["hlc"], identity["lsn"]]
        assert (await keyed.send(one.session, one.url)).same() == keyed.answered.same()
    assert await child.terminate() == 0
    holder.terminate()
    await prove(book, mortal_database.superuser_url, [wal_folder(tmp_path / "node")])


async def test_postgres_dying_while_a_node_starts_ends_the_start_with_a_reason_or_is_waited_out(
    tmp_path: Path, mortal_postgres: EmbeddedPostgres, mortal_database: Database, launch: Launch
) -> None:
    book = Book()
    child = await launch(tmp_path / "node", mortal_database.service_url, **SETTINGS)
    await child.says("wal_epoch_bump")
    kill_server(mortal_postgres)
    url = await child.ready_or_ended()
    if url is None:
        assert child.returncode == 1
        assert child.lines[-1].startswith("error: "), child.last_words()
        await asyncio.to_thread(mortal_postgres.ensure_alive)
        child = await launch(tmp_path / "node", mortal_database.service_url, **SETTINGS)
        url = await child.ready()
    async with writer(url, book) as one:
        await one.created("LOCAL")
        await asyncio.to_thread(mortal_postgres.ensure_alive)
        await one.ready()
    await verified_by_service(url, book.tenants())
    assert await child.terminate() == 0
    await prove(book, mortal_database.superuser_url, [wal_folder(tmp_path / "node")])


BACKENDS = (
    "SELECT pid FROM pg_stat_activity"
    " WHERE datname = $1 AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
)

COMMITTING = """
    SELECT pid FROM pg_stat_activity a JOIN pg_locks l USING (pid)
     WHERE a.datname = $1 AND a.state = 'active' AND a.query = 'COMMIT;'
       AND l.relation = 'scheduler.wal_positions'::regclass
"""
"""The backend that chains, at the moment that it commits."""
COMMIT_LOOKS_MAX = 2000


class Fault:
    """What happens to PostgreSQL in one round."""

    def __init__(self, draw: random.Random, server: EmbeddedPostgres, database: Database) -> None:
        self._draw = draw
        self._server = server
        self._database = database

    async def strike(self) -> None:
        """One fault, drawn; PostgreSQL runs again afterwards."""
        kinds = (
            self._kill_server,
            self._kill_commit,
            self._kill_commit,
            self._stop_and_start,
            self._terminate_backends,
        )
        kind = self._draw.choice(kinds)
        await kind()
        await asyncio.to_thread(self._server.ensure_alive)

    async def _connect(self) -> asyncpg.Connection:
        """A connection, as soon as the server recovered from the fault before."""
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(asyncpg.CannotConnectNowError):
                    return await asyncpg.connect(self._database.superuser_url)

    async def _kill_server(self) -> None:
        kill_server(self._server)

    async def _kill_commit(self) -> None:
        """The chaining backend is killed while it commits; the postmaster ends all others and recovers."""
        connection = await self._connect()
        try:
            for _ in range(COMMIT_LOOKS_MAX):
                if pid := await connection.fetchval(COMMITTING, self._database.name):
                    os.kill(pid, signal.SIGKILL)
                    # Else the next connection may be one that is about to be ended.
                    await until(connection.is_closed, "the postmaster has ended all others", WAIT_S)
                    return
        finally:
            connection.terminate()

    async def _stop_and_start(self) -> None:
        await asyncio.to_thread(self._server.stop)
        await asyncio.to_thread(self._server.start)

    async def _terminate_backends(self) -> None:
        connection = await self._connect()
        try:
            for _ in range(self._draw.choice((1, 3, 10))):
                await connection.execute(f"SELECT pg_terminate_backend(pid) FROM ({BACKENDS}) b", self._database.name)
        finally:
            await connection.close()


@pytest.mark.torture
@pytest.mark.timeout(0)
async def test_postgres_killed_and_stopped_at_any_moment_loses_nothing_and_repeats_nothing(
    tmp_path: Path,
    mortal_postgres: EmbeddedPostgres,
    mortal_database: Database,
    launch: Launch,
    seed: int,
    torture_rounds: Callable[[int], int],
) -> None:
    draw = random.Random(seed)
    load = Load(draw)
    fault = Fault(draw, mortal_postgres, mortal_database)
    data_dir = tmp_path / "node"
    child = await launch(data_dir, mortal_database.service_url, **SETTINGS)
    url = await child.ready()
    for _ in range(torture_rounds(ROUNDS)):
        async with load.on(url):
            await load.book.more_acknowledged(int(draw.choice((1, 30, 150)) * draw.random()))
            await fault.strike()
            if draw.random() < 0.3:
                await child.kill()
        if child.returncode is not None:
            child = await launch(data_dir, mortal_database.service_url, **SETTINGS)
            url = await child.ready()
    async with writer(url, load.book) as one:
        await one.ready()
        await one.until("chained_lsn", (await one.positions())["durable_lsn"])
    await load.repeat_keyed(url)
    await verified_by_service(url, load.book.tenants())
    assert await child.terminate() == 0
    await prove(load.book, mortal_database.superuser_url, [wal_folder(data_dir)])


async def test_tally_dev_starts_its_postgres_again_when_it_was_killed(open_folder: Path, launch: Launch) -> None:
    book, server = Book(), await asyncio.to_thread(server_with_schema, open_folder / "postgres")
    child = await launch(open_folder, None)
    url = await child.ready()
    async with writer(url, book) as one:
        for _ in range(2):
            await one.created("GLOBAL")
            kill_server(server)
            await one.created("LOCAL")
            await one.created("GLOBAL")
    await verified_by_service(url, book.tenants())
    assert await child.terminate() == 0
    assert server.postmaster_pid() is None
    server.start()
    try:
        await prove(book, server.superuser_url(), [wal_folder(open_folder)])
    finally:
        server.stop()


def kill_server(server: EmbeddedPostgres) -> None:
    """SIGKILL to the postmaster; returns once it is dead."""
    pid = server.postmaster_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while server.postmaster_pid() is not None:
        pass
