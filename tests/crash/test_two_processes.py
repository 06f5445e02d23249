"""Two processes that take themselves for the same node: one is refused, or one is fenced, and nothing doubles."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from pathlib import Path

import aiohttp
import asyncpg

from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.load import Load
from tests.crash.proof import prove, verified_by_service, wal_folder
from tests.crash.writer import writer
from tests.running_copy import copy_running

WAITING = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
"""Sessions of a database that wait for a lock. A statement that may commit by itself does so once it has the lock,
whatever became of who sent it."""


async def test_a_second_process_on_the_same_wal_is_refused_and_one_whose_wal_was_copied_is_fenced(
    tmp_path: Path, database: Database, launch: Launch, superuser: asyncpg.Connection, seed: int
) -> None:
    load, data_dir, copy = Load(random.Random(seed)), tmp_path / "node", tmp_path / "copy"
    # The first must not give up its request for having slept, however long the second takes to start.
    first = await launch(data_dir, database.service_url, write__timeout="300s")
    url = await first.ready()
    async with writer(url, load.book) as one:
        await one.created("GLOBAL")
        # 1. A second one on the same WAL is refused in one line, and the first goes on.
        second = await launch(data_dir, database.service_url)
        assert await second.ended() == 1
        assert len(second.lines) == 1
        assert second.lines[0].startswith(f"error: WAL folder {wal_folder(data_dir)} is in use by process {first.pid}")
        await one.created("GLOBAL")
        # 2. The first hangs in the middle of chaining, for as long as it takes to be given up for dead.
        await superuser.execute("BEGIN; LOCK scheduler.chain_heads IN EXCLUSIVE MODE")
        cut_off = asyncio.ensure_future(one.create("GLOBAL"))
        await lock_awaited(superuser)
        first.signal(signal.SIGSTOP)
        await superuser.execute(f"SELECT pg_terminate_backend(pid, 60000) {WAITING}")
        await superuser.execute("ROLLBACK")
        # 3. A copy of its WAL is started elsewhere and takes over.
        copy_running(data_dir, copy)
        second = await launch(copy, database.service_url)
        second_url = await second.ready()
        async with load.on(second_url):
            await load.book.more_acknowledged(100)
            # 4. The first wakes up and takes itself for the writer.
            first.signal(signal.SIGCONT)
            assert (await cut_off).problem == "fenced"
            with contextlib.suppress(aiohttp.ClientError):
                # It may be gone already; if it still answers, then with a refusal.
                assert (await one.create("GLOBAL")).problem == "fenced"
            assert await first.ended() == 1
            await load.book.more_acknowledged(100)
    (reject,) = first.events("wal_fencing_reject")
    assert (reject["epoch"], reject["newer_epoch"]) == (1, 2)

    await load.repeat_keyed(second_url)
    await verified_by_service(second_url, load.book.tenants())
    assert await second.terminate() == 0
    await prove(load.book, database.superuser_url, [wal_folder(copy)])

    # 5. What the first has in its WAL and not in the chain must not pass for the end of the other's WAL.
    first = await launch(data_dir, database.service_url)
    assert await first.ended() == 1
    assert first.lines[-1].startswith("error: Postgres knows node"), first.last_words()
    assert "--accept-lost-wal" in first.lines[-1]


async def lock_awaited(superuser: asyncpg.Connection) -> None:
    """Return once somebody waits for a lock in this database."""
    while not await superuser.fetchval(f"SELECT count(*) {WAITING}"):
        pass
